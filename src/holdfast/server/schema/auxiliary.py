"""The bodies of endpoints that do not generate, typed: vLLM's shapes. Meaning is given where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from holdfast.server.schema.requests import PROMPT_SCHEMA, Small, TokenId, Usage


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


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """In place of `input`, `messages` and what else makes a chat's prompt may stand."""

    input: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)]
    """A text, several, token ids, or several lists of them."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """The first so many numbers of a vector, at length 1 again."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Small = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str
    """Numbers, or float32 in little-endian order as base64."""


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
