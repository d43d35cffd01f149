"""Tokenizers: files judged before they are run, vocabularies of GGUF headers, bytes of tokens."""
