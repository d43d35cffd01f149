"""Layers that a plan leaves in pinned RAM, as an engine starts with them: what is pinned, what is told of it, and what
is refused where others have taken RAM since. The GPU's link is simulated."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aliased_memory import AliasedMemory
from deadlines import PATIENCE_S
from simulated_copies import SimulatedCopies

from holdfast.config import EngineConfig
from holdfast.engine.startup import build_gpu, placed_experts, streamed_layers
from holdfast.engine.startup.build_gpu import start_with_room
from holdfast.errors import DoesNotFitError
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.streaming import host_copies
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.expert_places import expert_places
from holdfast.footprint.streamed import with_others_streamed
from holdfast.hardware import Memory, Resident
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import from_config
from holdfast.planner import Plan
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES
from holdfast.units import GIB, MIB

CPU = torch.device("cpu")
CARD = NvidiaGpu(index=0, uuid="GPU-0", name="fake", total_bytes=24 * GIB, free_bytes=24 * GIB, capability=(9, 0))
UNTIED = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 4, "vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip


def host(free_bytes: int) -> Memory:
    return Memory(total_bytes=64 * GIB, available_bytes=free_bytes, limited_by="machine")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned = partial(PinnedMemory, pin=lambda address, nbytes: 0, unpin=lambda addresses, device: None)
    monkeypatch.setattr(streamed_layers, "PinnedMemory", unpinned)
    monkeypatch.setattr(streamed_layers, "CudaCopies", lambda device: SimulatedCopies())
    monkeypatch.setattr(streamed_layers, "LayerRanges", lambda sizes, on: LayerRanges(sizes, on, AliasedMemory()))


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig.from_arguments(device="cuda", load_format="dummy", gpu_layers=1)


def planned(config: EngineConfig) -> Plan:
    return make_gpu_plan(from_config(UNTIED), None, config, [CARD], host=host(32 * GIB))


def started(config: EngineConfig, plan: Plan) -> Any:
    return streamed_layers.device_layers(config, plan, CPU, lambda done, total: None)


@pytest.mark.usefixtures("simulated")
def test_what_is_pinned_is_what_was_planned_to_the_byte(config: EngineConfig) -> None:
    plan = planned(config)
    streamed = plan.engine.streamed
    assert streamed is not None
    assert streamed.embedding_bytes > 0
    layers = started(config, plan)
    assert layers.pinned_bytes == streamed.pinned_bytes
    (ram,) = streamed_layers.tiers_below_gpu(config, plan, layers.pinned_bytes + 7)
    (term,) = ram.terms
    assert (term.planned_bytes, term.measured_bytes) == (streamed.pinned_bytes, streamed.pinned_bytes + 7)
    layers.close()


@pytest.mark.usefixtures("simulated")
def test_ram_that_others_have_taken_since_the_plan_is_not_pinned(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that wakes up, or is started again, has the plan of its first start."""
    plan = planned(config)
    assert plan.engine.streamed is not None
    needed = plan.engine.streamed.pinned_bytes + HOST_ENGINE_BYTES - GIB
    monkeypatch.setattr(streamed_layers, "resident", lambda: Resident(GIB + 70 * MIB, 2 * GIB, 70 * MIB))
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(needed))
    started(config, plan).close()
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(needed - MIB))
    with pytest.raises(DoesNotFitError, match="RAM no longer holds") as caught:
        started(config, plan)
    assert caught.value.code == "HF114"
    assert str(caught.value.needed).endswith("of pinned RAM for 3 layers, and 2.00 GiB for the engine's process")
    assert str(caught.value.found).endswith("free (machine): 1.00 MiB short")
    # It is planned again with what is free, and starts if that helps.
    tried: list[int] = []

    def build(plan: Plan) -> Any:
        assert plan.engine.streamed is not None
        tried.append(len(plan.engine.streamed.layers))
        return started(config, plan)

    found: Any = start_with_room(plan, build, lambda failed: planned(replace(config, gpu_layers=3)))
    found.close()
    assert tried == [3, 1]
    assert "memory ran short during startup (RAM no longer holds" in caplog.text


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_host_has_mlps_where_two_layers_or_more_are_streamed(
    config: EngineConfig, count: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one the link brings nothing meanwhile; of none, as a process is started again with, there is none to compute.
    Experts are another matter."""
    monkeypatch.setattr(build_gpu.native, "available", lambda: True)
    plan = planned(config)
    assert plan.engine.streamed is not None
    placed = with_others_streamed(plan.engine.streamed, plan.engine.streamed.layers[:count])
    plan = replace(plan, own=replace(plan.engine, streamed=placed))
    layers = started(config, plan)
    mlp: Any = SimpleNamespace(nbytes=7)
    every: list[Any] = [SimpleNamespace(nbytes=9, mlp=mlp) for _ in range(4)]
    if mixed and placed.layers:
        every[placed.layers[-1]].mlp = ExpertWeights.__new__(ExpertWeights)
    norm = SimpleNamespace(weight=torch.zeros(1))
    weights: Any = SimpleNamespace(slots=layers, layers=every, dtype=torch.bfloat16, final_norm=norm)
    hosts = build_gpu._host_mlps(config, plan, from_config(UNTIED), None, weights)  # type: ignore[arg-type]
    assert (hosts is not None) == (count > 1 and not mixed)
    layers.close()


@pytest.mark.usefixtures("simulated")
def test_mlps_of_the_host_keep_to_one_engines_share_and_leave_kv_pages_theirs(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_gpu.native, "available", lambda: True)
    monkeypatch.setattr(build_gpu, "ram", lambda: host(40 * GIB))
    plan = planned(config)
    plan = replace(plan, own=replace(plan.engine, kv_ram_bytes=GIB))
    layers = started(config, plan)
    every: list[Any] = [SimpleNamespace(nbytes=9, mlp=SimpleNamespace(nbytes=7)) for _ in range(4)]
    norm = SimpleNamespace(weight=torch.zeros(1))
    weights: Any = SimpleNamespace(slots=layers, layers=every, dtype=torch.bfloat16, final_norm=norm)

    def room_bytes(**settings: Any) -> int:
        hosts = build_gpu._host_mlps(replace(config, **settings), plan, from_config(UNTIED), None, weights)  # type: ignore[arg-type]
        assert hosts is not None
        return hosts._offer.room_bytes()

    assert room_bytes() == 36 * GIB - 3 * GIB - GIB
    assert room_bytes(ram=8 * GIB) == 8 * GIB - layers.pinned_bytes - GIB
    assert room_bytes(ram=8 * GIB, data_parallel_size=2) == 4 * GIB - layers.pinned_bytes - GIB
    assert room_bytes(data_parallel_size=2) == 18 * GIB - 3 * GIB - GIB
    layers.kv_to_come = lambda: 0  # All of it is pinned: what is free is without it.
    assert room_bytes() == 36 * GIB - 3 * GIB
    layers.close()


@pytest.mark.usefixtures("simulated")
def test_ram_for_layers_that_leave_is_what_mlps_of_the_host_leave(config: EngineConfig) -> None:
    plan = planned(replace(config, ram=8 * GIB))
    layers = started(config, plan)
    room = layers._room()
    layers.host_bytes = 5 * MIB
    assert layers._room() == room - 5 * MIB
    layers.close()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("by_hand", [False, True])
def test_layers_that_leave_take_nothing_of_what_is_for_kv_pages(
    by_hand: bool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of --ram, whoever chose the size; and of what is free, while it is not pinned yet."""
    of_ram, kv = 8 * GIB, GIB
    config = replace(config, ram=of_ram, kv_ram=kv if by_hand else None)
    plan = planned(config)
    plan = replace(plan, own=replace(plan.engine, kv_ram_bytes=kv))
    layers = started(config, plan)
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(40 * GIB))
    assert layers._room() == of_ram - kv - layers.pinned_bytes
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(2 * GIB))
    free = int(0.9 * 2 * GIB)
    assert layers._room() == free - kv
    layers.kv_to_come = lambda: 300 * MIB
    assert layers._room() == free - 300 * MIB
    layers.kv_to_come = lambda: 0
    assert layers._room() == free
    layers.close()


@pytest.mark.parametrize("by_hand", [False, True])
def test_experts_that_leave_take_nothing_of_what_is_for_kv_pages(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned = partial(PinnedMemory, pin=lambda address, nbytes: 0, unpin=lambda addresses, device: None)
    monkeypatch.setattr(placed_experts, "PinnedMemory", unpinned)
    monkeypatch.setattr(placed_experts, "CudaCopies", lambda device: SimulatedCopies())
    places = expert_places(dict.fromkeys(range(4), 8), 4, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 8))
    # What was set for KV pages is not of what experts may take.
    machine = SimpleNamespace(pinned_bytes=(7 if by_hand else 8) * GIB)
    engine = SimpleNamespace(expert_places=places, kv_ram_bytes=GIB)
    plan: Any = SimpleNamespace(engine=engine, question=SimpleNamespace(machine=machine))
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", kv_ram=GIB if by_hand else None)
    experts = placed_experts.device_experts(config, plan, CPU, lambda done, total: None)
    assert experts is not None
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(40 * GIB))
    assert experts._room() == 7 * GIB - experts.pinned_bytes - places.host_bytes
    monkeypatch.setattr(streamed_layers, "memory", lambda: host(2 * GIB))
    assert experts._room() == int(0.9 * 2 * GIB) - GIB
    experts.kv_to_come = lambda: 0
    assert experts._room() == int(0.9 * 2 * GIB)
    experts.close()


def test_experts_are_not_loaded_for_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take minutes for nothing, and RAM from the next attempt."""
    begun, given_up, loaded = threading.Event(), list[threading.Event](), list[int]()

    def load_all(*arguments: Any) -> Any:
        given_up.append(arguments[-1])
        return host_copies.load_host_experts(*arguments)

    def load(loader: Any, layer: Any, activation: str) -> Any:
        loaded.append(layer.index)
        begun.set()
        given_up[0].wait(PATIENCE_S)

    monkeypatch.setattr(placed_experts, "load_host_experts", load_all)
    monkeypatch.setattr(host_copies, "load_host_layer", load)
    monkeypatch.setattr(host_copies, "HOST_READERS", 1)
    places = expert_places(dict.fromkeys(range(4), 8), 4, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 8))
    plan: Any = SimpleNamespace(engine=SimpleNamespace(expert_places=places, quantize=None))
    with pytest.raises(KeyError), placed_experts.host_layers(plan, from_config(UNTIED), None):
        fail_after(begun)
    assert loaded == [0]


def fail_after(begun: threading.Event) -> None:
    assert begun.wait(PATIENCE_S)
    raise KeyError
