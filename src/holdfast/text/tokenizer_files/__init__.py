"""tokenizer.json read as what it is, a stranger's file: bounded, checked before it is run, then built by the library."""
