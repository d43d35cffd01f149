"""A beam search of the server: for an engine that is full or draining it is one request, from its begin to its end."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import SamplingParams
from holdfast.engine.fake import FakeEngine
from holdfast.errors import ContextLengthError, DrainingError, OverloadedError
from holdfast.records import AnswerDelta
from holdfast.records.beams import BeamSearchParams
from holdfast.server.response.beams import BeamStream


async def engine_for_two() -> FakeEngine:
    engine = FakeEngine(max_num_seqs=2, max_queued_requests=0)
    await engine.start()
    return engine


def search(engine: FakeEngine, prompt: list[int]) -> BeamStream:
    return BeamStream(
        engine,
        prompt,
        BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True),
        SamplingParams(n=2, max_tokens=3),
        request_id="s",
        logprobs=None,
        priority=0,
        cache_salt="",
        adapter=None,
    )


async def all_of(stream: BeamStream) -> list[AnswerDelta]:
    return [delta async for delta in stream]


async def test_a_running_search_is_finished_while_draining() -> None:
    engine = await engine_for_two()
    engine.pause()
    stream = search(engine, [65])
    await stream.open()
    answers = asyncio.create_task(all_of(stream))
    await engine.until(lambda: len(engine.received) == 1)
    with pytest.raises(OverloadedError):  # One beam at first; the second has its place.
        engine.check_room(1)
    draining = asyncio.create_task(engine.drain(3600))
    while not engine.draining:
        await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await engine.generate([65], SamplingParams(), request_id="new")
    engine.resume()
    assert [len(delta.token_ids) for delta in await answers] == [3, 3]
    await draining
    await stream.aclose()
    assert engine.unfinished == 0


async def test_a_search_that_was_never_begun_gives_its_places_back() -> None:
    engine = await engine_for_two()
    stream = search(engine, [65])
    await stream.open()
    assert engine.unfinished == 1
    await stream.aclose()
    assert engine.unfinished == 0
    engine.check_room(2)


async def test_a_prompt_that_is_too_long_is_refused_when_it_is_opened() -> None:
    engine = await engine_for_two()
    with pytest.raises(ContextLengthError):
        await search(engine, [65] * engine.max_model_len).open()
    assert engine.unfinished == 0
