"""What lies in tests/data/tokenizers, and tokenizers with its small vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.text.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "data" / "tokenizers"
TEXTS: list[str] = json.loads((FOLDER / "texts.json").read_text())
VOCABULARIES: dict[str, dict[str, Any]] = json.loads((FOLDER / "vocabularies.json").read_text())
SMALL: dict[str, dict[str, Any]] = json.loads((FOLDER / "small.json").read_text())


def small(name: str) -> Tokenizer:
    if not name.startswith("sentencepiece"):
        return Tokenizer.from_gguf_metadata(VOCABULARIES["byte_level"] | {"tokenizer.ggml.pre": name})
    prefix = {"tokenizer.ggml.add_space_prefix": name.endswith("with prefix")}
    return Tokenizer.from_gguf_metadata(VOCABULARIES["sentencepiece"] | prefix)
