"""Text to token ids and back: tokenizer, chat templates, incremental detokenizer. No torch, no HTTP."""

from holdfast.text.detokenizer import Detokenizer
from holdfast.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
