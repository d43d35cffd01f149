"""One request between the handler and the engine: opens its streams, follows them, counts, and always closes them.

Knows the engine's interface and the meters; how answers look is in `serialize`, sending is in `handler`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import cast

import msgspec

from holdfast.engine.interface import Engine, engine_of
from holdfast.errors import RequestError
from holdfast.observability.metrics.registry import RequestMeter, ServingMetrics
from holdfast.records import AnswerDelta, FinishReason, SamplingParams
from holdfast.server.request.parse import GenerationRequest, token_name
from holdfast.server.response.beams import BeamStream
from holdfast.server.response.logprobs import CompletionLogprobsWriter, PromptLogprobs
from holdfast.server.response.serialize import ResponseChoice
from holdfast.server.schema.requests import PromptTokensDetails, Usage

Consumer = Callable[[ResponseChoice, AnswerDelta], Awaitable[None]]


class ClientGone(Exception):
    """Nobody is left to answer."""


class Conversation:
    """`open` then `follow`, and `close` in any case: closing early is what tells the engine to stop working."""

    def __init__(self, ask: GenerationRequest, engine: Engine, metrics: ServingMetrics) -> None:
        self._ask = ask
        self._engine = engine
        self._metrics = metrics
        self._streams: list[AsyncIterator[AnswerDelta]] = []
        self._meters: list[RequestMeter] = []
        prompts = len(ask.prompts)
        self._cached = [0] * prompts
        self._ending = FinishReason.ABORT
        firsts = ask.first_tokens if ask.first_tokens is not None else [None] * prompts
        name = token_name if ask.tokens_as_ids else None
        of_prompt = [PromptLogprobs(listed=not ask.stream, echoed_first=first, name=name) for first in firsts]
        self.answers = [
            ResponseChoice(index, of_prompt=of_prompt[index // ask.params.n], columns=CompletionLogprobsWriter(name))
            for index in range(prompts * ask.params.n)
        ]
        self.prompt_tokens = sum(len(prompt) for prompt in ask.prompts)
        self.completion_tokens = 0

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def ttft_s(self) -> float | None:
        known = [meter.ttft_s for meter in self._meters if meter.ttft_s is not None]
        return min(known, default=None)

    @property
    def finish_reason(self) -> str | None:
        """Of the first answer; the access log has room for one."""
        return self.answers[0].finish_reason

    def usage(self, *, without: int = 0) -> Usage:
        """`without`: tokens that are counted already and have not been shown."""
        shown = self.completion_tokens - without
        return Usage(self.prompt_tokens, shown, self.prompt_tokens + shown, PromptTokensDetails(self.cached_tokens))

    def beside(self, answer: ResponseChoice) -> list[ResponseChoice]:
        """The answers to the same prompt, this one among them."""
        first = answer.index - answer.index % self._ask.params.n
        return self.answers[first : first + self._ask.params.n]

    async def open(self) -> None:
        """Every prompt is taken, or the error is raised and none is left behind once `close` was called."""
        ask, many = self._ask, len(self._ask.prompts) > 1
        for position, prompt in enumerate(ask.prompts):
            params, room = self._within_context(ask.params, len(prompt))
            name = f"{ask.engine_id}-{position}" if many else ask.engine_id
            try:
                stream = await self._opened(prompt, params, room, name)
            except RequestError as error:
                if error.field == "prompt":  # Of ids, which is all that the engine knows.
                    error.field = ask.prompt_field
                raise
            self._streams.append(stream)
            self._meters.append(
                self._metrics.open_request(
                    prompt_tokens=len(prompt),
                    max_tokens=params.max_tokens or room,
                    n=params.n,
                    request_id=ask.answer_id,
                    model=ask.model,
                    engine=engine_of(stream),
                )
            )

    async def _opened(
        self, prompt: list[int], params: SamplingParams, room: int, name: str
    ) -> AsyncIterator[AnswerDelta]:
        ask = self._ask
        if ask.beams is None:
            return await self._engine.generate(
                prompt,
                params,
                request_id=name,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
                adapter=ask.adapter,
                progress=ask.stream and ask.members is not None and ask.members.progress,
            )
        beams = replace(ask.beams, max_tokens=max(min(params.max_tokens or room, room), 1))
        search = BeamStream(
            self._engine,
            prompt,
            beams,
            params,
            request_id=name,
            logprobs=ask.logprobs,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            adapter=ask.adapter,
        )
        await search.open()
        return search

    def _within_context(self, params: SamplingParams, prompt_tokens: int) -> tuple[SamplingParams, int]:
        """What is left behind the prompt, and parameters that ask for no more. As in vLLM `max_tokens` is the most a
        client wants; only more than the whole context is a mistake, which the engine's door refuses."""
        context = self._engine.info.max_model_len
        room, wanted = context - prompt_tokens, params.max_tokens
        if wanted is None or not wanted > room > 0:
            return params, room
        if self._ask.default_max_tokens:  # Nobody asked for so many.
            return params.replace(max_tokens=room, min_tokens=min(params.min_tokens, room)), room
        return params.replace(max_tokens=room) if wanted <= context else params, room

    async def follow(self, consume: Consumer) -> None:
        """Calls `consume` for each delta of each answer, those of one answer in order."""
        try:
            if len(self._streams) == 1:
                await self._follow_one(0, consume)
            else:
                await self._follow_all(consume)
        except ClientGone:
            raise
        except Exception:
            self._ending = FinishReason.ERROR
            raise

    async def _follow_all(self, consume: Consumer) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for position in range(len(self._streams)):
                    group.create_task(self._follow_one(position, consume))
        except ExceptionGroup as errors:
            # One prompt's failure fails the request, as for a single prompt; the others were cancelled.
            raise errors.exceptions[0] from None

    async def _follow_one(self, position: int, consume: Consumer) -> None:
        meter, first = self._meters[position], position * self._ask.params.n
        async for delta in self._streams[position]:
            if delta.prompt_computed:
                self.answers[first].cached_tokens = delta.cached_tokens
                await consume(self.answers[first], delta)
                continue
            if delta.prompt_logprobs is not None:
                await self.answers[first].of_prompt.take(delta.prompt_logprobs)
                if not delta.token_ids and delta.finish_reason is None:
                    continue
            meter.delta(delta)
            if self._ask.echoes_alone:
                delta = msgspec.structs.replace(delta, text="", token_ids=[], logprobs=None)
            self.completion_tokens += len(delta.token_ids)
            if delta.index == 0:
                self._cached[position] = max(self._cached[position], delta.cached_tokens)
            answer = self.answers[first + delta.index]
            if self._ask.with_token_ids:
                answer.token_ids += delta.token_ids
            answer.cached_tokens = self._cached[position]
            if delta.finish_reason is not None:
                answer.timing = delta.timing
                answer.finish_reason = delta.finish_reason.value
                answer.stop_reason = delta.stop_reason
            await consume(answer, delta)

    async def close(self) -> None:
        for stream in self._streams:
            close = cast("Callable[[], Awaitable[None]] | None", getattr(stream, "aclose", None))
            if close is not None:
                await close()
        for meter in self._meters:
            meter.close(self._ending)
        self._streams.clear()
