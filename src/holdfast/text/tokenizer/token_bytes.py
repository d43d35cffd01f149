"""The bytes each token adds to the text, for the two decoding schemes of this field.

Owns the rule from token to bytes, which lets a stream be decoded in constant time a token. Does not know streams,
stop strings or which tokens are skipped.

    byte level     every character of a token stands for one byte; added tokens that do not fit are UTF-8 text
    byte fallback  ▁ is a space, <0xAB> is a byte, everything else is UTF-8 text; one space is cut off at the start
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {0x100 + index: byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TokenPieces:
    """`bytes_of` is cached for good: a vocabulary is finite, and its tokens repeat."""

    def __init__(self, backend: Tokenizer, *, byte_level: bool, cuts_first_space: bool) -> None:
        self._backend = backend
        self.byte_level = byte_level
        self.cuts_first_space = cuts_first_space
        """One space at the very start of a text is the tokenizer's own and is not shown."""
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids without a token: embeddings are often padded beyond the vocabulary."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self.spell(token_id)
        return known

    def spell(self, token_id: int) -> bytes:
        """The same, and not kept: for whoever goes through all of them once."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)

    def _spell(self, token: str) -> bytes:
        if self.byte_level:
            spelled = [_BYTE_OF.get(ord(character)) for character in token]
            whole = [byte for byte in spelled if byte is not None]
            return bytes(whole) if len(whole) == len(spelled) else token.encode()
        byte_token = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte_token[1], 16)]) if byte_token else token.replace("▁", " ").encode()


def pieces_of(backend: Tokenizer) -> TokenPieces | None:
    """None when the decoder is neither scheme: then a text can only be decoded as a whole."""
    if backend.decoder is None:
        return None
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenPieces(backend, byte_level=True, cuts_first_space=False)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0].get("content") != " ":
        return None
    if steps[0].get("pattern") != {"String": "▁"} or len(steps) > 4:
        return None
    if len(steps) == 3:
        return TokenPieces(backend, byte_level=False, cuts_first_space=False)
    strip = steps[3]
    if (strip["type"], strip.get("content"), strip.get("start"), strip.get("stop")) != ("Strip", " ", 1, 0):
        return None
    return TokenPieces(backend, byte_level=False, cuts_first_space=True)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]
