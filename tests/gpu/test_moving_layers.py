"""Layers that come to stay on the GPU, and leave it, while 32 answers are computed: the same tokens as of a model that
stays, within a budget that changes, and nothing leaks. A layer that has gone has no memory of its own behind it. While
all stay, steps are graphs, whose memory goes back before one leaves."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from many_streams import STREAMS, requests, run
from sampled_memory import SampledMemory

from holdfast.config import EngineConfig
from holdfast.engine.core import kv_balance
from holdfast.engine.core.kv_balance import KVBalance
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import build_core, find_model, plan_model
from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES
from holdfast.records import VramBudget
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import GIB, MIB

LAYERS = 16
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 1024,
    "max_num_seqs": STREAMS, "max_num_batched_tokens": 512,
    "cpu_compute": "off",  # The host's sums are in another order: with it tokens of random weights are others.
}  # fmt: skip
SMALL, LARGE = 4 * GIB, 10 * GIB
SLACK = 16 * MIB
"""Of what else may come or go meanwhile."""
RAM = 5 * GIB
"""That layers may take: all of them, and little more."""


def built(folder: str, **more: Any) -> EngineCore:
    config = EngineConfig.from_arguments(model=folder, **SETTINGS, **more)
    return build_core(config, find_model(config), lambda stage, done, total: None)[0]


@pytest.fixture(scope="module")
def folder(shape: Callable[[str], str]) -> str:
    return shape("1B")


@pytest.fixture(scope="module")
def plain(folder: str) -> Any:
    """Of a model that stays."""
    core = built(folder, vram="12GiB")
    assert core.runner.movable_layers is None  # type: ignore[attr-defined]
    found = run(core)
    core.close()
    return found


@pytest.fixture(scope="module")
def core(folder: str, plain: Any) -> Iterator[EngineCore]:
    found = built(folder, vram=str(SMALL), ram=str(RAM))
    found._kv_balance = None
    yield found
    found.close()
    gc.collect()
    assert torch.cuda.memory_allocated() < 64 * MIB


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_budget_changes_at_random_while_layers_are_streamed(core: EngineCore, plain: Any) -> None:
    layers = core.runner.movable_layers  # type: ignore[attr-defined]

    def held_bytes() -> int:
        return int(layers.nbytes + layers.resident_bytes + core.runner.kv.nbytes)  # type: ignore[attr-defined]

    first = layers.streamed
    assert 4 < len(first) < LAYERS
    assert run(core) == plain
    at_start, first_held, pinned = free(), held_bytes(), layers.pinned_bytes
    captured = list[int]()
    dice, counts, seconds, moved = random.Random(11), list[int](), list[float](), 0
    arbiter: Any = core._vram
    graphs: DecodeGraphs = core.runner._graphs  # type: ignore[attr-defined]
    room: GraphsRoom = arbiter._graphs
    taken, closes = list[int](), list[str]()
    sampled = SampledMemory(core, SMALL, RAM)

    def between() -> None:
        nonlocal moved
        if dice.random() > 0.1:
            return
        budget = dice.choice([3 * GIB, LARGE, dice.randrange(3 * GIB, LARGE)])
        sampled.allowed = max(sampled.allowed, budget)
        before, held, streamed = free(), held_bytes(), layers.streamed
        captured.append(len(graphs.captured))
        taken.append(room.taken_bytes)
        begin_s = time.perf_counter()
        granted = core.set_vram(VramBudget(budget_bytes=budget))
        after = free()
        seconds.append(time.perf_counter() - begin_s)
        sampled.allowed = granted.budget_bytes
        changed = held_bytes() - held
        given = room.given_back_bytes if taken[-1] and not room.taken_bytes else 0
        back = (after - before) + changed
        said = f"{back / MIB:.1f} MiB came back beside layers and KV; {room.told()}"
        if given:
            closes.append(
                f"captured {taken[-1] / MIB:.1f}, {given / MIB:.1f} came back, {room.kept_bytes / MIB:.1f} not"
            )
        assert abs(back - given) <= SLACK, said
        assert not layers.streamed or not graphs.captured
        assert core.stats().device_bytes <= granted.budget_bytes + SLACK, said
        assert granted.layers is not None
        assert granted.layers.streamed == layers.streamed
        moved += len(set(streamed) ^ set(layers.streamed))
        counts.append(len(layers.streamed))

    assert run(core, between) == plain
    print(sampled.end())
    middle_ms, most_ms = statistics.median(seconds) * 1000, max(seconds) * 1000
    waited = core.stats().preemptions_total
    print(f"{len(counts)} budgets, {moved} layers moved, streamed {sorted(set(counts))}, {waited} preemptions")
    print(f"{middle_ms:.1f} ms each, {most_ms:.1f} ms at most")
    assert len(counts) > 15
    assert {0, LAYERS} <= set(counts)
    print("MiB of graphs, each time they were closed:", *closes, sep="\n    ")
    assert max(captured) > 0, f"steps were graphs for a while; {room.told()}"
    assert max(taken) <= room.wanted_bytes, room.told()
    assert sampled.most_over <= SLACK, room.told()
    assert sampled.most_ram_over <= 0
    assert sampled.most_taken <= RAM - layers.pinned_bytes + HOST_ENGINE_BYTES, "what was pinned before is not in it"
    core.set_vram(VramBudget(budget_bytes=SMALL))
    told = arbiter.memory.told_bytes(), sum(arbiter.shares.values()), core.runner.kv.nbytes  # type: ignore[attr-defined]
    print(f"at the end {len(layers.streamed)} streamed, held, shares, KV: {told}")
    assert len(layers.streamed) == len(first)
    lost = at_start - free() - (held_bytes() - first_held)
    print(f"{lost} bytes are gone")
    assert lost <= SLACK + max(taken), f"of graphs that are gone the driver may keep some; {room.told()}"
    assert layers.pinned_bytes <= pinned + (LAYERS - len(first)) * max(layers._sizes.values())
    assert run(core) == plain


def test_steps_are_graphs_while_all_layers_stay(core: EngineCore, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same before, meanwhile and afterwards, and nothing is over the budget."""
    runner: Any = core.runner
    graphs, layers, replay, capture = runner._graphs, runner.movable_layers, DecodeGraphs.replay, DecodeGraphs._capture
    room: GraphsRoom = core._vram._graphs  # type: ignore[union-attr, assignment]
    core.set_vram(VramBudget(budget_bytes=SMALL))
    sampled, used, captures_s = SampledMemory(core, SMALL, RAM), list[bool](), list[float]()

    def watched(self: DecodeGraphs, size: int, work: Any, adapted: bool = False) -> None:
        assert not layers.comes
        used.append((size, work, adapted) in self.captured)
        replay(self, size, work, adapted)

    def timed(self: DecodeGraphs, *which: Any) -> Any:
        begin_s = time.perf_counter()
        found = capture(self, *which)
        captures_s.append(time.perf_counter() - begin_s)
        return found

    monkeypatch.setattr(DecodeGraphs, "replay", watched)
    monkeypatch.setattr(DecodeGraphs, "_capture", timed)
    seconds = dict[str, float]()
    for name, budget in (("some", SMALL), ("all", LARGE), ("all again", LARGE), ("some again", SMALL)):
        sampled.allowed = max(sampled.allowed, budget)
        granted = core.set_vram(VramBudget(budget_bytes=budget))
        sampled.allowed = granted.budget_bytes
        assert granted.layers is not None
        assert bool(granted.layers.graphs_bytes) == (budget == LARGE) == (not layers.streamed)
        used.clear()
        before, begin_s = free(), time.perf_counter()
        assert run(core) == plain
        seconds[name] = time.perf_counter() - begin_s
        shown = f"{sum(used)} of {len(used)} steps of single tokens replayed, {len(graphs.captured)} graphs captured"
        print(f"{name}: {seconds[name]:.2f} s, {shown}; {(before - free()) / MIB:.1f} MiB taken by steps")
        print(f"    {room.told()}; {core.stats().device_bytes // MIB} MiB held")
        assert any(used) == (budget == LARGE), room.told()
        assert room.taken_bytes <= granted.layers.graphs_bytes
        assert core.stats().device_bytes <= granted.budget_bytes + SLACK, room.told()
    print(sampled.end())
    captures_ms = [one * 1000 for one in captures_s]
    print(f"{len(captures_ms)} captures, {statistics.median(captures_ms):.0f} ms each, {max(captures_ms):.0f} at most")
    assert graphs.captured == ()
    assert room.wanted_bytes > 0, f"they took no more than their room; {room.told()}"
    assert sampled.most_over <= SLACK, room.told()


def test_layers_leave_for_kv_that_answers_want_and_come_back(
    core: EngineCore, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers, arbiter = core.runner.movable_layers, core._vram  # type: ignore[attr-defined]
    budget = core.set_vram(VramBudget(budget_bytes=5 * GIB, kv_bytes=400 * MIB)).budget_bytes
    arbiter.pool_is_backed()  # type: ignore[union-attr]
    before = core.set_vram(VramBudget(budget_bytes=budget))
    monkeypatch.setattr(kv_balance, "GONE_S", 0.0)
    core._kv_balance, counts = KVBalance(arbiter), set[int]()  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert run(core, lambda: counts.add(len(layers.streamed))) == plain
        assert before.layers is not None
        assert max(counts) > len(before.layers.streamed)
        deadline_s = time.monotonic() + 10
        while len(layers.streamed) > len(before.layers.streamed) and time.monotonic() < deadline_s:
            core.balance_kv()
    core._kv_balance = None
    print(caplog.text)
    assert (len(layers.streamed), core.scheduler.kv.blocks_total + 1) == (len(before.layers.streamed), before.blocks)
    assert core.stats().device_bytes <= budget + SLACK


async def stream(engine: ProcessEngine, request: Any, prefix: str) -> list[int]:
    tokens, name = list[int](), f"{prefix}-{request.request_id}"
    async for delta in await engine.generate(request.prompt_token_ids, request.params, request_id=name):
        tokens += delta.token_ids
    return tokens


async def serves(engine: ProcessEngine, http: httpx.AsyncClient, plain: Any) -> None:
    await engine.start()
    expected = [plain[request.request_id] for request in requests()]
    running = asyncio.gather(*(stream(engine, request, "first") for request in requests()))
    for budget in ("8GiB", "3GiB", "6GiB", "4GiB"):
        await asyncio.sleep(0.5)
        answer = await http.post("/memory", json={"vram": budget})
        assert answer.status_code == 200, answer.text
        tier = answer.json()["tiers"][0]
        (said,) = [line for line in answer.json()["decisions"] if line.startswith("streamed_layers = ")]
        print(budget, tier["budget_bytes"] // MIB, tier["measured_bytes"] // MIB, said, running.done())
        assert tier["measured_bytes"] <= tier["budget_bytes"] + SLACK
    assert await running == expected
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    again = await asyncio.gather(*(stream(engine, request, "again") for request in requests()))
    assert again == expected
    assert (engine.restarts, engine.info.memory.budget_bytes) == (1, 4 * GIB)


def test_a_server_takes_another_budget_beside_streamed_layers(folder: str, plain: Any) -> None:
    with asyncio.Runner() as runner:
        config = EngineConfig.from_arguments(model=folder, vram=str(SMALL), **SETTINGS)
        model = find_model(config)
        engine = ProcessEngine(config, model, None, plan=plan_model(config, model))
        app = create_app(engine, ServerSettings(served_model_names=("dummy",), may_change_memory=True))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here", timeout=120)
        try:
            runner.run(serves(engine, http, plain))
        finally:
            runner.run(engine.stop())
