"""/v1/embeddings: texts or token ids in, a vector for each out. What a vector is: `engine.requests.embedding`.

input ─► ids ─► room for all vectors ─► a few at a time through the engine ─► encoded while they are sent
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import msgspec

from holdfast.engine.interface import Engine
from holdfast.engine.requests.embedding import PARAMS, finite, numbers
from holdfast.errors import EngineError, RequestError
from holdfast.footprint.cpu import TOLD_ENTRIES, TOLD_ENTRY_BYTES
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta
from holdfast.server.http.middleware import Record
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.request.parse import decode_object, no_priority, served_model, split_prompts, tokenizer_of
from holdfast.server.request.tokenize_pool import TokenizePool, encode_within
from holdfast.server.response.json_handler import Pieces
from holdfast.server.schema.auxiliary import EmbeddingBody
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.requests import PromptTokensDetails, Usage
from holdfast.server.settings import ServerSettings

MAX_INPUTS = 2048
"""OpenAI's own limit."""
FLOAT_BYTES = 4

_FIELDS = honoured_fields(EmbeddingBody)


@dataclass(slots=True)
class _Embedded:
    vector: bytes
    cached_tokens: int


class Embeddings:
    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        metrics: ServingMetrics,
        room: LogprobBudget,
        pool: TokenizePool,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._room = room
        self._pool = pool

    async def answer(self, raw: bytes, record: Record) -> Pieces:
        given = decode_object(raw)
        if given.pop("dimensions", None) is not None:
            raise unsupported("dimensions", "the embedding of a decoder-only model cannot be truncated")
        body: EmbeddingBody = convert(check_fields(given, _FIELDS), EmbeddingBody)
        record.model = served_model(body.model, self._settings)
        if body.priority and self._settings.scheduling_policy != "priority":
            raise no_priority()
        prompts = await self._read(body, len(raw))
        record.answer_id = f"embd-{uuid.uuid4().hex}"
        record.prompt_tokens, record.completion_tokens = sum(map(len, prompts)), 0
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._room.hold(self._entries(len(prompts))))
            found = await self._embed_all(prompts, body, record.answer_id)
            resources = stack.pop_all()
        record.cached_tokens = sum(one.cached_tokens for one in found)
        usage = Usage(record.prompt_tokens, 0, record.prompt_tokens, PromptTokensDetails(record.cached_tokens))
        return Pieces(_pieces(found, usage, record.answer_id, record.model, body.encoding_format), resources)

    def _entries(self, count: int) -> int:
        """Room is counted in log-probabilities, which is what the plan has set aside for."""
        entry_bytes = self._engine.info.hidden_size * FLOAT_BYTES
        entries = -(-count * entry_bytes // TOLD_ENTRY_BYTES)
        if entries <= TOLD_ENTRIES:
            return entries
        most = TOLD_ENTRIES * TOLD_ENTRY_BYTES // entry_bytes
        raise RequestError(
            f"input has {count} strings, too many for one request",
            needed=f"at most {most} per request",
            found=str(count),
            fix="split the input into several requests",
            field="input",
        )

    async def _read(self, body: EmbeddingBody, size_bytes: int) -> list[list[int]]:
        context = self._engine.info.max_model_len
        texts, prompts = split_prompts(body.input, context, field="input", most=MAX_INPUTS)
        if texts is not None:
            tokenizer = tokenizer_of(self._engine, "input")
            given, special = texts, body.add_special_tokens

            def encode() -> list[list[int]]:
                return [
                    encode_within(context, tokenizer, text, field="input", add_special_tokens=special) for text in given
                ]

            prompts = await self._pool.run(encode, size_bytes)
        if not all(prompts):
            raise RequestError("input: a string has no tokens", field="input")
        return prompts

    async def _embed_all(self, prompts: list[list[int]], body: EmbeddingBody, name: str) -> list[_Embedded]:
        """As many at a time as the engine runs: one request does not fill the queue of others."""
        places = asyncio.Semaphore(self._engine.info.max_num_seqs)

        async def one(place: int) -> _Embedded:
            async with places:
                return await self._embed(prompts[place], body, f"{name}-{place}")

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(place)) for place in range(len(prompts))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _embed(self, prompt: list[int], body: EmbeddingBody, name: str) -> _Embedded:
        began_s = time.monotonic()
        try:
            stream = await self._engine.generate(
                prompt,
                PARAMS,
                request_id=name,
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=self._settings.adapter(body.model or ""),
                embed=True,
            )
        except RequestError as error:
            error.field = "input" if error.field == "prompt" else error.field  # As it is called here.
            raise
        try:
            delta = cast(AnswerDelta, await anext(stream))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        if delta.embedding is None:
            raise EngineError("the engine returned no embedding", request_id=name)
        if not finite(delta.embedding):
            raise EngineError(
                "the embedding contains NaN or infinite values: check the weights or the LoRA adapter",
                request_id=name,
            )
        self._metrics.count_embedding(len(prompt), delta.cached_tokens, time.monotonic() - began_s)
        return _Embedded(delta.embedding, delta.cached_tokens)


def _pieces(found: list[_Embedded], usage: Usage, name: str, model: str, encoding: str) -> Iterator[bytes]:
    """As numbers a vector takes some five times its bytes: so it becomes JSON when it is its turn."""
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    yield msgspec.json.encode(head)[:-1] + b',"data":['
    for place, one in enumerate(found):
        value = base64.b64encode(one.vector).decode() if encoding == "base64" else numbers(one.vector)
        comma = b"," if place else b""
        yield comma + b'{"index":%d,"object":"embedding","embedding":%b}' % (place, msgspec.json.encode(value))
    yield b'],"usage":%b}' % msgspec.json.encode(usage)
