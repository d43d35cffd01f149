"""The front's side of the engine process, with pretended processes that say what a test lets them say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from deadlines import PATIENCE_S
from pretended_engine import INFO, Harbour, PretendedChild, until

from holdfast import SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.process import client, protocol, restarts
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.process.heartbeat import LEAST_LIMIT_S, LOADING_FACTOR
from holdfast.engine.process.quarantine import CRASHES_IN_ALL
from holdfast.engine.requests import stream
from holdfast.engine.startup.build import find_model
from holdfast.errors import (
    DoesNotFitError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineHungError,
    NoResourcesError,
    OverloadedError,
    RequestError,
)
from holdfast.records import (
    AnswerDelta,
    EngineOutput,
    FinishReason,
    RequestTiming,
    SleepingKV,
    TokenLogprobs,
)

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.fixture
async def harbour(monkeypatch) -> Harbour:
    found = Harbour()
    monkeypatch.setattr(client.Child, "spawn", found.spawn)
    monkeypatch.setattr(restarts, "RETRY_DELAY_S", 0.0)
    return found


@pytest.fixture
async def engine(harbour, tiny_model) -> AsyncIterator[ProcessEngine]:
    config = EngineConfig(
        model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4, max_queued_requests=4
    )
    made = ProcessEngine(config, find_model(config), None)
    await made.start()
    yield made
    await made.stop()


async def ask(engine: ProcessEngine, name: str, **params):
    return await engine.generate([1, 2, 3], SamplingParams(max_tokens=20, **params), request_id=name)


def token(
    name: str, *ids: int, reason: FinishReason | None = None, timing: RequestTiming | None = None
) -> EngineOutput:
    return EngineOutput(request_id=name, token_ids=list(ids), finish_reason=reason, timing=timing)


async def test_the_innocent_go_on_and_poison_is_ended(engine, harbour) -> None:
    streams = {name: await ask(engine, name) for name in ("a", "poison", "b")}
    harbour.last.tell(token("a", 7), token("b", 8))
    assert (await anext(streams["a"])).token_ids == [7]
    for count in (2, 3):
        harbour.last.die()
        await until(lambda count=count: len(harbour.children) == count and harbour.last.handed_over)
        if count == 2:
            assert harbour.last.handed_over == {"a": [7], "poison": [], "b": [8]}
    new = await ask(engine, "new")
    assert harbour.last.handed_over == {"a": [7]}  # the first suspect, all alone
    harbour.last.tell(token("a", 9))
    await until(lambda: "poison" in harbour.last.handed_over)
    assert list(harbour.last.handed_over) == ["a", "poison"]
    harbour.last.die()
    with pytest.raises(EngineDiedError, match="on this request repeatedly") as caught:
        await anext(streams["poison"])
    assert caught.value.code == "HF410"
    await until(lambda: len(harbour.children) == 4 and harbour.last.handed_over)
    assert harbour.last.handed_over == {"b": [8]}
    harbour.last.tell(token("b", 10))
    await until(lambda: len(harbour.last.handed_over) == 3)
    assert harbour.last.handed_over == {"b": [8], "a": [7, 9], "new": []}
    ended = [token(name, 11, reason=FinishReason.LENGTH) for name in ("a", "b", "new")]
    harbour.last.tell(*ended)
    assert [delta.token_ids for delta in [delta async for delta in streams["a"]]] == [[9], [11]]
    assert [delta.token_ids for delta in [delta async for delta in streams["b"]]] == [[8], [10], [11]]
    assert [delta.token_ids for delta in [delta async for delta in new]] == [[11]]
    assert (engine.ready, engine.failure, engine.unfinished, engine.restarts) == (True, None, 0, 3)


async def test_while_it_does_not_answer_it_is_not_ready_and_who_comes_waits(engine, harbour) -> None:
    before = await ask(engine, "before")
    harbour.last.stay_silent(LEAST_LIMIT_S / 2)
    assert (engine.ready, engine.unresponsive.code) == (False, "HF412")
    late = await ask(engine, "late")
    assert list(harbour.last.handed_over) == ["before"]
    harbour.last.said.put_nowait(protocol.Beat())
    await until(lambda: "late" in harbour.last.handed_over)
    assert (engine.ready, engine.unresponsive, engine.restarts) == (True, None, 0)
    harbour.last.tell(*[token(name, 7, reason=FinishReason.LENGTH) for name in ("before", "late")])
    assert [(await anext(one)).token_ids for one in (before, late)] == [[7], [7]]


async def test_a_process_knows_whether_another_has_served_before_it(engine, harbour) -> None:
    """Nodes of the one before are needed for it, and for the next where it does not start."""
    harbour.next_starts = [EngineError("node 1 (rank 1) has not joined", code="HF446"), None]
    harbour.last.die()
    await until(lambda: len(harbour.children) == 3 and engine.ready)
    assert [asked[-1] for asked in harbour.asked] == [False, True, True]


async def test_what_hangs_the_engine_each_time_is_ended_for_that(engine, harbour) -> None:
    streams = {name: await ask(engine, name) for name in ("a", "poison")}
    for count in (2, 3, 4):
        harbour.last.tell(token("a", count))
        assert (await anext(streams["a"])).token_ids == [count]
        harbour.last.stay_silent(LEAST_LIMIT_S)
        await until(lambda count=count: len(harbour.children) == count and harbour.last.handed_over)
    with pytest.raises(EngineHungError, match="hung on this request repeatedly") as caught:
        await anext(streams["poison"])
    assert caught.value.code == "HF412"
    assert (engine.restarts, engine.hangs) == (3, 3)
    harbour.last.tell(token("a", 5, reason=FinishReason.LENGTH))
    assert (await anext(streams["a"])).token_ids == [5]


async def test_a_start_that_hangs_is_ended_and_tried_again(engine, harbour) -> None:
    running = await ask(engine, "a")
    harbour.next_starts = ["silent"]
    harbour.last.die()
    await until(lambda: len(harbour.children) == 2)
    assert engine.starting.startswith("starting; the last sign of progress was 0 s ago")
    harbour.last.stay_silent(LOADING_FACTOR * LEAST_LIMIT_S - 1)
    assert "599 s ago" in engine.starting
    assert not harbour.last.watch.hung
    harbour.last.stay_silent(1)
    await until(lambda: len(harbour.children) == 3 and harbour.last.handed_over)
    assert (engine.restarts, engine.hangs, engine.starting) == (2, 1, "")
    harbour.last.tell(token("a", 7, reason=FinishReason.LENGTH))
    assert (await anext(running)).token_ids == [7]


async def test_a_process_that_cannot_be_started_is_tried_again(engine, harbour) -> None:
    stream = await ask(engine, "a")
    harbour.next_starts = [EngineDiedError("no files left"), DoesNotFitError("no memory left"), None]
    harbour.last.die()
    await until(lambda: len(harbour.children) == 4 and harbour.last.handed_over)
    assert harbour.last.handed_over == {"a": []}
    await stream.aclose()


async def test_a_lack_of_files_is_waited_out_however_long(engine, harbour) -> None:
    stream = await ask(engine, "a")
    lack = [NoResourcesError("no files left")] * (5 * restarts.MAX_FRUITLESS_STARTS)
    # What fails for other reasons meanwhile still counts, but not with the lack.
    harbour.next_starts = [EngineDiedError("once"), *lack, EngineDiedError("twice"), *lack, None]
    tried = len(harbour.next_starts)
    harbour.last.die()
    await until(lambda: len(harbour.children) == 1 + tried and harbour.last.handed_over)
    assert harbour.last.handed_over == {"a": []}
    assert engine.failure is None
    assert engine.restarts == 3  # One death and two failed starts; where nothing was started nothing is counted.
    await stream.aclose()


async def test_what_a_process_says_at_last_is_what_clients_hear(engine, harbour, caplog) -> None:
    """A disk that fails while answers are computed: by the code of that, not as a crash of nobody knows what."""
    stream = await ask(engine, "a")
    broken = EngineError("a layer could not be read", code="HF443", found="Input/output error", fix="another disk")
    for count in range(2, CRASHES_IN_ALL + 2):
        harbour.last.said.put_nowait(protocol.StepFailed(protocol.pack_failure(broken)))
        harbour.last.die()
        await until(lambda count=count: len(harbour.children) == count and engine.ready)
        if not engine.unfinished:
            break
    with pytest.raises(EngineDiedError, match="a layer could not be read") as caught:
        await anext(stream)
    assert (caught.value.code, caught.value.found, caught.value.fix) == ("HF443", "Input/output error", "another disk")
    assert "restarting it [HF443]" in caplog.text
    # And where no process can be started again for it.
    harbour.next_starts = [broken] * restarts.MAX_FRUITLESS_STARTS
    stream = await ask(engine, "b")
    harbour.last.die()
    with pytest.raises(EngineDiedError, match="failed to start 4 times") as caught:
        await anext(stream)
    assert (caught.value.code, caught.value.fix) == ("HF443", "another disk")


def test_pauses_grow_to_a_bound_and_only_other_reasons_give_up() -> None:
    backoff = restarts.RestartBackoff()
    backoff.died(with_requests=True)
    assert backoff.delay_s == 0.0
    pauses = []
    for _ in range(1000):
        backoff.failed(NoResourcesError("no files left"))
        backoff.check()
        pauses.append(backoff.delay_s)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(pauses[4:]) == {restarts.MAX_RETRY_DELAY_S}
    for _ in range(restarts.MAX_FRUITLESS_STARTS):
        backoff.check()
        backoff.failed(EngineDiedError("broken"))
    with pytest.raises(EngineDiedError, match=r"4 times in a row.*broken"):
        backoff.check()


@pytest.mark.parametrize("idle", [True, False])
async def test_an_engine_that_dies_for_nothing_is_given_up(engine, harbour, idle) -> None:
    if idle:
        for count in range(1, restarts.MAX_FRUITLESS_STARTS + 1):
            await until(lambda count=count: len(harbour.children) == count and engine.ready)
            harbour.last.die()
            await until(lambda: not engine.ready)
    else:
        stream = await ask(engine, "a")
        harbour.next_starts = [EngineDiedError("no files left")] * restarts.MAX_FRUITLESS_STARTS
        harbour.last.die()
        with pytest.raises(EngineDiedError, match="no files left"):
            await anext(stream)
    await until(lambda: engine.failure is not None)
    assert engine.failure.code == "HF410"
    with pytest.raises(EngineDiedError):
        await ask(engine, "b")


async def test_deaths_with_output_between_them_end_nobody(engine, harbour) -> None:
    stream = await ask(engine, "a")
    for count in range(1, CRASHES_IN_ALL):
        await until(lambda count=count: len(harbour.children) == count and harbour.last.handed_over)
        harbour.last.tell(token("a", count))
        harbour.last.die()
        assert (await anext(stream)).token_ids == [count]
    assert engine.failure is None
    await stream.aclose()


async def test_what_cannot_be_followed_ends_everybody(engine, harbour) -> None:
    stream = await ask(engine, "a")
    harbour.last.said.put_nowait(ValueError("no message"))
    with pytest.raises(EngineError, match="ValueError: no message"):
        await anext(stream)
    assert engine.failure is not None
    assert not engine.ready


async def test_one_unreadable_answer_ends_alone(engine, harbour, monkeypatch) -> None:
    bad, good = await ask(engine, "bad"), await ask(engine, "good")
    monkeypatch.setattr(engine._open["bad"][0], "take", lambda output: 1 / 0)
    engine.on_step(lambda stats: 1 / 0)
    harbour.last.tell(token("bad", 1), token("good", 2))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await anext(bad)
    assert (await anext(good)).token_ids == [2]
    assert protocol.Abort(["bad"]) in harbour.last.heard
    harbour.last.tell(token("good", 3))
    assert (await anext(good)).token_ids == [3]
    await good.aclose()


async def test_what_cannot_be_put_into_words_ends_alone(engine, harbour, monkeypatch) -> None:
    send = harbour.last.send

    def sent(message: protocol.ToEngine) -> None:
        if isinstance(message, protocol.Add) and any(one.request_id == "odd" for one in message.requests):
            raise OverflowError("can't serialize integers >64 bits")
        send(message)

    monkeypatch.setattr(harbour.last, "send", sent)
    odd, plain = await ask(engine, "odd"), await ask(engine, "plain")
    with pytest.raises(EngineError, match="cannot send the request to the engine"):
        await anext(odd)
    harbour.last.tell(token("plain", 5))
    assert (await anext(plain)).token_ids == [5]
    assert engine.unfinished == 1


async def test_times_are_those_of_the_first_engine(engine, harbour) -> None:
    stream = await ask(engine, "a")
    first = RequestTiming(arrival_s=1.0, scheduled_s=2.0, first_token_s=3.0, finished_s=3.0)
    harbour.last.tell(token("a", 1, timing=first))
    assert (await anext(stream)).timing is None
    harbour.last.die()
    await until(lambda: len(harbour.children) == 2 and harbour.last.handed_over)
    later = RequestTiming(arrival_s=1.0, scheduled_s=12.0, first_token_s=13.0, finished_s=14.0)
    harbour.last.tell(token("a", 2, reason=FinishReason.LENGTH, timing=later))
    timing = (await anext(stream)).timing
    assert timing == RequestTiming(arrival_s=1.0, scheduled_s=2.0, first_token_s=3.0, finished_s=14.0)


async def test_room_for_several_answers(engine, harbour) -> None:
    with pytest.raises(RequestError, match=r"9 completions.*8") as caught:
        engine.check_room(9)
    assert not isinstance(caught.value, OverloadedError)
    with pytest.raises(RequestError, match="9 completions"):
        await ask(engine, "a", n=9)
    stream = await ask(engine, "a", n=8)
    with pytest.raises(OverloadedError):
        engine.check_room(1)
    with pytest.raises(OverloadedError):
        await ask(engine, "b")
    await stream.aclose()
    engine.check_room(8)
    with contextlib.suppress(StopAsyncIteration):
        await anext(stream)
    assert engine.unfinished == 0


async def test_a_search_that_was_taken_is_finished_though_all_is_full_or_draining(engine, harbour) -> None:
    async def step(name: str) -> AsyncIterator[AnswerDelta]:
        return await engine.generate([1, 2], SamplingParams(max_tokens=1), request_id=name, search_id="s")

    with pytest.raises(RequestError, match="maximum context length"):
        await engine.open_search([1] * 100, SamplingParams(n=3, max_tokens=5), search_id="s")
    await engine.open_search([1], SamplingParams(n=3, max_tokens=5), search_id="s")
    others = await ask(engine, "others", n=5)
    with pytest.raises(OverloadedError):
        engine.check_room(1)
    steps = [await step(f"s-0-{place}") for place in range(3)]
    assert engine.unfinished == 2
    harbour.last.tell(*(token(f"s-0-{place}", 7, reason=FinishReason.LENGTH) for place in range(3)))
    assert [(await anext(one)).token_ids for one in steps] == [[7]] * 3
    with pytest.raises(OverloadedError):
        engine.check_room(1)
    await others.aclose()
    draining = asyncio.create_task(engine.drain(3600))
    await until(lambda: engine.draining)
    with pytest.raises(DrainingError):
        await ask(engine, "new")
    await (await step("s-1-0")).aclose()
    assert not draining.done()
    await engine.close_search("s")
    await draining
    assert engine.unfinished == 0


async def test_a_drain_ends_searches_that_take_too_long(engine) -> None:
    await engine.open_search([1], SamplingParams(n=3, max_tokens=5), search_id="s")
    await engine.drain(0)
    with pytest.raises(DrainingError):
        await engine.generate([1], SamplingParams(max_tokens=1), request_id="s-0-0", search_id="s")
    assert engine.unfinished == 0


def scored(name: str, likeliest: int) -> EngineOutput:
    places = list(range(likeliest + 1))
    return EngineOutput(
        request_id=name, token_ids=[1], logprobs=[TokenLogprobs(token_ids=places, logprobs=[0.0] * len(places), rank=1)]
    )


async def test_what_nobody_reads_is_bounded_and_harms_nobody_else(engine, harbour, monkeypatch) -> None:
    engine._waiting.free = room = 400
    slow, reading = await ask(engine, "slow", logprobs=20), await ask(engine, "reading")
    told = 0
    while not any(isinstance(message, protocol.Abort) for message in harbour.last.heard):
        harbour.last.tell(scored("slow", 20), token("reading", 5))
        assert (await anext(reading)).token_ids == [5]
        told += 1
    assert told == (room + stream.OWN_ENTRIES) // (21 + stream.OF_A_DELTA) + 1
    assert engine._waiting.free == room
    assert engine.unfinished == 1
    with pytest.raises(OverloadedError, match="read more slowly"):
        await anext(slow)
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    harbour.last.tell(token("reading", 6, reason=FinishReason.LENGTH))
    assert [delta.token_ids async for delta in reading] == [[6]]
    assert engine.unfinished == 0


async def test_who_reads_at_last_gives_the_room_back(engine, harbour) -> None:
    room = engine._waiting.free
    answers = await ask(engine, "late", logprobs=20)
    for _ in range(20):
        harbour.last.tell(scored("late", 20))
    harbour.last.tell(token("late", 7, reason=FinishReason.LENGTH))
    await until(lambda: engine._waiting.free == room - (20 * 23 + 2 - stream.OWN_ENTRIES))
    assert len([delta async for delta in answers]) == 21
    assert engine._waiting.free == room
    left = await ask(engine, "left", logprobs=20)
    for _ in range(20):
        harbour.last.tell(scored("left", 20))
    await until(lambda: engine._waiting.free < room)
    await left.aclose()
    assert engine._waiting.free == room


async def test_the_budget_that_was_requested_is_kept_apart_from_what_was_granted(engine, monkeypatch) -> None:
    """Settings that are read again are held against it: the same ones ask for nothing."""

    async def change(now: object, tier: str, budget_bytes: int, send: object) -> SimpleNamespace:
        config = dataclasses.replace(engine._config, vram=5 * budget_bytes)
        return SimpleNamespace(config=config, plan=None, info=engine.info)

    monkeypatch.setattr(client.Serving, "of", lambda *_: None)
    monkeypatch.setattr(engine._budget, "change", change)
    await engine.set_memory_budget("vram", 1 << 30)
    assert engine.budgets == {"ram": None, "vram": 1 << 30}
    assert engine._config.vram == 5 << 30  # With which a process is started again.


async def test_a_reset_of_the_cache_reaches_an_engine_that_sleeps_or_wakes(engine, harbour) -> None:
    """What was kept of prompts would be found by it else, though whoever asked was told that it is gone."""

    def resets() -> int:
        return sum(isinstance(message, protocol.ResetPrefixCache) for message in harbour.last.heard)

    await engine.sleep(level=2)
    engine._kept.kept = SleepingKV(identity=b"", pages_path="/nowhere", index_path="/nowhere", held_bytes=1)
    await engine.reset_prefix_cache()
    assert engine._kept.kept is None
    await engine.wake_up()
    assert resets() == 1
    await engine.sleep(level=2)
    harbour.next_starts = ["silent"]
    waking = asyncio.create_task(engine.wake_up())
    await until(lambda: len(harbour.children) == 3)
    await engine.reset_prefix_cache()
    harbour.last.said.put_nowait(protocol.Ready(INFO))
    await waking
    assert resets() == 1
    await engine.sleep(level=2)
    await engine.wake_up()
    assert resets() == 0


async def test_a_wake_up_that_is_given_up_leaves_no_process_behind(engine, harbour, monkeypatch) -> None:
    stopped = list[object]()

    async def stop(child: PretendedChild, *, at_once: bool = False) -> None:
        stopped.append(child)

    await engine.sleep(level=2)
    monkeypatch.setattr(PretendedChild, "stop", stop)
    harbour.next_starts = ["silent"]
    waking = asyncio.create_task(engine.wake_up())
    await until(lambda: len(harbour.children) == 2)
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert stopped == [harbour.last]
    assert (engine.pid, engine.sleeping) == (None, True)
    await engine.wake_up()
    assert engine.ready


async def test_a_server_that_ends_does_not_wait_for_pages_to_be_kept(engine, harbour) -> None:
    """Nobody reads the answer any more."""
    sleeping = asyncio.create_task(engine.sleep(level=1))
    await until(lambda: any(isinstance(message, protocol.KeepKV) for message in harbour.last.heard))
    await engine.stop()
    async with asyncio.timeout(PATIENCE_S / 2):
        await sleeping
