"""/v1/embeddings: texts, token ids or messages in, a vector for each out. What one is: `engine.requests.embedding`.

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
from typing import Any, cast

import msgspec

from holdfast.engine.interface import Engine
from holdfast.engine.requests.embedding import PARAMS, finite, numbers, shortened
from holdfast.errors import EngineError, RequestError
from holdfast.footprint.cpu import TOLD_ENTRIES, TOLD_ENTRY_BYTES
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.middleware import Record
from holdfast.server.request.chat import chat_prompt
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.request.parse import (
    decode_object,
    no_priority,
    served_model,
    split_prompts,
    tokenizer_of,
    truncation_of,
)
from holdfast.server.request.template_workers import TemplateWorkers
from holdfast.server.request.tokenize_pool import TokenizePool, Truncation, encode_within
from holdfast.server.response.json_handler import Pieces
from holdfast.server.schema.auxiliary import EmbeddingBody
from holdfast.server.schema.fields import check_fields, convert, honoured_fields
from holdfast.server.schema.requests import ChatBody, PromptTokensDetails, Usage
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
        workers: TemplateWorkers,
        pool: TokenizePool,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._room = room
        self._workers = workers
        self._pool = pool

    async def answer(self, raw: bytes, record: Record) -> Pieces:
        given = decode_object(raw)
        chat = given.get("messages") is not None and given.get("input") is None
        fields = check_fields(given, _FIELDS | PROMPT_FIELDS if chat else _FIELDS)
        beside = {name: value for name, value in fields.items() if name in _FIELDS}
        body: EmbeddingBody = convert({"input": []} | beside if chat else fields, EmbeddingBody)
        record.model = served_model(body.model, self._settings)
        if body.priority and self._settings.scheduling_policy != "priority":
            raise no_priority()
        size = self._engine.info.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise RequestError(
                f"dimensions is {body.dimensions}; the embeddings of this model have {size}",
                needed=f"at most {size}",
                found=str(body.dimensions),
                field="dimensions",
            )
        cut = truncation_of(body, self._engine.info.max_model_len, None)
        prompts = [await self._read_chat(fields, cut, len(raw))] if chat else await self._read(body, cut, len(raw))
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

    async def _read_chat(self, fields: dict[str, Any], cut: Truncation | None, size_bytes: int) -> list[int]:
        """vLLM's: one vector of a conversation, as it was said and no further."""
        given = {name: value for name, value in fields.items() if name in PROMPT_FIELDS}
        body: ChatBody = convert({"add_generation_prompt": False} | given, ChatBody)
        prompt = await chat_prompt(
            *(body, fields.get("tools"), tokenizer_of(self._engine, "messages"), self._engine, self._settings),
            *(size_bytes, self._workers, self._pool, cut),
        )
        return prompt.ids

    async def _read(self, body: EmbeddingBody, cut: Truncation | None, size_bytes: int) -> list[list[int]]:
        context = self._engine.info.max_model_len
        texts, prompts = split_prompts(body.input, context, field="input", most=MAX_INPUTS, truncation=cut)
        if texts is not None:
            tokenizer = tokenizer_of(self._engine, "input")
            given, special = texts, body.add_special_tokens

            def encode() -> list[list[int]]:
                return [
                    encode_within(context, tokenizer, text, field="input", add_special_tokens=special, truncation=cut)
                    for text in given
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
        vector = delta.embedding
        if body.dimensions is not None:
            vector = shortened(vector, body.dimensions)
        return _Embedded(vector, delta.cached_tokens)


def _pieces(found: list[_Embedded], usage: Usage, name: str, model: str, encoding: str) -> Iterator[bytes]:
    """As numbers a vector takes some five times its bytes: so it becomes JSON when it is its turn."""
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    yield msgspec.json.encode(head)[:-1] + b',"data":['
    for place, one in enumerate(found):
        value = base64.b64encode(one.vector).decode() if encoding == "base64" else numbers(one.vector)
        comma = b"," if place else b""
        yield comma + b'{"index":%d,"object":"embedding","embedding":%b}' % (place, msgspec.json.encode(value))
    yield b'],"usage":%b}' % msgspec.json.encode(usage)
