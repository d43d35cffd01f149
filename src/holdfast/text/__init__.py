"""Text to token ids and back: tokenizer, chat templates, incremental detokenizer. No torch, no HTTP.

Names are imported when they are first used: the processes of `structured` and `templates` need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.text.checks import TextWarning, check_text
    from holdfast.text.detokenizer import Detokenizer
    from holdfast.text.templates.template import load_template
    from holdfast.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextWarning", "Tokenizer", "check_text", "load_template"]
_MODULES = {
    "Detokenizer": "detokenizer",
    "TextWarning": "checks",
    "Tokenizer": "tokenizer",
    "check_text": "checks",
    "load_template": "templates.template",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
