"""From a plan to an engine that can step on a GPU: load, profile run, capture, then back the KV pool with what is left.

The pool comes last and by what is measured, so that nothing after it asks for memory that may not be there. When
somebody else takes memory meanwhile, the plan is made again with what is free then.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoints import ModelFiles, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.startup.kv_scales import find_kv_scales
from holdfast.engine.startup.placed_experts import device_experts, expert_host, expert_tier, host_layers
from holdfast.engine.startup.streamed_layers import device_layers, tiers_below_gpu
from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution import native
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.device import DTYPES, KV_DTYPES, Device, has_gpu_context
from holdfast.execution.gpu.decoder import arrange_layer
from holdfast.execution.gpu.memory.accounting import GpuHeld, GpuMemory, held_before, open_device
from holdfast.execution.gpu.memory.arbiter import VramArbiter
from holdfast.execution.gpu.memory.oom import is_shortage
from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.host_copies import load_host_mlp, with_host_mlps
from holdfast.execution.streaming.host_mlps import HostMlps, MlpOffer
from holdfast.execution.tiers.disk import Store
from holdfast.execution.tiers.gpu import DiskPlaces, GpuPageCopies, HostMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.cpu import staging_places
from holdfast.footprint.gpu import code_bytes
from holdfast.footprint.streamed import page_tables_bytes
from holdfast.hardware import memory as ram
from holdfast.hardware import processor
from holdfast.kvcache import TierLimits
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan, largest_pool, settle_pool
from holdfast.planner.serve.kv_store_ram import store_terms
from holdfast.planner.serve.shares.engines import one_share, ram_share
from holdfast.planner.sizing.host_ram import may_be_pinned
from holdfast.records import LowerTier, MemoryReport, MemoryTerm
from holdfast.units import GIB, format_bytes

if TYPE_CHECKING:
    Progress = Callable[[str, int, int], None]

log = logging.getLogger("holdfast")

BACK_TRIES = 4
"""A neighbour may take memory between the look at what is free and the taking of it."""

START_TRIES = 4

MOST_LOADING, MOST_STORING, SPARE_PAGES, SAVES_AHEAD = 1024, 1024, 2048, 32
"""KV pages on their way to the pool and from it at once, those of it that are kept free or saved in RAM, and those that
a step saves beyond that while RAM has pages that nobody needs."""
STORES_A_PLAN = 32
"""Of those from it, that a step begins beside as many as it fills: a quarter of a millisecond of books."""

RAM_SHARE, RAM_KEPT_BYTES = 0.9, 3 * GIB
"""Of what is free once layers are pinned, and how much of that stays free: as plans leave it."""

Built = tuple[GpuRunner, Plan, MemoryReport, VramArbiter]


def build_gpu_runner(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    progress: Progress,
    replan: Callable[[int], Plan],
    beat: Callable[[], None] | None = None,
) -> Built:
    """`replan`: a new plan for the same GPU, this engine holding so many bytes on it that are to be used again. `beat`:
    called while a step waits for a disk."""
    assert plan.engine.gpu is not None
    uuid = plan.engine.gpu.uuid
    not_ours, had_context = held_before(uuid), has_gpu_context()
    device = open_device(uuid)

    def memory_of(tried: Plan) -> GpuMemory:
        return GpuMemory(device, uuid, tried.device.free_bytes, not_ours, context_bytes=context_beside(tried))

    def build(tried: Plan) -> Built:
        return _build(config, files, spec, tried, memory_of(tried), progress, beat)

    def again(failed: Plan) -> Plan:
        """With all that was taken given back; the context stays. It is the caller's where there was one before."""
        memory = memory_of(failed)
        gc.collect()
        memory.give_back_cached()
        told = memory.told_bytes()
        return replan((0 if had_context else failed.terms["context"]) if told is None else told)

    return start_with_room(plan, build, again)


def context_beside(plan: Plan) -> int | None:
    """Of an engine that shares its GPU with others of this server."""
    return plan.terms["context"] if plan.engine.gpu is not None and plan.engine.gpu.engines > 1 else None


def start_with_room(plan: Plan, build: Callable[[Plan], Built], again: Callable[[Plan], Plan]) -> Built:
    """`again` gives back what the failed start took, and makes a plan with what is free now; it refuses, with numbers,
    what has become impossible."""
    unchanged = False
    for _ in range(START_TRIES - 1):
        try:
            return build(plan)
        except (RuntimeError, EngineError, DoesNotFitError) as error:
            refused = isinstance(error, DoesNotFitError)
            # Somebody may have taken memory and given it back. If it does not fit a second time, it is not that.
            if (refused and unchanged) or not (refused or is_shortage(error)):
                raise
            said = str(error).splitlines()[0]
        log.warning("memory ran short during startup (%s): planning again", said)
        failed, plan = plan, again(plan)
        unchanged = plan.budget_bytes >= failed.budget_bytes
        log.warning(
            "new plan with %s of budget: context %s tokens, %d sequences, KV pool %s",
            format_bytes(plan.budget_bytes),
            f"{plan.limits.max_model_len:,}",
            plan.limits.max_num_seqs,
            format_bytes(plan.terms["kv_pool"]),
        )
    try:
        return build(plan)
    except (RuntimeError, EngineError) as error:
        if not is_shortage(error):
            raise
        said = str(error).splitlines()[0]
    # Outside of it: whoever keeps this error shall not keep the frames of the failed start, and what they hold.
    raise DoesNotFitError(
        f"out of GPU memory in each of {START_TRIES} attempts to start, though each was planned for the free memory",
        code="HF125",
        needed=", ".join(f"{name} {format_bytes(size)}" for name, size in plan.terms.items()),
        found=said,
        fix="stop other processes that use this GPU (see nvidia-smi), or lower --gpu-memory-utilization",
        field="gpu_memory_utilization",
    )


def _build(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    memory: GpuMemory,
    progress: Progress,
    beat: Callable[[], None] | None,
) -> Built:
    context = memory.held()
    memory.watch_tensors()
    coming = sum(size for name, size in plan.terms.items() if name not in ("context", "kv_pool"))
    plan = settle_pool(plan, context.free_bytes - coming)
    progress("load", 0, 0)
    # No name here for the weights: an error that is kept would keep them through it.
    runner = GpuRunner(
        spec,
        _load(config, files, spec, plan, memory.device, progress),
        plan.engine.layout,
        RunnerLimits.of(plan.limits, config.lora_places),
        memory.device,
        kv_dtype=KV_DTYPES[plan.kv_dtype],
        graphs=not config.enforce_eager,
        lora=LoraLimits.of(config),
        beat=beat,
    )
    hosts = None if plan.engine.streamed is None else runner.decoder.host_mlps
    memory.beside_torch = lambda: runner.beside_torch_bytes
    try:
        runner, plan, report, arbiter = _settle(
            runner,
            plan,
            memory,
            context,
            progress,
            lambda: find_kv_scales(config, files, runner),
            lambda ready: _with_kv_tiers(_below(config, ready, runner, hosts), config, ready),
            store_terms(config, plan.engine.layout.page_bytes).get("buffers", 0),
            (lambda: None) if hosts is None else hosts.begin,
        )
        if hosts is not None:
            progress("calibrate", 0, 0)
            hosts.calibrate(beat or (lambda: None))
            plan = replace(plan, decisions=(*plan.decisions, hosts.decision))
        return runner, plan, report, arbiter
    except BaseException:
        runner.close()
        raise


def _below(config: EngineConfig, plan: Plan, runner: GpuRunner, hosts: HostMlps | None) -> list[LowerTier]:
    """Where layers or experts wait."""
    places = plan.engine.expert_places
    if places is not None and (experts := runner.decoder.experts) is not None:
        return [expert_tier(plan, places, experts.pinned_bytes, experts.exchange_bytes)]
    return tiers_below_gpu(config, plan, runner.pinned_bytes, 0 if hosts is None else hosts.most_bytes)


def _with_kv_tiers(below: list[LowerTier], config: EngineConfig, plan: Plan) -> list[LowerTier]:
    """With KV pages in RAM, and what a store on disk takes of it, beside what else waits there."""
    planned = {"kv_ram": plan.engine.kv_ram_bytes}
    planned |= {f"kv_store_{name}": size for name, size in store_terms(config, plan.engine.layout.page_bytes).items()}
    terms = [MemoryTerm(tier="ram", term=name, planned_bytes=size) for name, size in planned.items() if size]
    if not terms:
        return below
    if below and below[0].tier == "ram":
        return [msgspec.structs.replace(below[0], terms=[*below[0].terms, *terms]), *below[1:]]
    host = ram()
    tier = LowerTier(
        tier="ram",
        total_bytes=host.total_bytes,
        free_bytes=host.available_bytes,
        limited_by=host.limited_by,
        terms=terms,
    )
    return [tier, *below]


def use_kv_tiers(
    plan: Plan, runner: GpuRunner, store: Store | None, tier_file: int | None = None, engines: int = 1
) -> TierLimits | None:
    """KV pages below the pool of a runner that is ready. A thread pins RAM for them from now on, and it is used as it
    comes. `tier_file`: whose memory that is; None: the engine's own; `engines`: of the
    server, each of which pins RAM. None: there is no tier."""
    page, device, kv_ram_bytes = plan.engine.layout.page_bytes, runner.device, plan.engine.kv_ram_bytes
    if not kv_ram_bytes and store is None:
        return None
    host = disk = None
    places = staging_places(page)
    if kv_ram_bytes:
        free = ram().available_bytes

        def room() -> int:
            return may_be_pinned(free, ram().available_bytes, engines)

        host = HostMemory.pinned(kv_ram_bytes, page, device, tier_file, room)
        runner.leave_to_kv(host.to_come_bytes)
    if store is not None:
        disk = DiskPlaces.pinned(store, page, places, device)
    # Where weights come too, pages go behind them, over the same link.
    link = runner.link or CudaCopies(device)
    runner.use_tiers(GpuPageCopies(lambda: runner.kv.pages, page, link, lambda: runner.weights_come, host, disk))
    return TierLimits(
        most_loading=MOST_LOADING,
        most_loading_disk=places,
        most_storing=MOST_STORING,
        stores_a_plan=STORES_A_PLAN,
        saves_ahead=SAVES_AHEAD,
        most_writing=places,
        storing_share=1 / 8,
        spare_pages=SPARE_PAGES,
        spare_share=1 / 4,
    )


def _settle(
    runner: GpuRunner,
    plan: Plan,
    memory: GpuMemory,
    context: GpuHeld,
    progress: Progress,
    find_scales: Callable[[], tuple[Decision, ...]],
    below: Callable[[Plan], list[LowerTier]],
    staging_bytes: int = 0,
    link_is_known: Callable[[], None] = lambda: None,
) -> Built:
    """From a loaded model to a backed pool; `context`: what was held before the load. `find_scales`: of the KV cache,
    before anything is captured. `below`: tiers that layers wait in. `staging_bytes`: pinned later, beside
    RAM for KV pages: what these pass through. `link_is_known`: called once it was measured."""
    loaded = memory.held()
    memory.forget_loading()
    plan = replace(plan, decisions=(*plan.decisions, *runner.measure_link()))
    link_is_known()
    progress("profile_run", 0, 0)
    runner.reserve_kv(largest_pool(plan, plan.device.total_bytes))
    runner.back_kv(2)
    runner.profile_run()
    plan = replace(plan, decisions=(*plan.decisions, *find_scales()))
    profiled = memory.held()
    progress("capture", 0, 0)
    runner.capture()
    captured = memory.held()
    tensors = memory.most_allocated()
    tables = page_tables_bytes(runner.pinned_bytes + plan.engine.kv_ram_bytes + staging_bytes)
    measured = {
        "context": context.own_bytes,
        "weights": runner.weights_bytes,
        **({"layer_slots": runner.layer_slots_bytes} if runner.layer_slots_bytes else {}),
        **({"expert_slots": runner.expert_slots_bytes} if runner.expert_slots_bytes else {}),
        **({"page_tables": tables} if tables else {}),
        "buffers": runner.buffers_bytes,
        # Whatever else torch held at the worst moment; what it keeps beyond that is nobody's, and shown as such.
        "activations": max(
            0,
            tensors + runner.mapped_bytes - runner.weights_bytes - runner.layer_slots_bytes - runner.expert_slots_bytes
            - runner.buffers_bytes - runner.logits_bytes - runner.adapters_bytes,
        ),
        "adapters": runner.adapters_bytes,
        "logits": runner.logits_bytes,
        "graphs": captured.own_bytes - profiled.own_bytes,
    }  # fmt: skip
    # A driver that tells processes apart counts them as nobody's.
    uncounted = 0 if memory.told_bytes() is None else tables
    taken = taken_terms(plan, measured, captured.own_bytes + uncounted - runner.kv.nbytes)
    planned = sum(size for name, size in plan.terms.items() if name != "kv_pool")
    # What was asked for by hand stays so.
    by_hand = plan.question.settings.offload.experts_by_hand
    arbiter = VramArbiter(
        memory,
        runner.kv,
        plan.budget_bytes,
        taken,
        planned,
        runner.movable_layers,
        None if by_hand else runner.movable_experts,
        runner.change_experts,
    )
    plan = _back(plan, runner, arbiter)
    arbiter.pool_is_backed()
    measured["kv_pool"] = runner.kv.nbytes
    return runner, plan, report_of(plan, measured, loaded, memory.held(), below(plan)), arbiter


def _load(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, plan: Plan, device: Device, progress: Progress
) -> Weights:
    def pinned(done: int, total: int) -> None:
        progress("pin", done, total)

    opened = contextlib.nullcontext() if config.load_format == "dummy" else open_checkpoint(files)
    with opened as checkpoint, host_layers(plan, spec, checkpoint) as loaded:
        weights = load_weights(
            spec,
            checkpoint,
            dtype=DTYPES[plan.dtype],
            device=device,
            expand=plan.engine.expand_weights,
            quantize=plan.engine.quantize,
            progress=lambda done, total: progress("load", done, total),
            slots=device_layers(config, plan, device, pinned),
            experts=device_experts(config, plan, device, pinned),
            arrange=partial(arrange_layer, dtype=DTYPES[plan.dtype], device=device),
        )
        if loaded is not None and weights.experts is not None:
            weights.experts.compute_on_host(expert_host(plan, spec, loaded(), device))
        hosts = _host_mlps(config, plan, spec, files, weights)
        return weights if hosts is None else with_host_mlps(weights, spec, checkpoint, hosts)


def _host_mlps(
    config: EngineConfig, plan: Plan, spec: ModelSpec, files: ModelFiles, weights: Weights
) -> HostMlps | None:
    """Of streamed layers, where the host's cores may be sooner done with them than the link brings them."""
    streamed = plan.engine.streamed
    if streamed is None or config.cpu_compute == "off" or not isinstance(weights.slots, DeviceLayers):
        return None
    if not streamed.layers:  # All came to stay before this process was started.
        return None
    if streamed.on_disk or config.enable_lora or not native.available() or spec.decoder.mlp != "gated":
        why = "there are no compiled kernels for it"
        if streamed.on_disk or config.enable_lora:
            why = "layers come from a disk, which is slower" if streamed.on_disk else "LoRA is added on the GPU"
        log.info("cpu_compute: the GPU computes all MLPs (%s)", native.why_not() or why)
        return None
    like, slots = weights.layers[streamed.layers[0]], weights.slots
    if any(isinstance(weights.layers[layer].mlp, ExpertWeights) for layer in streamed.layers):
        return None

    def room_bytes() -> int:
        free = one_share(ram(), config.data_parallel_size).available_bytes
        free = int(free * RAM_SHARE) - RAM_KEPT_BYTES - slots.kv_to_come()
        share = ram_share(config)
        return free if share is None else min(free, share - slots.pinned_bytes - plan.engine.kv_ram_bytes)

    def load(layer: int) -> native.ExpertLayer | None:
        with contextlib.nullcontext() if config.load_format == "dummy" else open_checkpoint(files) as checkpoint:
            return load_host_mlp(spec, checkpoint, layer, weights.dtype, plan.engine.quantize)

    offer = MlpOffer(
        order=streamed.layers,
        attention_bytes=like.nbytes - like.mlp.nbytes,
        mlp_bytes=like.mlp.nbytes,
        hidden=spec.hidden_size,
        dtype=weights.dtype,
        tokens=plan.limits.max_num_seqs,
        threads=max(1, processor().cores - 1),
        room_bytes=room_bytes,
        load=load,
    )
    hosts = HostMlps(offer, slots, weights.final_norm.weight.device)
    return hosts if hosts.candidates else None


def taken_terms(plan: Plan, measured: Mapping[str, int], held: int) -> dict[str, int]:
    """By term, as the pool is sized by: with what no term accounts for, and what is still to come of graphs, and of
    kernels that the driver loads when they are first used. Those that the profile run has loaded are held already, and
    no term accounts for them: they are not reserved a second time. Graphs that are captured later are reserved whole:
    what else no term accounts for has nothing to do with them."""
    unaccounted = max(0, held - sum(measured.values()))
    planned = plan.terms.get("graphs", 0)
    code = min(planned, code_bytes(experts_apart=plan.engine.expert_places is not None))
    later = planned - code
    to_come = min(max(0, code - measured["graphs"] - unaccounted) + later, max(0, planned - measured["graphs"]))
    return {
        **measured,
        "context": max(measured["context"], plan.terms.get("context", 0)),
        "activations": measured["activations"] + unaccounted,
        "graphs": measured["graphs"] + to_come,
    }


def _back(plan: Plan, runner: GpuRunner, arbiter: VramArbiter) -> Plan:
    """As many pages as the budget and the GPU hold, and no more than are of use with the limits. What the other terms
    may still take stays free."""
    for attempt in range(BACK_TRIES):
        settled = settle_pool(plan, arbiter.free_bytes() + runner.kv.nbytes, arbiter.shares)
        try:
            runner.back_kv(settled.engine.blocks)
            return settled
        except RangeError as error:
            if not error.out_of_memory or attempt == BACK_TRIES - 1:
                raise
            arbiter.memory.give_back_cached()
    raise AssertionError("the last attempt returns or raises")


def report_of(
    plan: Plan, measured: dict[str, int], loaded: GpuHeld, ready: GpuHeld, below: list[LowerTier]
) -> MemoryReport:
    return MemoryReport(
        tier="vram",
        total_bytes=plan.device.total_bytes,
        free_bytes=plan.device.free_bytes,
        limited_by=plan.device.limited_by,
        budget_bytes=plan.budget_bytes,
        terms=[
            MemoryTerm(tier="vram", term=name, planned_bytes=size, measured_bytes=measured.get(name))
            for name, size in plan.terms.items()
        ],
        page_bytes=plan.engine.layout.page_bytes,
        held_bytes=ready.own_bytes,
        loading_bytes=plan.loading_bytes,
        loading_peak_bytes=loaded.own_bytes,
        below=below,
    )
