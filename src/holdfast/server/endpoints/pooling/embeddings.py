"""/v1/embeddings and /pooling: texts, token ids or messages in, numbers for each out, encoded while they are sent.

What an embedding is: `engine.requests.embedding`. /pooling has the chances of a classifier too.
"""

from __future__ import annotations

import array
import base64
import json
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from holdfast.engine.requests.embedding import numbers, shortened
from holdfast.engine.requests.scoring import chances, require_embeddings, require_labels
from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.server.endpoints.pooling.prompt_vectors import FLOAT_BYTES, PromptVector, PromptVectors, usage_of
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.middleware import Record
from holdfast.server.request.json_body import decode_object
from holdfast.server.response.json_handler import Pieces
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.pooling import EmbeddingBody, PoolingBody
from holdfast.server.schema.requests import Usage

_TASKS = ("embed", "classify")
LARGEST_FLOAT16 = 65504.0
MOST_METADATA_BYTES = 32 << 10
"""Of a header: half of what Python's clients read of one."""


class Embeddings:
    def __init__(self, vectors: PromptVectors) -> None:
        self._vectors = vectors

    async def answer(self, raw: bytes, record: Record) -> Pieces:
        require_embeddings(self._vectors.engine.info, "/v1/embeddings")
        return await self._answer(raw, record, EmbeddingBody, "embedding")

    async def pool(self, raw: bytes, record: Record) -> Pieces:
        """vLLM's: numbers as they are, whichever kind the model has."""
        return await self._answer(raw, record, PoolingBody, "data")

    async def _answer(self, raw: bytes, record: Record, kind: type[EmbeddingBody], member: str) -> Pieces:
        given, known = decode_object(raw), honoured_fields(kind)
        chat = given.get("messages") is not None and given.get("input") is None
        fields = check_fields(given, known | PROMPT_FIELDS if chat else known)
        beside = {name: value for name, value in fields.items() if name in known}
        body: EmbeddingBody = convert({"input": []} | beside if chat else fields, kind)
        cut = self._vectors.begin(body, record)
        activation = self._activation(body)
        self._check_dimensions(body)
        if chat:
            prompts = [await self._vectors.read_chat(fields, cut, len(raw))]
        else:
            prompts = await self._vectors.read(body.input, cut, len(raw), special=body.add_special_tokens)
        record.answer_id = f"{'embd' if member == 'embedding' else 'pool'}-{uuid.uuid4().hex}"

        def shaped(vector: bytes) -> bytes:
            if body.dimensions is not None:
                return shortened(vector, body.dimensions)
            return _packed(chances(numbers(vector), activation)) if activation else vector

        async with AsyncExitStack() as stack:
            await self._vectors.hold(stack, len(prompts), "input")
            found = await self._vectors.all_of(prompts, body, record, shaped=shaped)
            headers = _binary_headers(found, usage_of(record), record, body)
            resources = stack.pop_all()
        if headers is not None:
            return Pieces((binary(one.vector, body.embed_dtype, body.endianness) for one in found), resources, headers)
        return Pieces(_pieces(found, usage_of(record), record, body, member), resources)

    def _activation(self, body: EmbeddingBody) -> str:
        """What is done to what the engine tells; empty: nothing."""
        info = self._vectors.engine.info
        asked = body.task if isinstance(body, PoolingBody) else "embed"
        task = asked or ("classify" if info.labels else "embed")
        if task not in _TASKS:
            raise UnsupportedOptionError(
                f"Unsupported task: {task!r}: only the last token is pooled",
                needed=" or ".join(_TASKS),
                found=task,
                fix="leave task out",
                field="task",
            )
        if task == "embed":
            require_embeddings(info, "task embed")
            for name in ("use_activation", "normalize"):
                if getattr(body, name) is False:
                    raise unsupported(name, "embeddings are scaled to length 1")
            return ""
        require_labels(info, "task classify")
        return "" if False in (body.use_activation, body.normalize) else info.label_activation

    def _check_dimensions(self, body: EmbeddingBody) -> None:
        info = self._vectors.engine.info
        size = info.hidden_size
        if body.dimensions is not None and info.labels:
            raise unsupported("dimensions", "it shortens embeddings, and this model classifies")
        if body.dimensions is not None and body.dimensions > size:
            raise RequestError(
                f"dimensions is {body.dimensions}; the embeddings of this model have {size}",
                needed=f"at most {size}",
                found=str(body.dimensions),
                field="dimensions",
            )


def _packed(values: list[float]) -> bytes:
    packed = array.array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def binary(vector: bytes, dtype: str, endianness: str) -> bytes:
    """`vector`: float32, little end first."""
    order = sys.byteorder if endianness == "native" else endianness
    if dtype == "float32" and order == "little":
        return vector
    mark, count = "<" if order == "little" else ">", len(vector) // FLOAT_BYTES
    if dtype == "float16":
        values = (min(max(value, -LARGEST_FLOAT16), LARGEST_FLOAT16) for value in numbers(vector))
        return struct.pack(f"{mark}{count}e", *values)
    words = struct.unpack(f"<{count}I", vector)
    if dtype == "bfloat16":
        return struct.pack(f"{mark}{count}H", *map(_bfloat16, words))
    return struct.pack(f"{mark}{count}I", *words)


def _bfloat16(word: int) -> int:
    """The upper half, rounded to the nearest, to even where two are as near. What is no number stays none: rounding
    would carry it into the sign."""
    if word & 0x7FFFFFFF > 0x7F800000:
        return word >> 16 | 0x40
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def _binary_headers(
    found: list[PromptVector], usage: Usage, record: Record, body: EmbeddingBody
) -> tuple[tuple[bytes, bytes], ...] | None:
    """Of vLLM's own formats: the numbers alone; in `bytes` a header says where each vector lies. None: it is JSON."""
    if not body.encoding_format.startswith("bytes"):
        return None
    headers = ((b"content-type", b"application/octet-stream"),)
    if body.encoding_format == "bytes_only":
        return headers
    width, at, data = 4 if body.embed_dtype == "float32" else 2, 0, list[dict[str, Any]]()
    for index, one in enumerate(found):
        count = len(one.vector) // FLOAT_BYTES
        item = {"index": index, "embed_dtype": body.embed_dtype, "endianness": body.endianness, "start": at}
        data.append(item | {"end": at + count * width, "shape": [count]})
        at += count * width
    told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
    said = {"id": record.answer_id, "created": int(time.time()), "model": record.model, "data": data, "usage": told}
    metadata = json.dumps(said).encode()
    if len(metadata) > MOST_METADATA_BYTES:
        raise RequestError(
            f"the header that says where {len(found)} vectors lie would have {len(metadata):,} bytes",
            needed=f"at most {MOST_METADATA_BYTES:,}, which clients read",
            fix="encoding_format bytes_only or base64, or fewer inputs",
            field="encoding_format",
        )
    return *headers, (b"metadata", metadata)


def _pieces(
    found: list[PromptVector], usage: Usage, record: Record, body: EmbeddingBody, member: str
) -> Iterator[bytes]:
    """As numbers a vector takes some five times its bytes: so it becomes JSON when it is its turn."""
    head = {"id": record.answer_id, "object": "list", "created": int(time.time()), "model": record.model}
    kind = b"embedding" if member == "embedding" else b"pooling"
    yield msgspec.json.encode(head)[:-1] + b',"data":['
    for place, one in enumerate(found):
        if body.encoding_format == "base64":
            value: Any = base64.b64encode(binary(one.vector, body.embed_dtype, body.endianness)).decode()
        else:
            value = numbers(one.vector)
        comma = b"," if place else b""
        encoded = msgspec.json.encode(value)
        yield comma + b'{"index":%d,"object":"%b","%b":%b}' % (place, kind, member.encode(), encoded)
    yield b'],"usage":%b}' % msgspec.json.encode(usage)
