"""A beam search as a stream of the engine's: nothing for a while, then each beam as one answer. The rules:
`engine.requests.beam_search`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.engine.interface import Engine
from holdfast.engine.requests.beam_search import BeamSearch, one_token
from holdfast.errors import EngineError
from holdfast.records import AdapterRef, AnswerDelta, FinishReason, Logprob, SamplingParams
from holdfast.records.beams import BeamSearchParams, BeamSearchSequence


async def beam_answers(
    engine: Engine,
    prompt: list[int],
    params: BeamSearchParams,
    *,
    request_id: str,
    logprobs: int | None,
    priority: int,
    cache_salt: str,
    adapter: AdapterRef | None,
) -> AsyncIterator[AnswerDelta]:
    """`logprobs`: how many are shown beside the chosen token's; None: not even that."""
    search, asked = BeamSearch(len(prompt), params, engine.info.eos_token_ids), one_token(params)
    cached = 0

    async def next_of(ids: list[int], name: str, asked: SamplingParams) -> AnswerDelta:
        stream = await engine.generate(
            ids, asked, request_id=name, priority=priority, cache_salt=cache_salt, adapter=adapter
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

    for step in range(params.max_tokens):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(next_of([*prompt, *beam.tokens], f"{request_id}-{step}-{place}", asked))
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
    for index, beam in enumerate(search.best()):
        yield _answer(engine, beam, index, search, logprobs, cached)


def _answer(
    engine: Engine, beam: BeamSearchSequence, index: int, search: BeamSearch, logprobs: int | None, cached: int
) -> AnswerDelta:
    ended = bool(beam.tokens) and beam.tokens[-1] in search.ends and not search.params.ignore_eos
    shown = beam.tokens[:-1] if ended else beam.tokens
    told = beam.logprobs[: len(beam.tokens)]
    return AnswerDelta(
        index=index,
        text="" if engine.tokenizer is None else engine.tokenizer.decode(shown, skip_special_tokens=True),
        token_ids=beam.tokens,
        logprobs=None if logprobs is None else [_first(entry, logprobs) for entry in told],
        finish_reason=FinishReason(beam.finish_reason or "length"),
        stop_reason=beam.stop_reason,
        cached_tokens=cached,
    )


def _first(entry: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The chosen token, and the `count` likeliest."""
    likeliest = sorted(entry, key=lambda token: -entry[token].logprob)[:count]
    chosen = next(iter(entry))
    return {token: entry[token] for token in dict.fromkeys((chosen, *likeliest))}
