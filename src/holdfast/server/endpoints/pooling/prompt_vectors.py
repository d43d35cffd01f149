"""Prompts of a body to token ids, and these through the engine to numbers: what all endpoints of this folder share.

ids ─► room for all vectors ─► a few at a time through the engine ─► bytes of float32, one vector a prompt

Knows nothing of what the numbers mean: `engine.requests.embedding` and `engine.requests.scoring` do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

from holdfast.engine.interface import Engine, engine_of
from holdfast.engine.requests.embedding import PARAMS, finite
from holdfast.errors import EngineError, RequestError
from holdfast.footprint.cpu import TOLD_ENTRIES, TOLD_ENTRY_BYTES
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.middleware import Record
from holdfast.server.request.chat import chat_prompt
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.request.parse import no_priority, served_model, split_prompts, tokenizer_of, truncation_of
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool, Truncation, encode_within
from holdfast.server.schema.fields import convert
from holdfast.server.schema.pooling import PoolingCommon
from holdfast.server.schema.requests import ChatBody, PromptTokensDetails, Usage
from holdfast.server.settings import ServerSettings

MAX_INPUTS = 2048
"""OpenAI's own limit."""
FLOAT_BYTES = 4


@dataclass(slots=True)
class PromptVector:
    vector: bytes
    cached_tokens: int


class PromptVectors:
    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        metrics: ServingMetrics,
        room: LogprobBudget,
        workers: TemplateWorkers,
        pool: TokenizePool,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.pool = pool
        self._metrics = metrics
        self._room = room
        self._workers = workers

    def begin(self, body: PoolingCommon, record: Record) -> Truncation | None:
        """Whom the request is for, and what is kept of prompts that are too long."""
        record.model = served_model(body.model, self.settings)
        if body.priority and self.settings.scheduling_policy != "priority":
            raise no_priority()
        return truncation_of(body, self.engine.info.max_model_len, None)

    async def read_chat(self, fields: dict[str, Any], cut: Truncation | None, size_bytes: int) -> list[int]:
        """vLLM's: one vector of a conversation, as it was said and no further."""
        given = {name: value for name, value in fields.items() if name in PROMPT_FIELDS}
        body: ChatBody = convert({"add_generation_prompt": False} | given, ChatBody)
        prompt = await chat_prompt(
            *(body, fields.get("tools"), tokenizer_of(self.engine, "messages"), self.engine, self.settings),
            *(size_bytes, self._workers, self.pool, cut),
        )
        return prompt.ids

    async def read(
        self, given: Any, cut: Truncation | None, size_bytes: int, *, special: bool = True, field: str = "input"
    ) -> list[list[int]]:
        context = self.engine.info.max_model_len
        texts, prompts = split_prompts(given, context, field=field, most=MAX_INPUTS, truncation=cut)
        if texts is not None:
            prompts = await self.read_texts(texts, cut, size_bytes, special=special, field=field)
        if not all(prompts):
            raise RequestError(f"{field}: a string has no tokens", field=field)
        return prompts

    async def read_texts(
        self, texts: list[str], cut: Truncation | None, size_bytes: int, *, special: bool = True, field: str
    ) -> list[list[int]]:
        tokenizer, context = tokenizer_of(self.engine, field), self.engine.info.max_model_len

        def encode() -> list[list[int]]:
            return [
                encode_within(context, tokenizer, text, field=field, add_special_tokens=special, truncation=cut)
                for text in texts
            ]

        return await self.pool.run(encode, size_bytes)

    async def hold(self, stack: AsyncExitStack, count: int, field: str) -> None:
        """Room for so many vectors. It is counted in log-probabilities, which is what the plan has set aside for."""
        info = self.engine.info
        entry_bytes = (len(info.labels) or info.hidden_size) * FLOAT_BYTES
        entries = -(-count * entry_bytes // TOLD_ENTRY_BYTES)
        if entries > TOLD_ENTRIES:
            raise RequestError(
                f"{field} has {count} strings, too many for one request",
                needed=f"at most {TOLD_ENTRIES * TOLD_ENTRY_BYTES // entry_bytes} per request",
                found=str(count),
                fix=f"split {field} into several requests",
                field=field,
            )
        await stack.enter_async_context(self._room.hold(entries))

    async def all_of(
        self,
        prompts: list[list[int]],
        body: PoolingCommon,
        record: Record,
        field: str = "input",
        shaped: Callable[[bytes], bytes] = lambda vector: vector,
    ) -> list[PromptVector]:
        """As many at a time as the engine runs: one request does not fill the queue of others. `shaped`: what is kept
        of a vector."""
        record.prompt_tokens, record.completion_tokens = sum(map(len, prompts)), 0
        places = asyncio.Semaphore(self.engine.info.max_num_seqs)
        name = record.answer_id or ""

        async def one(place: int) -> PromptVector:
            async with places:
                found = await self._vector(prompts[place], body, f"{name}-{place}", field)
                return PromptVector(shaped(found.vector), found.cached_tokens)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(place)) for place in range(len(prompts))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        vectors = [task.result() for task in tasks]
        record.cached_tokens = sum(one.cached_tokens for one in vectors)
        return vectors

    async def _vector(self, prompt: list[int], body: PoolingCommon, name: str, field: str) -> PromptVector:
        began_s = time.monotonic()
        try:
            stream = await self.engine.generate(
                prompt,
                PARAMS,
                request_id=name,
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=self.settings.adapter(body.model or ""),
                embed=True,
            )
        except RequestError as error:
            error.field = field if error.field == "prompt" else error.field  # As it is called here.
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
        took_s = time.monotonic() - began_s
        self._metrics.count_embedding(len(prompt), delta.cached_tokens, delta.fetched_tokens, took_s, engine_of(stream))
        return PromptVector(delta.embedding, delta.cached_tokens)


def usage_of(record: Record) -> Usage:
    """Of a request whose vectors are there."""
    prompt_tokens = record.prompt_tokens or 0
    return Usage(prompt_tokens, 0, prompt_tokens, PromptTokensDetails(record.cached_tokens or 0))
