"""From a plan to a backed pool without a GPU: the GPU, its driver and the runner are fakes that keep books of bytes."""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from deadlines import PATIENCE_S
from simulated_copies import SimulatedCopies

from holdfast.config import EngineConfig
from holdfast.engine.process.budget import Serving, asked_vram, balanced, breathed, with_vram
from holdfast.engine.startup import build, build_gpu
from holdfast.engine.startup.build_gpu import BACK_TRIES, START_TRIES, _with_kv_tiers, build_gpu_runner
from holdfast.engine.startup.engine_info import engine_info
from holdfast.errors import DoesNotFitError
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory import accounting as gpu_memory
from holdfast.execution.gpu.memory.arbiter import VramArbiter
from holdfast.execution.gpu.memory.virtual_memory import OUT_OF_MEMORY, RangeError
from holdfast.execution.streaming import pinned_memory
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.tiers import gpu as gpu_tiers
from holdfast.execution.tiers.gpu import GpuPageCopies
from holdfast.footprint.gpu import FIRST_CAPTURE_BYTES, GRAPHS_BYTES
from holdfast.footprint.streamed import page_tables_bytes, with_others_streamed
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.models import ModelSpec, catalogue, from_config
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.planner.models.variants import planned
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.sizing import host_ram
from holdfast.planner.sizing.terms import later_graphs_bytes
from holdfast.records import (
    ExpertsGrant,
    LayersGrant,
    LowerTier,
    MemoryReport,
    MemoryTerm,
    PoolChange,
    VramBudget,
    VramGrant,
)
from holdfast.units import GIB, MIB

UUID = "GPU-1"
CPU = torch.device("cpu")
CONTEXT = 600 * MIB
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


class FakeGpu:
    """Bytes by holder. `caller`: tensors of the process before the engine came, beside a context of its own."""

    def __init__(self, *, total: int = 80 * GIB, caller: int = 0, tells: bool = True) -> None:
        self.total, self.tells = total, tells
        self.context, self.caller, self.cached = CONTEXT if caller else 0, caller, 0
        self.others, self.tensors, self.code, self.pool = 0, 0, 0, 0
        self.peak = 0

    @property
    def process(self) -> int:
        return self.context + self.caller + self.cached + self.tensors + self.code + self.pool

    @property
    def free(self) -> int:
        return self.total - self.others - self.process

    def take_tensors(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        self.tensors += nbytes
        self.peak = max(self.peak, self.caller + self.tensors)

    def probed(self) -> NvidiaGpu:
        return NvidiaGpu(
            index=0, uuid=UUID, name="fake", total_bytes=self.total, free_bytes=self.free, capability=(9, 0)
        )

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def reset(device: torch.device) -> None:
            self.peak = self.caller + self.tensors

        def empty() -> None:
            self.cached = 0

        def open_device(uuid: str) -> torch.device:
            self.context = CONTEXT
            return CPU

        patch.setattr(gpu_memory, "process_bytes", lambda uuid, pid: (self.process or None) if self.tells else None)
        patch.setattr(torch.cuda, "is_initialized", lambda: self.context > 0)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.caller + self.tensors)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
        patch.setattr(torch.cuda, "empty_cache", empty)
        patch.setattr(build_gpu, "open_device", open_device)


class FakePool:
    """Pages that come and go one by one."""

    def __init__(self, gpu: FakeGpu, page: int) -> None:
        self.gpu, self.page, self.nbytes, self.blocks = gpu, page, 0, 0

    def backed_bytes(self, blocks: int) -> int:
        return blocks * self.page

    def blocks_within(self, nbytes: int) -> int:
        return nbytes // self.page

    def resize(self, blocks: int) -> None:
        more = blocks * self.page - self.nbytes
        if more > self.gpu.free:
            raise RangeError(f"{more} bytes of memory", OUT_OF_MEMORY)
        self.nbytes += more
        self.blocks = blocks
        self.gpu.pool += more


class FakeRunner:
    """Takes what the plan says of each term, a little more while it profiles, and code that no term accounts for."""

    attention_backend = "fake"
    decisions = ()
    kv_dtype = torch.bfloat16
    layer_slots_bytes = expert_slots_bytes = pinned_bytes = mapped_bytes = 0
    movable_layers = movable_experts = change_experts = close_graphs = None

    def __init__(self, gpu: FakeGpu, plan: Plan, page: int) -> None:
        self.gpu, self.plan, self.page = gpu, plan, page
        self.weights_bytes, self.buffers_bytes = plan.terms["weights"], plan.terms["buffers"]
        self.logits_bytes, self.adapters_bytes = plan.terms["logits"], 0
        gpu.take_tensors(self.buffers_bytes + self.logits_bytes)
        self.kv = FakePool(gpu, page)

    def measure_link(self) -> list[Decision]:
        return []

    def reserve_kv(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks

    def back_kv(self, blocks: int) -> None:
        assert blocks <= self.most_blocks
        self.kv.resize(blocks)

    def profile_run(self) -> None:
        self.gpu.take_tensors(self.plan.terms["activations"])

    def capture(self) -> None:
        self.gpu.code += 100 * MIB

    def close(self) -> None:
        self.gpu.tensors = self.gpu.pool = 0
        self.closed = True


class Start:
    """One start on a fake GPU: `during` runs where loading would."""

    def __init__(self, gpu: FakeGpu, patch: pytest.MonkeyPatch, spec: ModelSpec, **settings: Any) -> None:
        self.gpu, self.spec = gpu, spec
        self.config = EngineConfig.from_arguments(
            device="cuda", load_format="dummy", **{"max_model_len": 8192, **settings}
        )
        self.plan = make_gpu_plan(spec, None, self.config, [gpu.probed()])
        self.during: list[Any] = []
        self.reusable: list[int] = []
        gpu.install(patch)
        patch.setattr(build_gpu, "load_weights", self._load)
        patch.setattr(build_gpu, "GpuRunner", self._runner)
        self._tried = self.plan

    def _load(self, *_: Any, **__: Any) -> object:
        if self.during:
            self.during.pop(0)()
        self.gpu.take_tensors(self._tried.terms["weights"])
        return object()

    def _runner(self, spec: Any, weights: Any, layout: Any, *_: Any, **__: Any) -> FakeRunner:
        return FakeRunner(self.gpu, self._tried, layout.page_bytes)

    def _replan(self, own_bytes: int) -> Plan:
        """As the engine would: what its failed start took is given back by then."""
        self.reusable.append(own_bytes)
        free = self.gpu.free + own_bytes
        gpu = NvidiaGpu(index=0, uuid=UUID, name="fake", total_bytes=self.gpu.total, free_bytes=free, capability=(9, 0))
        self._tried = make_gpu_plan(self.spec, None, self.config, [gpu])
        return self._tried

    def run(self) -> tuple[Plan, MemoryReport, VramArbiter]:
        files: Any = SimpleNamespace()
        self.runner, plan, report, arbiter = build_gpu_runner(
            self.config, files, self.spec, self.plan, lambda *_: None, self._replan
        )
        return plan, report, arbiter

    def serving(self, plan: Plan, report: MemoryReport) -> Serving:
        """As the front knows it."""
        model: Any = SimpleNamespace(files=SimpleNamespace(name="fake", trained_to_embed=False), spec=self.spec)
        info = engine_info(self.config, model.files, self.spec, plan, self.runner, report)
        return Serving(config=self.config, model=model, plan=self.plan, info=info, pids=(1,))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(LLAMA_1B)


@pytest.mark.parametrize("tells", [True, False], ids=["the driver tells", "it does not"])
@pytest.mark.parametrize("caller_gib", [0, 20, 40, 70])
def test_what_the_caller_held_before_is_not_the_engines(
    caller_gib: int, tells: bool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(caller=caller_gib * GIB, tells=tells)
    start = Start(gpu, monkeypatch, spec)
    plan, report, memory = start.run()
    # The plan was made with what the caller left free: the pool is what was planned, but for code without a term.
    assert plan.terms["kv_pool"] >= start.plan.terms["kv_pool"] - 200 * MIB
    ours = gpu.process - gpu.caller - (CONTEXT if caller_gib else 0)
    assert report.held_bytes == memory.own_bytes() == ours
    assert ours <= plan.budget_bytes
    measured = {term.term: term.measured_bytes for term in report.terms}
    assert measured["context"] == (0 if caller_gib else CONTEXT)
    assert measured["activations"] == start.plan.terms["activations"]
    assert sum(size or 0 for size in measured.values()) == ours


def test_cores_are_timed_beside_the_link_when_all_else_is_ready(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first MLPs are loaded from when the link was measured on; what is decided is told with all else."""
    order = list[str]()

    class Hosts:
        most_bytes, decision = GIB, Decision("cpu_compute", "none", "simulated", "measured")

        def begin(self) -> None:
            order.append("begin")

        def calibrate(self) -> None:
            assert start.gpu.pool
            order.append("calibrate")

    class Runner(FakeRunner):
        decoder = SimpleNamespace(experts=None, host_mlps=Hosts())

        def measure_link(self) -> list[Decision]:
            order.append("link")
            return []

        def capture(self) -> None:
            order.append("capture")
            super().capture()

    gpu = FakeGpu()
    start = Start(gpu, monkeypatch, spec, gpu_layers=8)
    host = Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="machine")
    start.plan = start._tried = make_gpu_plan(spec, None, start.config, [gpu.probed()], host=host)
    assert start.plan.engine.streamed is not None
    monkeypatch.setattr(
        build_gpu, "GpuRunner", lambda spec, weights, layout, *_, **__: Runner(gpu, start.plan, layout.page_bytes)
    )
    for name, given in (("tiers_below_gpu", []), ("device_layers", None), ("_host_mlps", None)):
        monkeypatch.setattr(build_gpu, name, lambda *_, given=given: given)
    plan, _, _ = start.run()
    assert order == ["link", "begin", "capture", "calibrate"]
    assert [one.reason for one in plan.decisions if one.field == "cpu_compute"] == ["simulated"]


@pytest.mark.parametrize(("caller_gib", "own"), [(0, CONTEXT), (20, 0)])
def test_only_what_the_engine_took_is_used_again(
    caller_gib: int, own: int, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(caller=caller_gib * GIB)
    start = Start(gpu, monkeypatch, spec)

    def neighbour() -> None:
        gpu.others = gpu.free - GIB  # Less than the weights.

    start.during.append(neighbour)
    gave_back = gpu_memory.GpuMemory.give_back_cached

    def neighbour_leaves(memory: gpu_memory.GpuMemory) -> None:
        gpu.others, gpu.tensors = 10 * GIB, 0
        gave_back(memory)

    monkeypatch.setattr(gpu_memory.GpuMemory, "give_back_cached", neighbour_leaves)
    plan, report, _ = start.run()
    assert start.reusable == [own]
    assert plan.budget_bytes < start.plan.budget_bytes
    assert report.held_bytes <= plan.budget_bytes


def test_what_torch_only_kept_for_the_caller_is_given_back_first(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(caller=4 * GIB)
    gpu.cached = 8 * GIB
    start = Start(gpu, monkeypatch, spec)
    _, report, _ = start.run()
    assert gpu.cached == 0
    assert report.held_bytes == gpu.process - gpu.caller - CONTEXT


def test_terms_that_took_less_pay_for_what_no_term_accounts_for(spec: ModelSpec) -> None:
    gpu = FakeGpu()
    plan = make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda"), [gpu.probed()])
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"} | {"graphs": 30 * MIB}
    held = sum(measured.values()) + 70 * MIB
    taken = build_gpu.taken_terms(plan, measured, held)
    assert taken["activations"] == measured["activations"] + 70 * MIB
    assert taken["graphs"] == plan.terms["graphs"] - 70 * MIB  # Others are captured when they are needed.
    assert build_gpu.taken_terms(plan, measured | {"graphs": 9 * GIB}, held)["graphs"] == 9 * GIB
    assert build_gpu.taken_terms(plan, measured, 0)["activations"] == measured["activations"]
    later = plan.terms["graphs"] - GRAPHS_BYTES  # Have room however much no term accounts for.
    assert (
        build_gpu.taken_terms(plan, measured, held + GIB)["graphs"] == measured["graphs"] + later > measured["graphs"]
    )


class FakeMemory:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.given_back = gpu, 0

    def held(self) -> gpu_memory.GpuHeld:
        return gpu_memory.GpuHeld(self.gpu.process, self.gpu.free, self.gpu.total)

    def give_back_cached(self) -> None:
        self.given_back += 1


def backing(spec: ModelSpec, refusals: int, status: int = OUT_OF_MEMORY) -> tuple[Any, FakeMemory, FakeGpu, Plan]:
    """`_back` of a runner that has everything but its pool, the driver refusing so many times while a neighbour takes a
    GiB each time."""
    gpu = FakeGpu()
    plan = make_gpu_plan(spec, None, EngineConfig.from_arguments(device="cuda", vram="60GiB"), [gpu.probed()])
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"}
    gpu.context, gpu.others = measured["context"], 19 * GIB
    gpu.tensors = sum(measured.values()) - measured["context"]
    runner, memory = FakeRunner.__new__(FakeRunner), FakeMemory(gpu)
    runner.gpu, runner.page, runner.most_blocks = gpu, plan.engine.layout.page_bytes, plan.engine.most_blocks
    runner.kv = FakePool(gpu, runner.page)
    back = runner.back_kv

    def refusing(blocks: int) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            gpu.others += GIB
            raise RangeError("memory", status)
        back(blocks)

    runner.back_kv = refusing  # type: ignore[method-assign]
    planned = sum(measured.values())
    arbiter = VramArbiter(memory, runner.kv, plan.budget_bytes, measured, planned)  # type: ignore[arg-type]
    return lambda: build_gpu._back(plan, runner, arbiter), memory, gpu, plan  # type: ignore[arg-type]


def test_the_pool_becomes_what_a_neighbour_leaves(spec: ModelSpec) -> None:
    back, memory, gpu, plan = backing(spec, BACK_TRIES - 1)
    settled = back()
    assert memory.given_back == BACK_TRIES - 1
    assert settled.terms["kv_pool"] == gpu.pool < plan.terms["kv_pool"]
    assert 0 <= gpu.free < plan.engine.layout.page_bytes


@pytest.mark.parametrize(("refusals", "status"), [(BACK_TRIES, OUT_OF_MEMORY), (1, 999)])
def test_what_is_refused_each_time_or_for_another_reason_is_said(refusals: int, status: int, spec: ModelSpec) -> None:
    back, _, gpu, _ = backing(spec, refusals, status)
    with pytest.raises(RangeError):
        back()
    assert gpu.pool == 0


def least_blocks(plan: Plan) -> int:
    return 1 + plan.engine.layout.peak_blocks(plan.limits.max_model_len, plan.limits.max_num_batched_tokens)


@pytest.mark.parametrize("tells", [True, False], ids=["the driver tells", "it does not"])
def test_another_budget_is_that_of_a_start_with_it(
    tells: bool, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pool, and a process that is started again has it too."""
    started = Start(FakeGpu(tells=tells), monkeypatch, spec, vram="30GiB").run()[0]
    gpu = FakeGpu(tells=tells)
    start = Start(gpu, monkeypatch, spec, vram="60GiB")
    plan, report, arbiter = start.run()
    now, pool = start.serving(plan, report), start.runner.kv
    for size in (30 * GIB, 70 * GIB, 12 * GIB, 30 * GIB):
        asked = asked_vram(now, size)
        granted = arbiter.change(asked, least_blocks(plan), pool.resize)
        now = with_vram(now, asked, size, granted)
        assert (granted.budget_bytes, granted.kv_bytes) == (size, gpu.pool)
        assert size - 200 * MIB < gpu.process <= size  # Graphs are still to come.
        assert (now.config.vram, now.plan.budget_bytes, now.info.memory.budget_bytes) == (size, size, size)
        measured = {term.term: term.measured_bytes for term in now.info.memory.terms}
        assert (measured["kv_pool"], now.info.blocks) == (gpu.pool, granted.blocks - 1)
        assert measured["weights"] == plan.terms["weights"]
    assert granted.blocks == started.engine.blocks
    again = Start(FakeGpu(tells=tells), monkeypatch, spec, vram="60GiB")
    again.config, again.plan = now.config, now.plan
    assert again.run()[0].engine.blocks == granted.blocks
    (said,) = [line for line in now.info.decisions if line.startswith("budget = ")]
    assert "30.00 GiB, as set" in said


def test_a_process_that_follows_one_with_an_idle_pool_does_not_say_that_its_own_is(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the whole pool; only a budget that was raised is its own too."""
    start = Start(FakeGpu(), monkeypatch, spec, vram="60GiB")
    plan, report, _ = start.run()
    now = start.serving(plan, report)
    change = PoolChange(blocks=90, kv_bytes=GIB, reason="no request for 5 s", lowered=True)
    then, info = breathed(now, change)
    assert then == now.plan
    assert any("no request for 5 s" in line for line in info.decisions)
    raised, _ = breathed(now, msgspec.structs.replace(change, budget_bytes=61 * GIB))
    assert (raised.budget_bytes, raised.decisions) == (61 * GIB, now.plan.decisions)


def test_too_small_a_budget_is_kept_to_as_far_as_it_goes(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next start is not refused for it."""
    gpu = FakeGpu()
    start = Start(gpu, monkeypatch, spec, vram="60GiB")
    plan, report, arbiter = start.run()
    asked = VramBudget(budget_bytes=GIB)
    granted = arbiter.change(asked, least_blocks(plan), start.runner.kv.resize)
    assert granted.blocks == least_blocks(plan)
    assert GIB < gpu.process <= granted.budget_bytes < gpu.process + 300 * MIB
    now = with_vram(start.serving(plan, report), asked, GIB, granted)
    (said,) = [line for line in now.info.lowered if line.startswith("budget = ")]
    assert "1.00 GiB was requested" in said
    assert said.endswith("less needs a restart: holdfast serve fake --vram 1024MiB")
    again = Start(FakeGpu(), monkeypatch, spec, vram="60GiB")
    again.config, again.plan = now.config, now.plan
    assert again.run()[0].engine.blocks >= granted.blocks
    assert again.gpu.process <= granted.budget_bytes


def test_a_budget_of_which_others_took_a_part_is_told_as_it_is_kept_to(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When layers had come for it already, and the pool did not become larger."""
    start = Start(FakeGpu(), monkeypatch, spec, vram="20GiB")
    plan, report, arbiter = start.run()
    granted = msgspec.structs.replace(arbiter.granted(), budget_bytes=22 * GIB)
    now = with_vram(start.serving(plan, report), VramBudget(budget_bytes=24 * GIB), 24 * GIB, granted)
    (said,) = [line for line in now.info.lowered if line.startswith("budget = ")]
    assert said.startswith("budget = 22.00 GiB (measured): 24.00 GiB was requested, but others took memory of the GPU")
    assert now.config.vram == 22 * GIB
    same = with_vram(now, VramBudget(budget_bytes=22 * GIB), 22 * GIB, granted)
    assert not [line for line in same.info.lowered if line.startswith("budget = ")]


@pytest.mark.parametrize(("engines", "pages"), [(1, 84), (2, 76)])
def test_ram_for_kv_pages_leaves_a_tenth_of_what_was_free(
    engines: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at before each piece: a process that wakes up, or follows another, has the plan of the first. What
    is left after a piece is not what there was. Weights leave it what is to come."""
    page, made, go = mmap.PAGESIZE, list[PinnedMemory](), threading.Event()

    def unpinned(*given: Any, **named: Any) -> PinnedMemory:
        made.append(PinnedMemory(*given, pin=lambda *_: 0, unpin=lambda addresses, device: None, **named))
        return made[0]

    monkeypatch.setattr(gpu_tiers, "PinnedMemory", unpinned)
    monkeypatch.setattr(gpu_tiers, "PIECE_BYTES", 4 * page)
    monkeypatch.setattr(host_ram, "LEFT_FREE_BYTES", 6 * page)

    def ram() -> Memory:
        assert threading.current_thread() is threading.main_thread() or go.wait(PATIENCE_S)
        touched = sum(piece.nbytes - pinned_memory._absent_bytes(piece) for one in made for piece in one.pieces)
        return Memory(total_bytes=GIB, available_bytes=100 * page - touched, limited_by="machine")

    monkeypatch.setattr(build_gpu, "ram", ram)
    used, to_come = list[GpuPageCopies](), list[Callable[[], int]]()
    layout = SimpleNamespace(page_bytes=page)
    runner: Any = SimpleNamespace(device=CPU, link=SimulatedCopies(), use_tiers=used.append, leave_to_kv=to_come.append)
    plan: Any = SimpleNamespace(engine=SimpleNamespace(layout=layout, kv_ram_bytes=96 * page))
    assert build_gpu.use_kv_tiers(plan, runner, None, engines=engines) is not None
    assert to_come[0]() == 96 * page
    go.set()
    until_s = time.monotonic() + PATIENCE_S
    while used[0].host_pages() < pages or not used[0].host_settled():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert (used[0].host_pages(), to_come[0]()) == (pages, 0)
    used[0].close()


def test_a_budget_that_is_not_there_changes_nothing(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    start = Start(gpu, monkeypatch, spec, vram="20GiB")
    plan, _, arbiter = start.run()
    before, gpu.others = gpu.pool, gpu.free - 5 * GIB
    with pytest.raises(DoesNotFitError, match="less is free") as refused:
        arbiter.change(VramBudget(budget_bytes=40 * GIB), least_blocks(plan), start.runner.kv.resize)
    assert refused.value.found == "19.89 GiB that this engine holds, and 5.00 GiB free"
    assert (gpu.pool, arbiter.budget_bytes) == (before, 20 * GIB)

    def faster(blocks: int) -> None:
        gpu.others += 4 * GIB
        start.runner.kv.resize(blocks)

    with pytest.raises(DoesNotFitError, match="less is free"):
        arbiter.change(VramBudget(budget_bytes=24 * GIB), least_blocks(plan), faster)
    assert (gpu.pool, arbiter.budget_bytes) == (before, 20 * GIB)
    # A share of the GPU that was not set is what is there of it.
    granted = arbiter.change(
        VramBudget(budget_bytes=72 * GIB, at_most_free=True), least_blocks(plan), start.runner.kv.resize
    )
    assert granted.kv_bytes == gpu.pool > before
    assert gpu.free < 200 * MIB


def test_a_set_pool_holds_again_when_the_budget_is_no_longer_set(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(FakeGpu(), monkeypatch, spec, kv_cache_memory_bytes="4GiB")
    plan, report, arbiter = start.run()
    now, pool = start.serving(plan, report), start.runner.kv
    asked = asked_vram(now, None)
    assert (asked.kv_bytes, asked.at_most_free) == (4 * GIB, True)
    arbiter.change(VramBudget(budget_bytes=30 * GIB), least_blocks(plan), pool.resize)
    assert pool.nbytes > 20 * GIB
    granted = arbiter.change(asked, least_blocks(plan), pool.resize)
    assert granted.kv_bytes == plan.terms["kv_pool"] <= 4 * GIB
    assert with_vram(now, asked, None, granted).plan.engine.blocks == granted.blocks


def test_a_process_that_is_started_again_has_the_layers_where_they_were(spec: ModelSpec) -> None:
    """And what is told of them follows."""
    gpu = FakeGpu()
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", vram="2600MiB", max_model_len=2048)
    host = Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="machine")
    plan = make_gpu_plan(spec, None, config, [gpu.probed()], host=host)
    placed = plan.engine.streamed
    assert placed is not None
    assert 2 < len(placed.layers) < 16
    runner = FakeRunner(gpu, plan, plan.engine.layout.page_bytes)
    terms = [MemoryTerm(tier="vram", term=name, planned_bytes=size) for name, size in plan.terms.items()]
    below = LowerTier(
        tier="ram",
        total_bytes=64 * GIB,
        free_bytes=60 * GIB,
        limited_by="machine",
        terms=[
            MemoryTerm(tier="ram", term="weights", planned_bytes=placed.pinned_bytes),
            MemoryTerm(tier="ram", term="mlps_cpu", planned_bytes=5 * MIB),
        ],
    )
    report = MemoryReport(
        tier="vram", total_bytes=gpu.total, free_bytes=gpu.free, limited_by="GPU 0", budget_bytes=plan.budget_bytes,
        terms=terms, page_bytes=plan.engine.layout.page_bytes, below=[below], loading_bytes=0, loading_peak_bytes=0,
        held_bytes=0,
    )  # fmt: skip
    model: Any = SimpleNamespace(files=SimpleNamespace(name="fake", trained_to_embed=False), spec=spec)
    info = engine_info(config, model.files, spec, plan, runner, report)  # type: ignore[arg-type]
    now = Serving(config=config, model=model, plan=plan, info=info, pids=(1,))
    graphs_bytes = later_graphs_bytes(spec, plan.limits)
    assert MIB < graphs_bytes < 256 * MIB
    for streamed in (placed.layers[1:], (), tuple(range(16))):
        then = with_others_streamed(placed, streamed)
        weights = plan.terms["weights"] + then.resident_bytes - placed.resident_bytes
        granted = VramGrant(
            budget_bytes=3 * GIB,
            blocks=90,
            kv_bytes=90 * plan.engine.layout.page_bytes,
            layers=LayersGrant(
                streamed=streamed,
                moved_bytes=then.moved_bytes,
                weights_bytes=weights,
                slots_bytes=then.slots_bytes,
                pinned_bytes=77 * MIB,
                graphs_bytes=0 if streamed else graphs_bytes,
            ),
        )
        now = with_vram(now, VramBudget(budget_bytes=3 * GIB), 3 * GIB, granted)
        assert now.plan.engine.streamed == then
        assert now.plan.terms["weights"] == now.info.weights_bytes == weights
        assert now.plan.terms.get("layer_slots", 0) == then.slots_bytes
        measured = {term.term: term.measured_bytes for term in now.info.memory.terms}
        assert (measured["weights"], measured["kv_pool"]) == (weights, granted.kv_bytes)
        pinned, mlps = now.info.memory.below[0].terms
        assert (pinned.measured_bytes, mlps.planned_bytes, mlps.measured_bytes) == (77 * MIB, 5 * MIB, None)
        assert now.plan.terms["page_tables"] == page_tables_bytes(77 * MIB)
        assert now.plan.terms["graphs"] - plan.terms["graphs"] == (0 if streamed else graphs_bytes)
        limited = list[GraphsRoom]()
        again: Any = SimpleNamespace(
            captures=True, spec=spec, movable_layers=SimpleNamespace(streamed=streamed), limit_graphs=limited.append
        )
        room = build_gpu._graphs_room(again, plan, memory=None)  # type: ignore[arg-type]
        assert room is limited[0]
        assert (room.wanted_bytes, room.next_bytes, room.nbytes) == (graphs_bytes, FIRST_CAPTURE_BYTES, 0)
        assert build_gpu._counts_graphs(again, now.plan) == (not streamed), "from its first step on"
        assert not build_gpu._counts_graphs(again, plan), "which has not counted them"
        (said,) = [line for line in now.info.decisions if line.startswith("streamed_layers = ")]
        assert f"{len(streamed)} of 16" in said
        assert any(line == said for line in now.info.lowered) == bool(streamed)
        plan_told, info_told = balanced(now, granted)
        assert (plan_told.engine.streamed, info_told.blocks) == (then, 89)
        # For a neighbour: the same, with the reason, and a process that is started again begins with it.
        less = msgspec.structs.replace(granted, budget_bytes=GIB)
        change = PoolChange(
            blocks=90, kv_bytes=granted.kv_bytes, reason="others hold 7 GiB", lowered=True, budget_bytes=GIB,
            stood_still_s=0.125, granted=less,
        )  # fmt: skip
        plan_told, info_told = breathed(now, change)
        assert (plan_told.engine.streamed, plan_told.budget_bytes, info_told.blocks) == (then, GIB, 89)
        assert info_told.weights_bytes == weights
        assert info_told.memory.budget_bytes == GIB
        assert any(line.startswith("budget = 1.00 GiB (measured): others hold 7 GiB") for line in info_told.lowered)
        assert any("steps stood still for 125 ms" in line for line in info_told.decisions)


def test_what_experts_have_made_of_a_budget_is_told_and_kept() -> None:
    """By plan, ledger and decisions: a process that is started again has as many on the GPU."""
    gpu, model = FakeGpu(), planned(catalogue.find("qwen3-30b-a3b"))
    assert model is not None
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", vram="16GiB", max_model_len=2048)
    host = Memory(total_bytes=256 * GIB, available_bytes=250 * GIB, limited_by="machine")
    plan = make_gpu_plan(model.spec, None, config, [gpu.probed()], host=host)
    places = plan.engine.expert_places
    assert places is not None
    runner = FakeRunner(gpu, plan, plan.engine.layout.page_bytes)
    terms = [MemoryTerm(tier="vram", term=name, planned_bytes=size) for name, size in plan.terms.items()]
    waiting = [MemoryTerm(tier="ram", term=name, planned_bytes=5 * MIB) for name in ("experts", "experts_cpu")]
    below = LowerTier(tier="ram", total_bytes=GIB, free_bytes=GIB, limited_by="machine", terms=waiting)
    report = MemoryReport(
        tier="vram", total_bytes=gpu.total, free_bytes=gpu.free, limited_by="GPU 0", budget_bytes=plan.budget_bytes,
        terms=terms, page_bytes=plan.engine.layout.page_bytes, below=[below], loading_bytes=0, loading_peak_bytes=0,
        held_bytes=0,
    )  # fmt: skip
    found: Any = SimpleNamespace(files=SimpleNamespace(name="fake", trained_to_embed=False), spec=model.spec)
    info = engine_info(config, found.files, model.spec, plan, runner, report)  # type: ignore[arg-type]
    now = Serving(config=config, model=found, plan=plan, info=info, pids=(1,))
    resident = tuple(9 for _ in places.layers)
    experts = ExpertsGrant(resident=resident, weights_bytes=4 * GIB, slots_bytes=6 * MIB, pinned_bytes=77 * MIB)
    granted = VramGrant(budget_bytes=7 * GIB, blocks=90, kv_bytes=90 * MIB, experts=experts)
    then = with_vram(now, VramBudget(budget_bytes=7 * GIB), 7 * GIB, granted)
    assert then.plan.engine.expert_places == replace(places, resident=resident)
    assert (then.plan.terms["weights"], then.plan.terms["expert_slots"]) == (4 * GIB, 6 * MIB)
    measured = {term.term: term.measured_bytes for term in then.info.memory.terms}
    assert (measured["weights"], measured["expert_slots"], then.info.weights_bytes) == (4 * GIB, 6 * MIB, 4 * GIB)
    assert [term.measured_bytes for term in then.info.memory.below[0].terms] == [77 * MIB, None]
    (said,) = [line for line in then.info.decisions if line.startswith("expert_places = ")]
    assert f"{9 * len(places.layers):,} of {places.experts * len(places.layers):,} in VRAM, 77.00 MiB in RAM" in said
    # By hand they stay, and so does what was said of them.
    fixed = with_vram(now, VramBudget(budget_bytes=7 * GIB), 7 * GIB, msgspec.structs.replace(granted, experts=None))
    (kept,) = [line for line in fixed.info.decisions if line.startswith("expert_places = ")]
    assert kept in info.decisions
    assert fixed.plan.engine.expert_places == places


def test_files_are_closed_when_loading_fails(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    start = Start(gpu, monkeypatch, spec)
    start.config = EngineConfig.from_arguments(device="cuda", max_model_len=8192)
    closed: list[bool] = []

    class FakeCheckpoint:
        def __enter__(self) -> FakeCheckpoint:
            return self

        def __exit__(self, *_: object) -> None:
            closed.append(True)

    def unreadable(*_: Any, **__: Any) -> object:
        raise OSError("input/output error")

    monkeypatch.setattr(build_gpu, "open_checkpoint", lambda files: FakeCheckpoint())
    monkeypatch.setattr(build_gpu, "load_weights", unreadable)
    with pytest.raises(OSError, match="input/output"):
        start.run()
    assert closed == [True]


def test_a_gpu_that_stays_full_is_refused_with_numbers(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    start = Start(gpu, monkeypatch, spec)

    def neighbour() -> None:
        gpu.others = gpu.free - GIB

    start.during.append(neighbour)
    with pytest.raises(DoesNotFitError, match="does not fit on fake"):
        start.run()


def test_a_start_that_takes_more_than_planned_is_not_tried_again_and_again(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else takes anything: once more for a neighbour that came and went, and then it is said what took more."""
    start = Start(FakeGpu(), monkeypatch, spec, vram="6GiB", max_model_len=8192)
    loads: list[str] = []
    profile_run = FakeRunner.profile_run

    def more(runner: FakeRunner) -> None:
        loads.append("once")
        profile_run(runner)
        runner.gpu.take_tensors(4 * GIB)

    monkeypatch.setattr(FakeRunner, "profile_run", more)
    with pytest.raises(DoesNotFitError, match="took more memory than planned") as refused:
        start.run()
    assert len(loads) == 2
    assert "more than planned were used" in str(refused.value.found)


def test_a_failed_start_keeps_nothing(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds on to the error holds on to no weights."""
    start = Start(FakeGpu(), monkeypatch, spec)
    runners: list[FakeRunner] = []

    def fails(runner: FakeRunner) -> None:
        runners.append(runner)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FakeRunner, "profile_run", fails)
    with pytest.raises(DoesNotFitError, match="in each of") as refused:
        start.run()
    assert [runner.closed for runner in runners] == [True] * START_TRIES
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None


def test_an_engine_that_plans_for_itself_goes_to_the_gpu_that_it_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    config = EngineConfig.from_arguments(
        model=str(tmp_path), device="cuda", load_format="dummy", max_model_len=8192, skip_tokenizer_init=True
    )
    went: list[Plan] = []

    def fake_build(config: Any, model: Any, progress: Any, plan: Plan, *_: Any) -> str:
        went.append(plan)
        return "built"

    monkeypatch.setattr(build, "probe", lambda: NvidiaMachine(gpus=(FakeGpu().probed(),)))
    monkeypatch.setattr(build, "_build_on_gpu", fake_build)
    found: Any = build.build_core(config, build.find_model(config), lambda *_: None)
    assert found == "built"
    assert went[0].engine.gpu is not None
    assert went[0].engine.gpu.uuid == UUID


def test_ram_of_kv_tiers_is_named_part_by_part(spec: ModelSpec) -> None:
    """Beside what else waits in RAM, or alone."""
    config = EngineConfig.from_arguments(
        device="cuda", load_format="dummy", kv_ram="2GiB", kv_store="/kv", kv_store_size="10GiB"
    )
    plan = make_gpu_plan(spec, None, config, [FakeGpu().probed()])
    plan = replace(plan, own=replace(plan.engine, kv_ram_bytes=2 * GIB))
    waits = MemoryTerm(tier="ram", term="weights", planned_bytes=5)
    below = LowerTier(tier="ram", total_bytes=GIB, free_bytes=GIB, limited_by="machine", terms=[waits])
    names = ["kv_ram", "kv_store_buffers", "kv_store_queue", "kv_store_work", "kv_store_index"]
    for given, before in (([], []), ([below], ["weights"])):
        (tier,) = _with_kv_tiers(given, config, plan)
        assert [term.term for term in tier.terms] == [*before, *names]
        assert all(term.planned_bytes > 0 for term in tier.terms)
    plain, plan = (
        EngineConfig.from_arguments(device="cuda", load_format="dummy"),
        replace(plan, own=replace(plan.engine, kv_ram_bytes=0)),
    )
    assert _with_kv_tiers([below], plain, plan) == [below]
