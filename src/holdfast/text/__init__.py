"""Text to token ids and back: tokenizer, chat templates, incremental detokenizer. No torch, no HTTP."""

from holdfast.text.checks import TextWarning, check_text
from holdfast.text.detokenizer import Detokenizer
from holdfast.text.template import load_template
from holdfast.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextWarning", "Tokenizer", "check_text", "load_template"]
