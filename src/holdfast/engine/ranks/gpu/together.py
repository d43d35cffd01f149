"""All ranks of an engine on GPUs while it starts: opened, joined, loaded side by side, measured together; then a pool
for each, of as many pages as the tightest of them holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.gpu.rank import START_LIMIT_S, GpuRank, OpenedGpu, load_gpu_rank, profile_gpu_rank
from holdfast.engine.ranks.gpu.runner import RankedGpuRunner
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.ranks.together import find_scales_of_all, hung_s, start_group
from holdfast.engine.startup.build_gpu import report_of, taken_terms
from holdfast.errors import UnsupportedOptionError
from holdfast.execution.gpu.memory.accounting import GpuMemory
from holdfast.execution.gpu.memory.oom import finish
from holdfast.execution.parallel.gpu.link import GpuRankLink
from holdfast.execution.parallel.gpu.together import exchange_decisions
from holdfast.footprint.gpu import host_lines_bytes, node_lines_bytes
from holdfast.hardware import memory
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.planner import Plan, settle_pool
from holdfast.planner.serve.settle import stage_blocks
from holdfast.planner.sizing.rank_shares import whole_experts
from holdfast.records import LowerTier, MemoryReport, MemoryTerm, RankMemory, VramBudget, VramGrant

if TYPE_CHECKING:
    from holdfast.engine.ranks.nodes.hub import NodeHub

Progress = Callable[[str, int, int], None]


class RanksVram:
    """What the first rank holds on its GPU. The budget of several is not changed while they serve."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory

    def own_bytes(self) -> int:
        return self._memory.own_bytes()

    def blocks_with(self, asked: VramBudget, least_blocks: int) -> int:
        raise _fixed()

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        raise _fixed()


def _fixed() -> UnsupportedOptionError:
    return UnsupportedOptionError(
        "the memory budget of several ranks cannot be changed while they serve",
        fix="restart with another --vram or --gpu-memory-utilization",
        field="vram",
    )


@dataclass(frozen=True, slots=True)
class BuiltRanks:
    first: GpuRank
    runner: RankedGpuRunner
    plan: Plan
    report: MemoryReport
    vram: RanksVram

    @property
    def steps_ahead(self) -> int:
        """That are worth launching before the first is over: the next one, or as many as other stages can be at."""
        return max(1, len(self.plan.engine.stages) - 1)


def build_gpu_ranks(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    progress: Progress,
    beat: Callable[[], None] | None = None,
    hub: NodeHub | None = None,
) -> BuiltRanks:
    """`hub`: with the other nodes, where there are any. Whatever fails, no rank is left behind."""
    group = start_group(config, plan, cores=plan.engine.rank_count, timeout_s=START_LIMIT_S, beat=beat, hub=hub)
    link = group.link
    assert isinstance(link, GpuRankLink)
    opened: OpenedGpu | None = None
    try:
        opened = OpenedGpu(config, plan, 0)
        first = _load_all(config, files, spec, plan, progress, group, opened, beat)
        progress("profile_run", 0, 0)
        scales = find_scales_of_all(config, files, first.runner, group)
        group.order(messages.ProfileStep())
        own = profile_gpu_rank(first, plan)
        measured = [own, *group.answers(Measured)]
        uuids = [gpu.uuid for gpu in plan.engine.rank_gpus]
        decisions = exchange_decisions(first.joined, first.against, uuids, config.nnodes)
        plan = _settled(replace(plan, decisions=(*plan.decisions, *scales, *decisions)), measured)
        group.order(messages.BackKV(plan.engine.blocks))
        first.runner.back_kv(plan.engine.blocks)
        group.answers(messages.Done)
        group.timeout_s = hung_s(config)
        group.order(messages.Serve(group.timeout_s))
        first.joined.limit(group.timeout_s)
        group.answers(messages.Done)
        ready = first.opened.memory.held()
        terms = {**own.terms, "kv_pool": first.runner.kv.nbytes}
        report = report_of(plan, terms, first.loaded, ready, _lines_in_ram(plan, config.nnodes, first.against))
        report = _with_ranks(report, spec, plan, group, measured)
    except BaseException:
        link.give_up()
        if opened is not None:
            finish(opened.device)  # What was launched no longer waits, but reads memory of ranks that leave now.
        group.close()
        link.leave()
        raise
    runner = RankedGpuRunner(first.runner, group, link)
    return BuiltRanks(first, runner, plan, report, RanksVram(first.opened.memory))


def _load_all(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    progress: Progress,
    group: RankGroup,
    opened: OpenedGpu,
    beat: Callable[[], None] | None,
) -> GpuRank:
    assert isinstance(group.link, GpuRankLink)
    there = group.answers(messages.RankOpened)
    against = next((one for one in (opened.against, *(rank.against for rank in there)) if one), "")
    handles = [] if against else [opened.handle, *(rank.handle for rank in there)]
    group.tell_each(messages.JoinRanks(handles, against))
    own = against or opened.open_peers(handles)
    mapped = group.answers(messages.RankJoined)
    against = next((one for one in (own, *(rank.against for rank in mapped)) if one), "")
    group.tell_each(messages.JoinRanks([], against))
    joined = opened.join(group.meeting, against, START_LIMIT_S, lambda waited_s: group.check())
    group.link.join(joined)

    def loaded(done: int, total: int) -> None:
        group.check()
        progress("load", done, total)

    progress("load", 0, 0)
    first = load_gpu_rank(config, files, spec, plan, opened, joined, loaded, beat)
    first.against = against
    group.answers(messages.RankLoaded, lambda: progress("load", 0, 0))
    return first


def _settled(plan: Plan, measured: list[Measured]) -> Plan:
    """The pool by what is measured of all ranks: each has as many pages as the one with the least room."""
    engine = plan.engine
    pages = [engine.layout_of(rank).page_bytes for rank in range(engine.rank_count)]
    taken = [taken_terms(plan, rank.terms, rank.own_bytes - rank.kv_bytes) for rank in measured]
    room = []
    for uuid in dict.fromkeys(gpu.uuid for gpu in engine.rank_gpus):
        ranks = [rank for rank, gpu in enumerate(engine.rank_gpus) if gpu.uuid == uuid]
        backed = sum(measured[rank].kv_bytes for rank in ranks)
        held = sum(measured[rank].own_bytes for rank in ranks) - backed
        coming = max(0, sum(sum(taken[rank].values()) for rank in ranks) - held)
        free = min(measured[rank].free_bytes for rank in ranks) + backed - coming
        room.append(free * engine.layout.page_bytes // sum(pages[rank] for rank in ranks))
    if plan.stage_ranks:
        each = max(1, len(engine.shards))
        within = [stage_blocks(plan, rank // each, one, pages[rank]) for rank, one in enumerate(taken)]
        return settle_pool(plan, min(room), within_blocks=min(within))
    most = max(taken, key=lambda one: sum(one.values()))
    return settle_pool(plan, min(room), most)


def _lines_in_ram(plan: Plan, nodes: int, against: str) -> list[LowerTier]:
    """Of the head: what goes to other nodes and comes from them passes through, and where GPUs map nothing of one
    another (`against`) what goes to any other."""
    engine, host = plan.engine, memory()
    planned = node_lines_bytes(engine.stream_bytes, engine.answer_bytes, plan.tensor_parallel, nodes)
    if against and engine.stages:
        planned = host_lines_bytes(engine.stream_bytes, engine.answer_bytes, len(engine.stages) // nodes, nodes)
    if not planned:
        return []
    return [
        LowerTier(
            tier="ram",
            total_bytes=host.total_bytes,
            free_bytes=host.available_bytes,
            limited_by=host.limited_by,
            terms=[MemoryTerm(tier="ram", term="node_lines", planned_bytes=planned)],
        )
    ]


def _with_ranks(
    report: MemoryReport, spec: ModelSpec, plan: Plan, group: RankGroup, measured: list[Measured]
) -> MemoryReport:
    engine = plan.engine
    pids = [os.getpid(), *group.pids]
    rows = [
        RankMemory(
            rank=rank,
            pid=pids[rank],
            threads=1,
            node=group.spread.node_of(rank),
            heads=own.heads,
            kv_heads=own.kv_heads,
            experts=whole_experts(spec, *engine.part_of(rank)),
            first_layer=own.layers[0].index,
            layers=len(own.layers),
            planned_weights_bytes=engine.rank_weights[rank],
            weights_bytes=measured[rank].terms["weights"],
            kv_pool_bytes=engine.blocks * engine.layout_of(rank).page_bytes,
            device=f"GPU {engine.rank_gpus[rank].index}",
        )
        for rank, own in enumerate(rank_spec(spec, *engine.part_of(rank)) for rank in range(engine.rank_count))
    ]
    return msgspec.structs.replace(report, ranks=rows)
