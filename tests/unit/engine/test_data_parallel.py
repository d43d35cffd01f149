"""Several engines behind one front, with pretended processes that say what a test lets them say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pretended_engine import INFO, Harbour, PretendedChild, until

from holdfast import SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.data_parallel import engine as data_parallel
from holdfast.engine.data_parallel.engine import DataParallelEngine
from holdfast.engine.data_parallel.sums import sum_info, sum_stats
from holdfast.engine.interface import engine_of
from holdfast.engine.offline.unsupported import refuse_several_engines
from holdfast.engine.process import client, protocol, restarts
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.process.heartbeat import LEAST_LIMIT_S
from holdfast.engine.requests.front_parts import FrontParts
from holdfast.engine.startup.build import find_model
from holdfast.errors import (
    DoesNotFitError,
    EngineDiedError,
    EngineError,
    OverloadedError,
    RequestError,
    SleepingError,
    UnsupportedOptionError,
)
from holdfast.records import EngineOutput, EngineStats, FinishReason, KVStoreUse, KVTierUse

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.fixture
async def harbour(monkeypatch) -> Harbour:
    found = Harbour()
    monkeypatch.setattr(client.Child, "spawn", found.spawn)
    monkeypatch.setattr(restarts, "RETRY_DELAY_S", 0.0)
    return found


@pytest.fixture
def made(tiny_model) -> DataParallelEngine:
    config = EngineConfig(
        model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4, max_queued_requests=4,
        data_parallel_size=2, seed=7,
    )  # fmt: skip
    model = find_model(config)
    parts = FrontParts.of(config, None, model.spec)
    return DataParallelEngine(
        config, [ProcessEngine(config, model, None, parts=parts.lent(number)) for number in range(2)], parts
    )


@pytest.fixture
async def engine(harbour, made) -> AsyncIterator[DataParallelEngine]:
    await made.start()
    yield made
    await made.stop()


async def ask(engine: DataParallelEngine, name: str, prompt: list[int] | None = None, **params):
    params = {"max_tokens": 20, **params}
    return await engine.generate(prompt or [1, 2, 3], SamplingParams(**params), request_id=name)


def token(name: str, *ids: int, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(request_id=name, token_ids=list(ids), finish_reason=reason)


def seeds(child: PretendedChild) -> dict[str, int | None]:
    added = [one for message in child.heard if isinstance(message, protocol.Add) for one in message.requests]
    return {one.request_id: one.params.seed for one in added}


async def test_requests_are_spread_and_say_where_they_are(engine, harbour) -> None:
    streams = [await ask(engine, f"r{place}") for place in range(4)]
    assert [engine_of(stream) for stream in streams] == [0, 1, 0, 1]
    assert list(harbour.children[0].handed_over) == ["r0", "r2"]
    assert engine.unfinished == 4
    harbour.children[1].tell(token("r1", 5, reason=FinishReason.LENGTH))
    assert [delta.token_ids async for delta in streams[1]] == [[5]]
    await streams[0].aclose()
    assert protocol.Abort(["r0"]) in harbour.children[0].heard
    assert not [message for message in harbour.children[1].heard if isinstance(message, protocol.Abort)]


async def test_seeds_are_those_of_one_engine(engine, harbour) -> None:
    for place in range(4):
        await ask(engine, f"r{place}", temperature=1.0)
    drawn = seeds(harbour.children[0]) | seeds(harbour.children[1])
    expected = FrontParts.of(EngineConfig(seed=7), None, find_model(EngineConfig()).spec).seeds
    assert [drawn[f"r{place}"] for place in range(4)] == [expected.getrandbits(62) for _ in range(4)]


async def test_many_that_wait_are_not_counted_for_each_that_comes(engine, monkeypatch) -> None:
    """What comes meanwhile is, or all of it would go to one engine."""
    counted, count = list[object](), data_parallel._tokens
    monkeypatch.setattr(data_parallel, "COUNTED_ANEW", 1)
    monkeypatch.setattr(data_parallel, "COUNTED_S", 3600.0)
    monkeypatch.setattr(data_parallel, "_tokens", lambda one: counted.append(one) or count(one))
    streams = [await ask(engine, f"r{place}", [place] * (90 if place == 4 else 10), max_tokens=2) for place in range(9)]
    assert [engine_of(stream) for stream in streams] == [0, 1, 0, 1, 0, 1, 1, 0, 1], "one has four places"
    assert 4 <= len(counted) < 9


async def test_the_queue_is_one_for_all(engine) -> None:
    for place in range(12):  # Two engines with four places each, and four that wait.
        await ask(engine, f"r{place}")
    with pytest.raises(OverloadedError):
        await ask(engine, "one too many")


async def test_one_that_dies_is_started_alone(engine, harbour) -> None:
    first, second = [await ask(engine, name) for name in ("a", "b")]
    harbour.children[0].tell(token("a", 5))
    assert (await anext(first)).token_ids == [5]
    harbour.children[0].die()
    await until(lambda: len(harbour.children) == 3)
    assert engine.ready
    harbour.children[1].tell(token("b", 6))
    assert (await anext(second)).token_ids == [6]
    await until(lambda: "a" in harbour.last.handed_over)
    assert harbour.last.handed_over == {"a": [5]}
    assert (engine.restarts, engine.members[0].restarts, engine.members[1].restarts) == (1, 1, 0)
    await first.aclose()
    await second.aclose()


async def test_nothing_new_goes_to_one_that_restarts_or_hangs(engine, harbour) -> None:
    harbour.next_starts = ["silent"]
    harbour.children[0].die()
    await until(lambda: len(harbour.children) == 3)
    assert engine.ready
    streams = [await ask(engine, f"r{place}") for place in range(3)]
    assert [engine_of(stream) for stream in streams] == [1, 1, 1]
    harbour.children[1].stay_silent(LEAST_LIMIT_S / 2)
    assert engine.unresponsive is not None
    assert not engine.ready
    harbour.last.said.put_nowait(protocol.Ready(INFO))
    await until(lambda: engine.ready)
    assert engine.unresponsive is None
    assert engine_of(await ask(engine, "r3")) == 0


async def test_one_that_is_given_up_leaves_the_others(engine, harbour) -> None:
    stream = await ask(engine, "kept", [9] * 40)
    await ask(engine, "other", [8] * 40)
    harbour.next_starts = [EngineDiedError("no")] * 50
    harbour.children[1].die()
    await until(lambda: engine.members[1].failure is not None)
    assert engine.failure is None
    assert engine.ready
    assert engine_of(await ask(engine, "next")) == 0
    harbour.children[0].tell(token("kept", 5, reason=FinishReason.LENGTH))
    assert [delta.token_ids async for delta in stream] == [[5]]
    harbour.children[0].die()
    await until(lambda: engine.failure is not None)


async def test_a_start_that_fails_ends_the_others(made, harbour) -> None:
    harbour.next_starts = ["silent", DoesNotFitError("too large", needed="2", found="1")]
    with pytest.raises(DoesNotFitError, match="too large"):
        await asyncio.wait_for(made.start(), 60)
    assert not made.ready
    await made.stop()


async def test_all_sleep_and_all_wake(engine, harbour) -> None:
    stream = await ask(engine, "a")
    await engine.sleep(level=2)  # At level 1 a child would keep prefixes, which these do not.
    assert engine.sleeping
    assert not engine.ready
    with pytest.raises(SleepingError):
        await anext(stream)
    with pytest.raises(SleepingError):
        await ask(engine, "b")
    await engine.wake_up()
    assert engine.ready
    assert len(harbour.children) == 4


async def test_a_cache_that_was_reset_draws_no_prompts(engine, harbour) -> None:
    prompt = list(range(64))
    assert engine_of(await ask(engine, "a", prompt)) == 0
    harbour.children[0].tell(token("a", 1, reason=FinishReason.LENGTH))
    await until(lambda: engine.unfinished == 0 or not engine.members[0].open_requests)
    again = await ask(engine, "b", prompt)
    assert (again.engine, again.saved_tokens) == (0, 48)
    await engine.reset_prefix_cache()
    for child in harbour.children:
        assert protocol.ResetPrefixCache() in child.heard
    assert (await ask(engine, "c", prompt)).saved_tokens == 0


async def test_a_search_stays_on_its_engine(engine, harbour) -> None:
    assert await engine.open_search([1], SamplingParams(n=3, max_tokens=5), search_id="s") == 0
    for place in range(3):
        stream = await engine.generate([1], SamplingParams(max_tokens=1), request_id=f"s-{place}", search_id="s")
        assert engine_of(stream) == 0
        await stream.aclose()
    assert engine_of(await ask(engine, "beside")) == 1
    assert engine.members[0].taken_places == 3
    await engine.close_search("s")
    assert engine.members[0].taken_places == 0


async def test_a_prompt_that_is_too_long_is_refused_by_all(engine) -> None:
    for place in range(3):
        with pytest.raises(RequestError):
            await ask(engine, f"r{place}", [1] * 100)


async def test_a_prompt_that_is_refused_is_not_taken_for_cached(engine) -> None:
    for odd in ([1 << 70] * 40, [10**6] * 40):
        with pytest.raises(RequestError, match="out of vocabulary"):
            await ask(engine, "odd", odd)
    prompt = list(range(64))
    with pytest.raises(RequestError):
        await ask(engine, "too much", prompt, max_tokens=99)
    assert (await ask(engine, "asked", prompt)).saved_tokens == 0


async def test_a_search_of_a_name_in_use_is_refused_and_leaves_no_places(engine) -> None:
    params = SamplingParams(n=3, max_tokens=5)
    await engine.open_search([1], params, search_id="s")
    with pytest.raises(EngineError, match="already in use"):
        await engine.open_search([1], params, search_id="s")
    await engine.close_search("s")
    assert [one.taken_places for one in engine.members] == [0, 0]
    assert engine.unfinished == 0


async def test_what_is_for_all_is_done_in_turn(engine, harbour, monkeypatch) -> None:
    """A budget that one engine refuses is taken back to what the one before has made of it."""
    given = list[tuple[int, int | None]]()

    def taking(number: int):
        async def take(tier: str, budget_bytes: int | None) -> None:
            await asyncio.sleep(0.01)
            if number and budget_bytes == 2:
                raise DoesNotFitError("no", needed="2", found="1")
            given.append((number, budget_bytes))

        return take

    for number, one in enumerate(engine.members):
        monkeypatch.setattr(one, "set_memory_budget", taking(number))
    first, second = (asyncio.create_task(engine.set_memory_budget("ram", size)) for size in (1, 2))
    await first
    with pytest.raises(DoesNotFitError):
        await second
    assert engine.budgets["ram"] == 1
    assert given == [(0, 1), (1, 1), (0, 2), (0, 1)]


async def test_an_engine_that_was_given_up_has_no_places(engine, harbour) -> None:
    harbour.next_starts = [EngineDiedError("no")] * 50
    harbour.children[1].die()
    await until(lambda: engine.members[1].failure is not None)
    for place in range(8):  # One engine with four places, and four that wait.
        await ask(engine, f"r{place}")
    with pytest.raises(OverloadedError):
        await ask(engine, "one too many")
    harbour.children[0].die()
    await until(lambda: engine.failure is not None)
    with pytest.raises(EngineDiedError):
        await engine.set_memory_budget("ram", 1 << 30)
    with pytest.raises(EngineError):
        await engine.sleep()


async def test_one_that_was_given_up_is_counted_with_nothing(engine, harbour) -> None:
    held = EngineStats(running=3, waiting=2, blocks_used=7, running_adapters=["a"], prefix_hits_total=5)
    for child in harbour.children:
        child.said.put_nowait(protocol.StepOutputs([], held))
    await until(lambda: engine.stats().running == 6)
    harbour.next_starts = [EngineDiedError("no")] * 50
    harbour.children[1].die()
    await until(lambda: engine.members[1].failure is not None)
    both = engine.stats()
    assert (both.running, both.waiting, both.blocks_used, both.prefix_hits_total) == (3, 2, 7, 10)
    assert engine.members[1].stats().running_adapters == []
    assert [row.pid for row in engine._rows()] == [1, None]
    assert engine.members[0].all_pids() == (1,)


async def test_a_budget_that_cannot_be_taken_back_is_told(engine, monkeypatch, caplog) -> None:
    async def take(tier: str, budget_bytes: int | None) -> None:
        if budget_bytes is None:
            raise EngineError("it has died meanwhile")

    async def refuse(tier: str, budget_bytes: int | None) -> None:
        raise DoesNotFitError("no", needed="2", found="1")

    for one, changes in zip(engine.members, (take, refuse), strict=True):
        monkeypatch.setattr(one, "set_memory_budget", changes)
    with pytest.raises(DoesNotFitError):
        await engine.set_memory_budget("ram", 5)
    assert engine.budgets["ram"] is None
    assert "engine 0 keeps the new ram budget" in caplog.text


async def test_drain_waits_for_each(engine, harbour) -> None:
    streams = [await ask(engine, name) for name in ("a", "b")]
    draining = asyncio.create_task(engine.drain(60))
    await asyncio.sleep(0.05)
    assert not draining.done()
    for child, name in zip(harbour.children, ("a", "b"), strict=True):
        child.tell(token(name, 1, reason=FinishReason.LENGTH))
    await draining
    for stream in streams:
        assert [delta.token_ids async for delta in stream] == [[1]]


def test_figures_are_added_up() -> None:
    tier = KVTierUse(tier="ram", hit_tokens_total=3)
    stats = EngineStats(running=2, prefix_hits_total=5, kv_tiers=[tier], running_adapters=["b", "a"])
    other = EngineStats(running=1, kv_tiers=[tier], running_adapters=["a"], arriving_adapters=[3])
    both = sum_stats([stats, other])
    assert (both.running, both.prefix_hits_total, both.running_adapters) == (3, 5, ["a", "b"])
    assert both.arriving_adapters == [3]
    assert both.kv_tiers == [KVTierUse(tier="ram", hit_tokens_total=6)]
    stores = [
        KVStoreUse(
            held_bytes=9, dropped_writes_total=1, dropped_by_reason={"no room": 1}, waited_s_by_use={"read": 1.5}
        ),
        KVStoreUse(
            held_bytes=9, dropped_writes_total=2, dropped_by_reason={"no room": 2}, missed_by_reason={"checksum": 1},
            failing=True, waited_s_by_use={"read": 1.0},
        ),
    ]  # fmt: skip
    shared = sum_stats([EngineStats(kv_store=one) for one in stores]).kv_store
    assert shared == KVStoreUse(
        held_bytes=9, dropped_writes_total=3, dropped_by_reason={"no room": 3}, missed_by_reason={"checksum": 1},
        failing=True, waited_s_by_use={"read": 2.5},
    ), "one folder for all"  # fmt: skip
    disk = KVTierUse(tier="disk", loaded_bytes_total=2, held_bytes=9, total_bytes=16)
    (disks,) = sum_stats([EngineStats(kv_tiers=[disk])] * 2).kv_tiers
    assert (disks.loaded_bytes_total, disks.held_bytes, disks.total_bytes) == (4, 9, 16)
    info = sum_info([INFO, INFO])
    assert (info.blocks, info.max_num_seqs, info.max_model_len) == (20, 8, 100)


def test_llm_refuses_several_engines_and_names_what_has_them() -> None:
    with pytest.raises(UnsupportedOptionError, match="LLM has one engine") as refused:
        refuse_several_engines(EngineConfig.from_arguments(data_parallel_size=2))
    assert "holdfast serve MODEL -dp 2" in str(refused.value.fix)
    refuse_several_engines(EngineConfig())
