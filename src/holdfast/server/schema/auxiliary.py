"""The bodies of endpoints that do not generate, typed: vLLM's shapes. Meaning is given where they are read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.server.schema.requests import TokenId


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of a text. In place of `prompt`, `messages` and what else makes a chat's prompt may stand."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class TokenizedPiece(msgspec.Struct, kw_only=True):
    """A token as llama.cpp tells it."""

    id: int
    piece: str | list[int]
    """Bytes, where it is no text by itself."""


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: Sequence[int | TokenizedPiece]
    """Pieces with llama.cpp's `with_pieces`."""
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str
    content: str | msgspec.UnsetType = msgspec.UNSET
    """llama.cpp's name for the same, for requests that name no model, as its own do not."""
