"""tokenizer.json read as a stranger's file: bounded, checked before it is run, then built by the library."""
