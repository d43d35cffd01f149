"""A beam search as a stream of the engine's: nothing for a while, then each beam as one answer. The engine holds places
for its steps from `open` to `aclose`. The rules: `engine.requests.beam_search`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from holdfast.engine.interface import Engine
from holdfast.engine.requests.beam_search import BeamSearch, one_token
from holdfast.errors import EngineError
from holdfast.records import AdapterRef, AnswerDelta, FinishReason, Logprob, SamplingParams
from holdfast.records.beams import BeamSearchParams, BeamSearchSequence


class BeamStream(AsyncIterator[AnswerDelta]):
    """A class, because a generator that was never begun cannot give its places back."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        params: BeamSearchParams,
        asked: SamplingParams,
        *,
        request_id: str,
        logprobs: int | None,
        priority: int,
        cache_salt: str,
        adapter: AdapterRef | None,
    ) -> None:
        """`asked`: what the client asked for, of which the search is made. `logprobs`: how many are shown beside the
        chosen token's; None: not even that."""
        self._engine, self._prompt, self._params, self._asked = engine, prompt, params, asked
        self._request_id, self._logprobs = request_id, logprobs
        self._priority, self._cache_salt, self._adapter = priority, cache_salt, adapter
        self._search = BeamSearch(len(prompt), params, engine.info.eos_token_ids)
        self._answers = self._run()
        self.engine = 0
        """Its number, once it is open."""

    async def open(self) -> None:
        """Raises what `Engine.generate` would of the whole request."""
        self.engine = await self._engine.open_search(
            self._prompt, self._asked, search_id=self._request_id, adapter=self._adapter
        )

    async def __anext__(self) -> AnswerDelta:
        return await anext(self._answers)

    async def aclose(self) -> None:
        await self._answers.aclose()
        await self._engine.close_search(self._request_id)

    async def _run(self) -> AsyncGenerator[AnswerDelta, None]:
        search, token, cached = self._search, one_token(self._params), 0
        for step in range(self._params.max_tokens):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._next_of(beam, f"{self._request_id}-{step}-{place}", token))
                        for place, beam in enumerate(search.beams)
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            deltas = [task.result() for task in tasks]
            if not step:
                cached = deltas[0].cached_tokens
            search.expand([delta.logprobs[0] if delta.logprobs else {} for delta in deltas])
            if not search.beams:
                break
        await self._engine.close_search(self._request_id)  # Who reads slowly keeps no places.
        for index, beam in enumerate(search.best()):
            yield self._answer(beam, index, cached)

    async def _next_of(self, beam: BeamSearchSequence, name: str, token: SamplingParams) -> AnswerDelta:
        stream = await self._engine.generate(
            [*self._prompt, *beam.tokens],
            token,
            request_id=name,
            priority=self._priority,
            cache_salt=self._cache_salt,
            adapter=self._adapter,
            search_id=self._request_id,
        )
        try:
            async for delta in stream:
                if delta.logprobs:
                    return delta
            raise EngineError("the engine returned no logprobs", request_id=name)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _answer(self, beam: BeamSearchSequence, index: int, cached: int) -> AnswerDelta:
        ended = bool(beam.tokens) and beam.tokens[-1] in self._search.ends and not self._params.ignore_eos
        shown, tokenizer = beam.tokens[:-1] if ended else beam.tokens, self._engine.tokenizer
        skipped = self._asked.skip_special_tokens
        told = beam.logprobs[: len(beam.tokens)]
        return AnswerDelta(
            index=index,
            text="" if tokenizer is None else tokenizer.decode(shown, skip_special_tokens=skipped),
            token_ids=beam.tokens,
            logprobs=None if self._logprobs is None else [_first(entry, self._logprobs) for entry in told],
            finish_reason=FinishReason(beam.finish_reason or "length"),
            stop_reason=beam.stop_reason,
            cached_tokens=cached,
        )


def _first(entry: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The chosen token, and the `count` likeliest."""
    likeliest = sorted(entry, key=lambda token: -entry[token].logprob)[:count]
    chosen = next(iter(entry))
    return {token: entry[token] for token in dict.fromkeys((chosen, *likeliest))}
