"""Another memory budget for an engine that serves: the same plan with a KV pool of another size.

Of RAM the pool is planned here, and the engine process is told its pages. Of a GPU that process knows best what is held
and free there: it is told the budget, and says what it has made of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.startup.build import FoundModel, plan_model
from holdfast.engine.startup.plan_lines import concurrency, planned_terms
from holdfast.errors import EngineError, UnsupportedOptionError
from holdfast.footprint.gpu import code_bytes
from holdfast.footprint.streamed import page_tables_bytes, with_others_streamed
from holdfast.hardware import memory
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan, largest_pool, settle_pool
from holdfast.planner.engines.command import written_size
from holdfast.planner.fit.result import describe_budget
from holdfast.records import (
    EngineInfo,
    ExpertsGrant,
    Failure,
    LayersGrant,
    MemoryReport,
    PoolChange,
    RankMemory,
    VramBudget,
    VramGrant,
)
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

REPLACED = ("budget", "kv_pool", "streamed_layers", "expert_places")
"""Decisions that another budget makes anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine as it serves, and its process."""

    config: EngineConfig
    model: FoundModel
    plan: Plan
    info: EngineInfo
    pids: tuple[int, ...]
    """Of all engine processes of this server."""

    @classmethod
    def of(
        cls, config: EngineConfig, model: FoundModel, plan: Plan | None, info: EngineInfo, pids: tuple[int, ...]
    ) -> Serving:
        """`plan`: None: it does not serve now."""
        if plan is None:
            raise EngineError("the engine is not ready, and its budget cannot be changed", fix="try again later")
        return cls(config=config, model=model, plan=plan, info=info, pids=pids)


Send = Callable[[protocol.ToEngine], bool]


class MemoryBudget:
    """Of one engine: changed by asking its process for a pool of another size."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[protocol.Resized] | None = None
        self._asked = 0
        """How often. Whoever asked may not have waited for the answer, which comes all the same."""

    async def change(self, now: Serving, tier: str, budget_bytes: int | None, send: Send) -> Serving:
        """How it serves from then on: so does whatever process is started after this one. `send`: False when there is
        no process to be told."""
        refuse_tier(now.info.memory, tier)
        if now.plan.engine.streamed is not None and now.plan.engine.gpu is None:
            raise UnsupportedOptionError(
                "the memory budget cannot be changed while layers are streamed from a disk to the CPU",
                fix=f"restart with another --{tier}",
                field=tier,
            )
        if now.config.nnodes > 1:
            raise UnsupportedOptionError(
                "the memory budget cannot be changed while ranks are on several nodes: what is free on the others is"
                " known only when they join",
                fix=f"restart with another --{tier}",
                field=tier,
            )
        if now.plan.engine.gpu is None:
            config, plan = await asyncio.to_thread(with_budget, now, budget_bytes)
            answer = await self._ask(send, partial(protocol.ResizeKV, plan.engine.blocks))
            then = replace(now, config=config, plan=plan, info=told(now.info, plan, plan.engine.blocks))
        else:
            asked = asked_vram(now, budget_bytes)
            answer = await self._ask(send, partial(protocol.SetVram, asked))
            assert answer.granted is not None, "a SetVram is answered with what was granted"
            then = with_vram(now, asked, budget_bytes, answer.granted)
        then = replace(then, info=_with_standstill(then.info, answer.stood_still_s))
        log.info(
            "memory budget changed to %s: %s; %s",
            format_bytes(then.plan.budget_bytes),
            _pool_and_layers(then),
            stood_still(answer.stood_still_s),
        )
        for line in then.info.lowered:
            if line.startswith("budget = "):
                log.warning("%s", line)
        return then

    async def _ask(self, send: Send, message: Callable[[int], protocol.ToEngine]) -> protocol.Resized:
        self._answer, self._asked = asyncio.get_running_loop().create_future(), self._asked + 1
        if not send(message(self._asked)):
            self.died()
        return await self._answer

    def answered(self, answer: protocol.Resized) -> None:
        """By the process."""
        if self._answer is not None and not self._answer.done() and answer.number == self._asked:
            if answer.failure is None:
                self._answer.set_result(answer)
            else:
                self._answer.set_exception(answer.failure.error())

    def died(self) -> None:
        error = EngineError("the engine process exited before its memory budget was changed")
        self.answered(protocol.Resized(self._asked, Failure.of(error)))


def stood_still(seconds: float) -> str:
    return f"steps stood still for {seconds * 1000:.0f} ms"


def _with_standstill(info: EngineInfo, seconds: float) -> EngineInfo:
    """What was decided of the pool, with what that cost who was answered meanwhile."""

    def told(lines: list[str]) -> list[str]:
        return [f"{line}; {stood_still(seconds)}" if line.startswith("kv_pool = ") else line for line in lines]

    return msgspec.structs.replace(info, decisions=told(info.decisions), lowered=told(info.lowered))


def _pool_and_layers(now: Serving) -> str:
    pool, blocks = format_bytes(now.info.kv_pool_bytes), counted(now.info.blocks, "block")
    said = {"streamed_layers": "layers streamed", "expert_places": "experts"}
    moved = [f", {said[one.field]}: {one.value}" for one in now.plan.decisions if one.field in said]
    return f"KV pool {pool} ({blocks})" + "".join(moved)


def refuse_tier(report: MemoryReport | None, tier: str) -> None:
    """A budget is changed on the tier that holds the KV pool."""
    if report is None or report.tier != tier:
        runs_on = "the CPU" if report is None or report.tier == "ram" else "a GPU"
        raise UnsupportedOptionError(
            f"{tier} is not a budget of this server, which runs on {runs_on}",
            needed="ram" if report is None else report.tier,
            found=tier,
            field=tier,
        )


def asked_vram(now: Serving, vram: int | None) -> VramBudget:
    """`vram`: None: the share of the GPU that the config has, and the pool as it was set."""
    if vram is not None:
        return VramBudget(budget_bytes=vram)
    share = int(now.plan.device.total_bytes * now.plan.utilization)
    return VramBudget(budget_bytes=share, at_most_free=True, kv_bytes=now.config.kv_cache_memory_bytes)


def with_vram(now: Serving, asked: VramBudget, vram: int | None, granted: VramGrant) -> Serving:
    """With what the engine process made of it. One that is started again plans with this budget, and measures again
    what that leaves to the pool. `vram`: as set."""
    plan, info, (rank,) = now.plan, now.info, now.plan.ranks
    layout, budget = plan.engine.layout, granted.budget_bytes
    limits = replace(
        plan.limits,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
    )
    short = vram is not None and budget > vram
    config = replace(now.config, vram=None if vram is None else budget)
    if vram is not None:
        config = replace(config, kv_cache_memory_bytes=None)
    rank = replace(rank, budget_bytes=budget, device=replace(rank.device, budget_bytes=config.vram))
    layers, experts = granted.layers, granted.experts
    if (sizes := _sizes(granted, plan.engine.kv_ram_bytes)) is not None:
        # A process that is started again has them from the start.
        begins = sizes if layers is None else sizes | {"graphs": code_bytes(experts_apart=False) + layers.graphs_bytes}
        rank = replace(rank, terms=tuple(replace(one, nbytes=begins.get(one.name, one.nbytes)) for one in rank.terms))
    why = describe_budget(rank, plan.utilization)
    lacking = vram is not None and budget < asked.budget_bytes
    if short:
        why = _least_said(now, asked, limits.max_model_len)
    if lacking:
        took = "others took memory of the GPU meanwhile: ask again when they have left"
        why = f"{format_bytes(asked.budget_bytes)} was requested, but {took}"
    source = "measured" if short or lacking or vram is None else "set"
    pool = f"{format_bytes(granted.blocks * layout.page_bytes)} ({counted(granted.blocks, 'block')})"
    decisions = (
        *(decision for decision in plan.decisions if decision.field not in _replaced(granted)),
        *([] if layers is None else [_streamed_decision(plan, layers)]),
        *([] if experts is None else [_experts_decision(plan, experts)]),
        Decision("budget", format_bytes(budget), why, source, lowered=short or lacking),
        Decision("kv_pool", pool, "what the budget leaves of what is measured", "measured"),
    )
    others = sum(term.nbytes for term in rank.terms)
    changed = replace(plan, limits=limits, ranks=(rank,), decisions=decisions)
    most = largest_pool(changed, budget)
    if asked.kv_bytes is not None:
        most = min(most, asked.kv_bytes // layout.page_bytes)
    planned = min(most, max(0, budget - others) // layout.page_bytes)
    streamed = plan.engine.streamed
    if layers is not None and streamed is not None:
        streamed = with_others_streamed(streamed, layers.streamed)
    places = plan.engine.expert_places
    if experts is not None and places is not None:
        places = replace(places, resident=experts.resident)
    own = replace(plan.engine, blocks=planned, most_blocks=most, streamed=streamed, expert_places=places)
    changed = replace(changed, own=own)
    info = told(info, changed, granted.blocks, granted.kv_bytes)
    if sizes is not None:
        info = _with_sizes_told(info, granted, sizes)
    return replace(now, config=config, plan=changed, info=info)


def _least_said(now: Serving, asked: VramBudget, tokens: int) -> str:
    """Where all weights began on the GPU none ever leaves, and a start may place them elsewhere."""
    kept = f"weights, workspaces and one sequence of {counted(tokens, 'token')}"
    said = f"{format_bytes(asked.budget_bytes)} was requested, but {kept} stay: the least that can be kept to"
    if now.plan.engine.streamed is not None or now.plan.engine.expert_places is not None:
        return said
    command = f"holdfast serve {now.info.model} --vram {written_size(asked.budget_bytes)}"
    return f"{said}; a model that began whole in VRAM stays so, and less needs a restart: {command}"


def changed_by_itself(now: Serving, message: protocol.Balanced | protocol.Breathed) -> tuple[Plan, EngineInfo]:
    """As the engine process has changed it, within the same budget."""
    if isinstance(message, protocol.Breathed):
        return breathed(now, message.change)
    return balanced(now, message.granted)


def breathed(now: Serving, change: PoolChange) -> tuple[Plan, EngineInfo]:
    """With a pool of another size for a while. The plan stays, but for a budget that was raised: a process that is
    started again begins with the whole pool, and says so. Where layers or experts gave way too, it begins with what
    neighbours have left, and takes more when they go."""
    if change.granted is not None:
        return _shared(now, change, change.granted)
    pool = f"{format_bytes(change.blocks * now.plan.engine.layout.page_bytes)} ({counted(change.blocks, 'block')})"
    decision = Decision(
        "kv_pool", pool, f"{change.reason}; {stood_still(change.stood_still_s)}", "measured", lowered=change.lowered
    )
    plan, budget = now.plan, change.budget_bytes
    if budget is not None:
        plan = replace(plan, ranks=(replace(plan.ranks[0], budget_bytes=budget),))
    others = (one for one in plan.decisions if one.field != "kv_pool")
    shown, on_gpu = replace(plan, decisions=(*others, decision)), plan.engine.gpu is not None
    return plan, told(now.info, shown, change.blocks, change.kv_bytes if on_gpu else None)


def _shared(now: Serving, change: PoolChange, granted: VramGrant) -> tuple[Plan, EngineInfo]:
    """With what neighbours leave of the budget that was set, which holds again when they go."""
    asked = VramBudget(budget_bytes=granted.budget_bytes, kv_bytes=now.config.kv_cache_memory_bytes)
    then = with_vram(now, asked, now.config.vram, granted)
    budget = Decision("budget", format_bytes(granted.budget_bytes), change.reason, "measured", lowered=change.lowered)
    plan = replace(then.plan, decisions=tuple(budget if one.field == "budget" else one for one in then.plan.decisions))
    return plan, _with_standstill(told(then.info, plan, granted.blocks, granted.kv_bytes), change.stood_still_s)


def balanced(now: Serving, granted: VramGrant) -> tuple[Plan, EngineInfo]:
    """With layers and pages as the engine process has balanced them, within the same budget."""
    then = with_vram(now, VramBudget(budget_bytes=granted.budget_bytes), now.config.vram, granted)
    return then.plan, then.info


def _sizes(granted: VramGrant, kv_ram_bytes: int) -> dict[str, int] | None:
    """Of terms that go by layers or experts which may come and go; None: none may. `kv_ram_bytes`: pinned for KV
    pages."""
    moved, slots = (granted.layers, "layer_slots") if granted.experts is None else (granted.experts, "expert_slots")
    if moved is None:
        return None
    tables = page_tables_bytes(moved.pinned_bytes + kv_ram_bytes)
    return {"weights": moved.weights_bytes, slots: moved.slots_bytes, "page_tables": tables}


def _replaced(granted: VramGrant) -> set[str]:
    """Decisions that are made anew; where experts stay as they are, so does what was said of them."""
    return set(REPLACED) - (set() if granted.experts is not None else {"expert_places"})


def _experts_decision(plan: Plan, experts: ExpertsGrant) -> Decision:
    places = plan.engine.expert_places
    assert places is not None
    stay, every = sum(experts.resident), places.experts * len(places.layers)
    value = f"{stay:,} of {every:,} in VRAM, {format_bytes(experts.pinned_bytes)} in RAM"
    reason = f"the others of {counted(len(places.layers), 'layer')} wait in RAM, as the budget leaves it"
    return Decision("expert_places", value, reason, "measured", lowered=True)


def _streamed_decision(plan: Plan, layers: LayersGrant) -> Decision:
    count = len(plan.question.model.spec.layers)
    value = f"{len(layers.streamed)} of {count}, {format_bytes(layers.moved_bytes)}"
    reason = "the others stay in VRAM; these are copied to the GPU for every step"
    if not layers.streamed:
        reason = "all stay in VRAM with this budget"
    return Decision("streamed_layers", value, reason, "measured", lowered=bool(layers.streamed))


def _with_sizes_told(info: EngineInfo, granted: VramGrant, sizes: Mapping[str, int]) -> EngineInfo:
    """What is measured of layers or experts, in VRAM and in RAM."""
    report, moved = info.memory, granted.layers if granted.experts is None else granted.experts
    assert report is not None
    assert moved is not None
    pinned = "weights" if granted.experts is None else "experts"
    terms = [
        msgspec.structs.replace(term, measured_bytes=sizes.get(term.term, term.measured_bytes)) for term in report.terms
    ]
    below = [
        msgspec.structs.replace(
            tier,
            terms=[
                msgspec.structs.replace(term, planned_bytes=moved.pinned_bytes, measured_bytes=moved.pinned_bytes)
                if term.term == pinned
                else term
                for term in tier.terms
            ],
        )
        if tier.tier == "ram"
        else tier
        for tier in report.below
    ]
    return msgspec.structs.replace(
        info,
        weights_bytes=moved.weights_bytes,
        memory=msgspec.structs.replace(report, terms=terms, below=below),
    )


def with_budget(now: Serving, ram: int | None) -> tuple[EngineConfig, Plan]:
    """What was loaded stays as it is, and so do the limits that clients were told. `ram`: None: the share of what is
    free that the config has. Raises DoesNotFitError, or ConfigurationError for a budget that is not there."""
    config, plan, info = now.config, now.plan, now.info
    wanted = replace(config, ram=ram, kv_cache_memory_bytes=None if ram is not None else config.kv_cache_memory_bytes)
    held = replace(
        wanted,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        expand_weights="always" if plan.engine.expand_weights else "never",
        # Layers that are in memory stay there.
        nvme_path=None,
        nvme=None,
    )
    front_bytes = plan.question.settings.front_bytes * config.data_parallel_size  # Each engine counts its part.
    found = plan_model(held, now.model, front_bytes=front_bytes, kernels=plan.engine.compiled, engine_pids=now.pids)
    return wanted, _with_measured(found, info.memory)


def _with_measured(plan: Plan, report: MemoryReport | None) -> Plan:
    """What terms took beyond their plan, all in all, is taken from the pool."""
    terms = [] if report is None else report.terms
    measured = {term.term: term.measured_bytes for term in terms if term.measured_bytes and term.term != "kv_pool"}
    over = sum(measured.values()) - sum(plan.terms.get(name, 0) for name in measured)
    return plan if over <= 0 else settle_pool(plan, memory().total_bytes, measured)


def told(info: EngineInfo, plan: Plan, blocks: int, kv_bytes: int | None = None) -> EngineInfo:
    """What the engine says of itself with this plan's budget and a pool of so many pages, the null page included.
    `kv_bytes`: measured, where it is taken at once."""
    report = info.memory
    assert report is not None
    pool = blocks * report.page_bytes
    measured = {term.term: term.measured_bytes for term in report.terms} | {"kv_pool": kv_bytes}
    terms = [
        msgspec.structs.replace(
            term,
            planned_bytes=pool if term.term == "kv_pool" else term.planned_bytes,
            measured_bytes=measured.get(term.term),
        )
        for term in planned_terms(plan)
    ]
    last = {decision.field: decision for decision in plan.decisions if decision.field in REPLACED}

    def kept(lines: Sequence[str]) -> list[str]:
        return [line for line in lines if line.partition(" = ")[0] not in REPLACED]

    return msgspec.structs.replace(
        info,
        blocks=blocks - 1,
        kv_pool_bytes=pool,
        max_concurrency=concurrency(plan, blocks),
        decisions=[
            *(decision.line() for decision in plan.decisions if decision.field in REPLACED),
            *kept(info.decisions),
        ],
        lowered=[*kept(info.lowered), *(decision.line() for decision in last.values() if decision.lowered)],
        memory=msgspec.structs.replace(
            report, budget_bytes=plan.budget_bytes, terms=terms, ranks=_with_pool(report.ranks, plan, blocks)
        ),
    )


def _with_pool(ranks: Sequence[RankMemory], plan: Plan, blocks: int) -> list[RankMemory]:
    """Each with its part of a pool of so many pages."""
    sizes = [blocks * plan.engine.layout_of(one.rank).page_bytes for one in ranks]
    return [msgspec.structs.replace(one, kv_pool_bytes=nbytes) for one, nbytes in zip(ranks, sizes, strict=True)]
