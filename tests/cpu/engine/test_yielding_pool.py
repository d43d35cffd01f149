"""A KV pool on a CPU that gives way to a neighbour and comes back, while answers go on: real pages, and a simulated
neighbour. Real SmolLM2."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.core.breathing import Breathing
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.neighbours import DeviceSample, Neighbours
from holdfast.engine.core.pool_memory import RamPool, sample_ram
from holdfast.engine.startup.build import build_core, find_model
from holdfast.records import Request, SamplingParams
from holdfast.units import GIB, MIB

TOKENS = 40


class SimulatedNeighbour:
    """Of a machine with little RAM: takes some, and leaves."""

    def __init__(self, own_bytes: object) -> None:
        self._own_bytes, self.held, self._total = own_bytes, 0, 0

    def take(self) -> DeviceSample:
        own = self._own_bytes()  # type: ignore[operator]
        self._total = self._total or own + 200 * MIB
        return DeviceSample(self._total, self._total - own - self.held, own)

    def close(self) -> None: ...


def answers(core: EngineCore, neighbour: SimulatedNeighbour | None) -> tuple[list[list[int]], list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for number in range(3):
        prompt = [100 + number * 7 + place for place in range(90)]
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    found, sizes, steps = {str(number): list[int]() for number in range(3)}, list[int](), 0
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.token_ids
        steps += 1
        sizes.append(core.scheduler.kv.blocks_total)
        if neighbour is not None:
            neighbour.held = 190 * MIB if 10 <= steps < 25 else 0
    return list(found.values()), sizes


def test_answers_are_the_same_whoever_comes_and_goes(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.engine.core.neighbours.GONE_S", 0.0)
    config = EngineConfig.from_arguments(
        device="cpu", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=96 * MIB, dtype="float32"
    )
    core, _ = build_core(config, find_model(config), lambda *_: None)
    try:
        alone, whole = answers(core, None)
        core.scheduler.reset_prefix_cache()
        page = core.scheduler.kv.layout.page_bytes
        pool = RamPool(page, lambda: core.scheduler.kv.blocks_touched + 1)
        neighbour = SimulatedNeighbour(lambda: 256 * MIB + pool.pool_bytes)
        core.breathing = Breathing(pool, neighbours=Neighbours(16 * MIB), watch=neighbour)  # type: ignore[arg-type]
        beside, sizes = answers(core, neighbour)
        assert beside == alone
        assert min(sizes) < whole[0], "it gave way"
        assert sizes[-1] == whole[0], "and came back"
        core.scheduler.kv.check_invariants()
    finally:
        core.close()


def test_a_sample_of_ram_is_of_this_machine() -> None:
    found = sample_ram(os.getpid())
    assert found is not None
    assert 0 < found.own_bytes < found.total_bytes
    assert 0 < found.free_bytes < found.total_bytes
    assert found.total_bytes > GIB


HOLDS = """
import os, time
child = os.fork()
held = bytearray(os.urandom(1 << 20)) * 96
if child:
    print("there", flush=True)
time.sleep(600)
"""


def test_processes_of_the_same_server_are_no_neighbours() -> None:
    """As a front end, its grammar service and the workers that this forks."""
    before = sample_ram(os.getpid())
    family = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE)
    try:
        assert family.stdout is not None
        assert family.stdout.readline() == b"there\n"
        deadline_s = time.monotonic() + PATIENCE_S
        grew = 0
        while grew < 180 * MIB and time.monotonic() < deadline_s:
            after = sample_ram(os.getpid())
            assert before is not None
            assert after is not None
            grew = after.own_bytes - before.own_bytes
            time.sleep(0.05)
        assert grew >= 180 * MIB, "96 MiB of the child, and 96 of what it forked"
    finally:
        for process in psutil.Process(family.pid).children():
            process.kill()
        family.kill()
        family.wait()
