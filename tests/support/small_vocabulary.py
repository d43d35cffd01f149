"""A vocabulary small enough to go through whole: every byte, some words and parts of JSON, two special tokens."""

from __future__ import annotations

import numpy

from holdfast.records.structured import StructuredOutputsParams, Vocabulary
from holdfast.text.structured.llguidance_backend import Grammars, Matcher

WORDS = [
    '{"', '":', '",', '"}', "[]", "{}", "true", "false", "null", "12", "123", "  ", "\n", "yes", "no", "ab", "abc",
    "name", '"name"', "é", "日本", "<", "<t", "ool", ">", "</", "red", "green", "blue", "-", "0", " 1",
]  # fmt: skip
END, CALL = 256 + len(WORDS), 257 + len(WORDS)
VOCABULARY = Vocabulary(
    [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"<|end|>", b"<|call|>"],
    {"<|end|>": END, "<|call|>": CALL},
)
SIZE = CALL + 20
"""With rows that have no token."""


def small_grammars() -> Grammars:
    return Grammars(VOCABULARY, [END], SIZE)


def allowed_by(matcher: Matcher) -> set[int]:
    bits = numpy.unpackbits(numpy.frombuffer(matcher.mask(), dtype=numpy.uint8), bitorder="little")
    assert not bits[SIZE:].any()
    return set(numpy.flatnonzero(bits).tolist())


def accepts(grammars: Grammars, params: StructuredOutputsParams, text: str | bytes) -> bool:
    """Whether the whole of a text, byte by byte, has the form."""
    matcher = grammars.matcher(params)
    data = text.encode() if isinstance(text, str) else text
    return matcher.consume_all(list(data)) and matcher.library.is_accepting()
