"""A server whose KV pool gives VRAM up while nobody asks, and to a process beside it: what is free follows, prefixes
wait in RAM, and in float32 all tokens stay as they are."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from many_streams import requests

from holdfast.config import EngineConfig
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.hardware.nvidia import probe
from holdfast.records import Request, SamplingParams
from holdfast.units import GIB

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 4096,
    "max_num_seqs": 32, "max_num_batched_tokens": 512, "vram": "16GiB", "kv_ram": "12GiB",
}  # fmt: skip
ROUND_S, GROWN_S = 60.0, 40.0
"""For all streams of a round, which took some seconds over the smallest pool; and for a pool to be as large as it was,
which waits for 10 s to see that a neighbour has left."""


@asynccontextmanager
async def serving(model: str, **settings: Any) -> AsyncIterator[ProcessEngine]:
    config = EngineConfig.from_arguments(model=model, **(SETTINGS | settings))
    found = find_model(config)
    engine = ProcessEngine(config, found, None, plan=plan_model(config, found, front_bytes=FRONT_BYTES))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def free() -> int:
    return probe().gpus[0].free_bytes


async def until(true: Callable[[], bool], seconds: float = 60.0) -> float:
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < seconds, "it did not come about"
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def stream(engine: ProcessEngine, request: Request, name: str) -> tuple[list[int], int, float]:
    """Its tokens, how many of the prompt were cached, and the longest gap between two of them."""
    tokens, cached, gap_s, last_s = list[int](), 0, 0.0, None
    async for delta in await engine.generate(request.prompt_token_ids, request.params, request_id=name):
        now_s = time.monotonic()
        gap_s, last_s = gap_s if last_s is None else max(gap_s, now_s - last_s), now_s
        tokens += delta.token_ids
        cached = max(cached, delta.cached_tokens)
    return tokens, cached, gap_s


async def streams(engine: ProcessEngine, prefix: str) -> tuple[list[list[int]], list[float]]:
    """Tokens and longest gap of each, the oldest first: where not all have room, it stays."""
    asked = [(request, f"{prefix}-{request.request_id}") for request in requests()]
    running = {name: asyncio.create_task(stream(engine, request, name)) for request, name in asked}
    _, left = await asyncio.wait(running.values(), timeout=ROUND_S)
    if left:
        said = await described_hang(engine, [name for name, task in running.items() if task in left])
        for task in left:
            task.cancel()
        raise AssertionError(said)
    found = [task.result() for task in running.values()]
    return [tokens for tokens, _, _ in found], [gap_s for _, _, gap_s in found]


def stood_still_s(engine: ProcessEngine) -> float:
    """For the last change of the pool; 0: there was none."""
    found = re.findall(r"kv_pool = .*; steps stood still for (\d+) ms", "\n".join(engine.info.decisions))
    return int(found[0]) / 1000 if found else 0.0


async def described_hang(engine: ProcessEngine, left: list[str]) -> str:
    """Whether steps go on, and what the scheduler and the memory look like meanwhile."""
    before = engine.stats().steps_total
    await asyncio.sleep(2)
    steps = engine.stats().steps_total - before
    return (
        f"{len(left)} streams have not ended in {ROUND_S:g} s: {left}\n{steps} steps in 2 s,"
        f" {engine.info.blocks} blocks, restarts {engine.restarts}, unresponsive: {engine.unresponsive}\n"
        f"{engine.stats()}\n{engine.memory()}"
    )


def long_prompts(count: int, tokens: int = 3500) -> list[Request]:
    dice = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return [
        Request(
            request_id=str(number), prompt_token_ids=[dice.randrange(3, 100_000) for _ in range(tokens)], params=params
        )
        for number in range(count)
    ]


async def test_an_idle_server_gives_vram_back_serves_beside_who_took_it_and_finds_its_prefixes(
    shape: Callable[[str], str], neighbour: Any
) -> None:
    async with serving(shape("1B"), idle_release=8) as engine:
        full, at_start = engine.info.blocks, free()
        plain, _ = await streams(engine, "alone")
        prompts = long_prompts(8)
        first = [await stream(engine, one, f"first-{one.request_id}") for one in prompts]
        waited_s = await until(lambda: engine.info.blocks < full)
        floor, released = engine.info.blocks, free()
        print(f"given back after {waited_s:.1f} s: {(released - at_start) / GIB:.2f} GiB, {full} to {floor} blocks")
        page = engine.info.memory.page_bytes  # type: ignore[union-attr]
        assert released - at_start > 0.8 * (full - floor) * page
        again = [await stream(engine, one, f"again-{one.request_id}") for one in prompts]
        assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]
        print("cached of 3,500 tokens:", [cached for _, cached, _ in again])
        assert all(cached >= 3400 for _, cached, _ in again), "from the pool and from RAM"
        await until(lambda: engine.info.blocks == full)
        # Somebody takes what was given back: it serves with less, and takes the rest when it can.
        await until(lambda: engine.info.blocks == floor)
        neighbour.take(GIB)
        beside, _ = await streams(engine, "beside")
        assert beside == plain
        assert floor <= engine.info.blocks < full
        neighbour.end()
        await until(lambda: engine.info.blocks == floor)
        assert (await streams(engine, "after"))[0] == plain
        await until(lambda: engine.info.blocks == full)


async def test_the_pool_gives_way_to_a_neighbour_while_streams_run(shape: Callable[[str], str], neighbour: Any) -> None:
    """The margin of a large GPU is gigabytes: the neighbour takes all but two, and finds more a second later."""
    async with serving(shape("1B"), yield_to_neighbours=True) as engine:
        full = engine.info.blocks
        plain, _ = await streams(engine, "alone")
        rounds, gaps, oldest, stood_s = 0, list[float](), list[float](), 0.0
        left = await asyncio.to_thread(neighbour.take, 2 * GIB)
        while engine.info.blocks == full or rounds < 3:
            tokens, (first, *others) = await streams(engine, f"beside {rounds}")
            assert tokens == plain
            rounds, gaps, oldest = rounds + 1, [*gaps, *others], [*oldest, first]
            stood_s = max(stood_s, stood_still_s(engine))
            assert rounds < 40
        print(f"{left / GIB:.2f} GiB were free, {free() / GIB:.2f} after it gave way: {full} to {engine.info.blocks}")
        print(f"longest gap of the stream that stays {max(oldest):.2f} s, of others {max(gaps):.2f} s, {rounds} rounds")
        print(f"steps stood still for {stood_s * 1000:.0f} ms at most")
        assert 0 < stood_s < 0.5
        assert max(oldest) < 0.5
        assert free() > left
        assert any("others hold" in line for line in engine.info.decisions)
        neighbour.end()
        left_s = time.monotonic()
        while engine.info.blocks < full:
            tokens, _ = await streams(engine, f"after {rounds}")
            assert tokens == plain
            rounds += 1
            await asyncio.sleep(0.2)
            late = f"{engine.info.blocks} of {full} blocks {time.monotonic() - left_s:.0f} s after it has left"
            assert time.monotonic() - left_s < GROWN_S, late


async def test_what_a_neighbour_leaves_is_taken_only_where_that_was_asked_for(
    shape: Callable[[str], str], neighbour: Any
) -> None:
    """Started beside one that holds nearly all."""
    neighbour.take(24 * GIB)
    share: dict[str, Any] = {"vram": None, "gpu_memory_utilization": 0.5, "kv_ram": "1GiB"}
    async with serving(
        shape("1B"), **share, max_num_seqs=512, max_num_batched_tokens=2048, yield_to_neighbours=True
    ) as engine:
        small = engine.info.kv_pool_bytes
        neighbour.end()
        await until(lambda: engine.info.kv_pool_bytes > small + 4 * GIB)
        tier = engine.memory().tiers[0]  # type: ignore[union-attr]
        print(f"{small / GIB:.1f} to {engine.info.kv_pool_bytes / GIB:.1f} GiB, budget {tier.budget_bytes / GIB:.1f}")
        assert engine.info.memory is not None
        assert engine.info.memory.budget_bytes <= 0.5 * probe().gpus[0].total_bytes


async def test_prefixes_are_there_again_after_a_sleep_at_level_1_and_not_at_level_2(
    shape: Callable[[str], str],
) -> None:
    async with serving(shape("1B"), enable_sleep_mode=True) as engine:
        awake, prompts = free(), long_prompts(8)
        first = [await stream(engine, one, f"first-{one.request_id}") for one in prompts]
        assert [cached for _, cached, _ in first] == [0] * 8
        await asyncio.sleep(5)  # RAM is pinned meanwhile.
        for level, least in ((1, 3400), (1, 3400), (2, 0)):
            began_s = time.monotonic()
            await engine.sleep("wait", level)
            asleep_s, given_back = time.monotonic() - began_s, free() - awake
            assert given_back > 12 * GIB
            began_s = time.monotonic()
            await engine.wake_up()
            woke_s = time.monotonic() - began_s
            again = [await stream(engine, one, f"again-{began_s}-{one.request_id}") for one in prompts]
            assert [tokens for tokens, _, _ in again] == [tokens for tokens, _, _ in first]
            cached = [one for _, one, _ in again]
            print(f"level {level}: asleep in {asleep_s:.2f} s, awake in {woke_s:.2f} s, cached of 3,500: {cached}")
            assert all(one >= least for one in cached)
            assert level == 1 or not any(cached)
