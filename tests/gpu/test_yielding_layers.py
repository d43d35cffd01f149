"""Streamed layers, or experts, beside a process that takes VRAM and gives it back: residency follows, in float32 the
tokens stay, and what is held never exceeds the budget that neighbours have left."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_engines
import pytest
import torch
from many_streams import STREAMS, run
from sampled_memory import SampledMemory

from holdfast.config import EngineConfig
from holdfast.engine.core import neighbours
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.startup.build import build_core, find_model
from holdfast.records import VramBudget, VramGrant
from holdfast.units import GIB, MIB

LAYERS = 16
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 1024,
    "max_num_seqs": STREAMS, "max_num_batched_tokens": 512, "cpu_compute": "off",
}  # fmt: skip
SHARE, RAM = 0.05, 5 * GIB
"""Of a GPU of 140 GiB that is 7: all layers, and KV."""
FREE_AT_START, FIRST, SECOND = 4 * GIB, 2 * GIB, 1200 * MIB
"""That the neighbour leaves free: some layers stay; more than the margin; less than the margin, so that about two and a
half times the margin has to be given."""
SLACK = 32 * MIB
PATIENCE_S = 90.0


def built(folder: str, **more: Any) -> EngineCore:
    config = EngineConfig.from_arguments(model=folder, **SETTINGS, **more)
    return build_core(config, find_model(config), lambda stage, done, total: None)[0]


class Beside:
    """An engine and its neighbour: what is held is sampled, against the budget that each change goes to."""

    def __init__(self, core: EngineCore, neighbour: Any, ram_bytes: int) -> None:
        self._core, self._neighbour, self.changes = core, neighbour, 0
        core._kv_balance = None  # Layers would leave for KV as well.
        vram: Any = core._vram
        self.sampled = SampledMemory(core, vram.budget_bytes, ram_bytes)
        self._know(vram.reserved_bytes)
        change = vram.change

        def watched(asked: VramBudget, *others: Any) -> VramGrant:
            self.sampled.allowed = max(self.sampled.allowed, asked.budget_bytes)
            granted: VramGrant = change(asked, *others)
            self.sampled.allowed, self.changes = granted.budget_bytes, self.changes + 1
            return granted

        vram.change = watched

    def _know(self, own_bytes: int) -> None:
        free, total = torch.cuda.mem_get_info()
        self.sampled.others_bytes = total - free - own_bytes

    def take(self, but_bytes: int) -> None:
        own = self.sampled.held()
        self._neighbour.take(but_bytes)
        self._know(own)

    def give_back(self) -> None:
        own = self.sampled.held()
        self._neighbour.give_back()
        self._know(own)

    def rounds_until(self, reached: Callable[[], bool], plain: Any) -> float:
        """Answers go on, all with their tokens."""
        began_s = time.monotonic()
        while True:
            found = run(self._core)
            assert plain is None or found == plain
            if reached():
                return time.monotonic() - began_s
            late = f"it did not come about: {self._core._vram.granted()}"  # type: ignore[union-attr]
            assert time.monotonic() - began_s < PATIENCE_S, late


@pytest.fixture(autouse=True)
def _margins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large GPU they are gigabytes."""
    monkeypatch.setattr(neighbours, "MARGIN_SHARE", 0.01)
    monkeypatch.setattr(neighbours, "GONE_S", 2.0)


def test_layers_come_and_go_with_a_neighbour(shape: Callable[[str], str], neighbour: Any) -> None:
    folder = shape("1B")
    whole = built(folder, vram="12GiB")
    plain = run(whole)
    whole.close()
    gc.collect()
    torch.cuda.empty_cache()
    neighbour.take(FREE_AT_START)
    core = built(folder, gpu_memory_utilization=SHARE, ram=str(RAM), yield_to_neighbours=True)
    layers: Any = core.runner.movable_layers  # type: ignore[attr-defined]
    assert layers is not None
    graphs: Any = core.runner._graphs  # type: ignore[attr-defined]
    room: Any = core._vram._graphs  # type: ignore[union-attr]
    first = len(layers.streamed)
    assert 0 < first <= LAYERS
    beside = Beside(core, neighbour, RAM)
    try:
        assert run(core) == plain
        assert len(layers.streamed) == first, "who was there before is given nothing"
        beside.give_back()
        came_s = beside.rounds_until(lambda: not layers.streamed, plain)
        print(f"{first} layers came to stay {came_s:.1f} s after the neighbour left")
        beside.rounds_until(lambda: bool(graphs.captured), plain)
        print(room.told())
        beside.take(FIRST)
        beside.rounds_until(lambda: True, plain)
        time.sleep(1.5)
        beside.rounds_until(lambda: True, plain)
        assert not layers.streamed, "there is still a margin"
        beside.take(SECOND)
        left_s = beside.rounds_until(lambda: bool(layers.streamed), plain)
        print(room.told())
        assert graphs.captured == ()
        free = torch.cuda.mem_get_info()[0]
        print(f"{len(layers.streamed)} layers left within {left_s:.1f} s; {free / MIB:,.0f} MiB free")
        assert free > FIRST
        changes = beside.changes
        beside.rounds_until(lambda: True, plain)
        assert beside.changes == changes, "nothing goes to and fro"
        beside.give_back()
        beside.rounds_until(lambda: not layers.streamed, plain)
    finally:
        print(beside.sampled.end())
        core.close()
    assert beside.sampled.most_over <= SLACK, room.told()
    assert beside.sampled.most_ram_over <= 0
    gc.collect()
    assert torch.cuda.memory_allocated() < 64 * MIB


def test_experts_come_and_go_with_a_neighbour(neighbour: Any, tmp_path: Path) -> None:
    """Without the host's cores, whose sums are in another order."""
    (tmp_path / "config.json").write_text(json.dumps(expert_engines.SHAPE))
    whole = expert_engines.built(tmp_path, vram="12GiB")
    plain = run(whole)
    whole.close()
    gc.collect()
    torch.cuda.empty_cache()
    neighbour.take(2500 * MIB)
    core = expert_engines.built(
        tmp_path, gpu_memory_utilization=SHARE, ram=str(RAM), cpu_compute="off", yield_to_neighbours=True
    )
    experts: Any = core.runner.movable_experts  # type: ignore[attr-defined]
    assert experts is not None
    first = sum(experts.resident_counts)
    beside = Beside(core, neighbour, RAM)
    try:
        assert run(core) == plain
        beside.give_back()
        came_s = beside.rounds_until(lambda: sum(experts.resident_counts) == experts.most_resident, plain)
        print(
            f"{first} of {experts.most_resident} experts stayed at first, all {came_s:.1f} s after the neighbour left"
        )
        margin = int(torch.cuda.mem_get_info()[1] * neighbours.MARGIN_SHARE)
        for left in (margin + 32 * MIB, margin - 100 * MIB):  # A little more than the margin has to be given.
            beside.take(left)
            time.sleep(1.5)
            beside.rounds_until(lambda: True, plain)
        beside.rounds_until(lambda: sum(experts.resident_counts) < experts.most_resident, plain)
        print(f"{sum(experts.resident_counts)} stay beside it")
        beside.give_back()
        beside.rounds_until(lambda: sum(experts.resident_counts) == experts.most_resident, plain)
    finally:
        print(beside.sampled.end())
        core.close()
    assert beside.sampled.most_over <= SLACK
    assert beside.sampled.most_ram_over <= 0
