"""Text to token ids and back: tokenizers, chat templates, output parsing, structured output. No torch, no HTTP."""
