"""All ranks of an engine while it starts: loaded side by side, measured together. One rank alone is the common case."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.core.loop import StepRunner
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.cpu import LoadedRank, load_rank, measured
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.ranks.runner import RankedRunner
from holdfast.engine.startup.kv_scales import find_kv_scales
from holdfast.errors import EngineDiedError
from holdfast.execution.kv_scales import KVScales
from holdfast.execution.parallel.rank_link import RankLink
from holdfast.execution.parallel.sockets.gloo import GlooCollectives
from holdfast.execution.runner import Runner
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.planner.sizing.rank_shares import whole_experts
from holdfast.records import RankMemory

if TYPE_CHECKING:
    from holdfast.engine.ranks.nodes.hub import NodeHub
    from holdfast.execution.gpu.runner import GpuRunner

Progress = Callable[[str, int, int], None]
HUNG_S = 45.0
"""That another rank may keep this one waiting where no limit is set: less than the front waits for the engine, so that
it is the rank that is named."""
HUNG_SHARE = 0.75
"""Of that limit."""


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """`first`: of this process."""

    first: LoadedRank
    group: RankGroup | None

    @property
    def runner(self) -> Runner:
        """Of the first rank."""
        return self.first.runner

    @property
    def step_runner(self) -> StepRunner:
        return self.runner if self.group is None else RankedRunner(self.runner, self.group)

    def check(self) -> None:
        """Raises where one of them has ended."""
        if self.group is not None:
            self.group.check()

    @property
    def steps_ahead(self) -> int:
        """That are worth computing before the first is over: as many as other stages can be at."""
        stage = None if self.group is None else self.group.link.stage
        return 0 if stage is None else stage.count - 1

    def back_kv(self, blocks: int, most_blocks: int | None = None) -> None:
        if self.group is not None:
            self.group.order(messages.BackKV(blocks, most_blocks))
        self.runner.back_kv(blocks, most_blocks)
        if self.group is not None:
            self.group.answers(messages.Done)

    def serve(self, blocks: int, most_blocks: int) -> None:
        """With a pool of so many pages; the start is over."""
        self.back_kv(blocks, most_blocks)
        if self.group is not None:
            self.group.order(messages.Serve(self.group.timeout_s))
            self.group.answers(messages.Done)

    def find_kv_scales(self, config: EngineConfig, files: ModelFiles) -> tuple[Decision, ...]:
        """Of all ranks alike; nothing where pages need none."""
        if self.group is None:
            return find_kv_scales(config, files, self.runner)
        return find_scales_of_all(config, files, self.runner, self.group)

    def rows(self, spec: ModelSpec, plan: Plan, measured: Sequence[Measured]) -> list[RankMemory]:
        """What each rank has, where there are several."""
        if self.group is None:
            return []
        engine = plan.engine
        pids = [os.getpid(), *self.group.pids]
        return [
            RankMemory(
                rank=rank,
                pid=pids[rank],
                threads=self.group.threads[rank],
                node=self.group.spread.node_of(rank),
                heads=own.heads,
                kv_heads=own.kv_heads,
                experts=whole_experts(spec, *engine.part_of(rank)),
                first_layer=own.layers[0].index,
                layers=len(own.layers),
                planned_weights_bytes=engine.rank_weights[rank],
                weights_bytes=measured[rank].terms["weights"],
                kv_pool_bytes=engine.blocks * engine.layout_of(rank).page_bytes,
            )
            for rank, own in enumerate(rank_spec(spec, *engine.part_of(rank)) for rank in range(engine.rank_count))
        ]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        if self.group is None:
            return self.first.decisions
        size, sums = self.group.size, self.group.link.collectives
        threads, nodes = ", ".join(map(str, self.group.threads)), self.group.spread.nodes
        where = "one machine" if nodes == 1 else f"{nodes} nodes"
        reason = f"{size} ranks of {where}, which compute with {threads} threads"
        if sums is None:
            return (*self.first.decisions, Decision("threads", threads, reason, "hardware"))
        source = "set" if sums.name == GlooCollectives.name and nodes == 1 else "hardware"
        return (*self.first.decisions, Decision("all_reduce", sums.name, reason, source))

    def profile_run(self) -> tuple[list[Measured], float]:
        """What each rank took, and the seconds of the heaviest step."""
        if self.group is not None:
            self.group.order(messages.ProfileStep())
        began_s = time.monotonic()
        try:
            profile = self.runner.profile_run()
        except EngineDiedError as error:
            raise error if self.group is None else self.group.explained(error) from error
        took_s = time.monotonic() - began_s
        others = [] if self.group is None else self.group.answers(Measured)
        return [measured(self.first, profile), *others], took_s


def load_ranks(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    progress: Progress,
    *,
    cores: int,
    beat: Callable[[], None] | None = None,
    hub: NodeHub | None = None,
) -> LoadedRanks:
    """`hub`: with the other nodes, where there are any. Whatever fails, no rank is left behind."""
    if plan.engine.rank_count == 1:
        first = load_rank(
            config, files, spec, plan, lambda done, total: progress("load", done, total), threads=cores, beat=beat
        )
        return LoadedRanks(first, None)
    group = start_group(config, plan, cores=cores, timeout_s=hung_s(config), beat=beat, hub=hub)

    def loaded(done: int, total: int) -> None:
        group.check()
        progress("load", done, total)

    assert isinstance(group.link, RankLink), "ranks on GPUs are built by gpu/together.py"
    try:
        first = load_rank(
            config,
            files,
            spec,
            plan,
            loaded,
            threads=group.threads[0],
            beat=beat,
            collectives=group.link.collectives,
            stage=group.link.stage,
        )
        group.answers(messages.RankLoaded, lambda: progress("load", 0, 0))
    except BaseException:
        group.close()
        raise
    return LoadedRanks(first, group)


def start_group(
    config: EngineConfig,
    plan: Plan,
    *,
    cores: int,
    timeout_s: float,
    beat: Callable[[], None] | None,
    hub: NodeHub | None,
) -> RankGroup:
    try:
        return RankGroup(config, plan, cores=cores, timeout_s=timeout_s, beat=beat, hub=hub)
    except BaseException:
        if hub is not None:  # However early that was: nodes look for the next engine, which listens where this one did.
            hub.close(again=True)
        raise


def find_scales_of_all(
    config: EngineConfig, files: ModelFiles, runner: Runner | GpuRunner, group: RankGroup
) -> tuple[Decision, ...]:
    """Of FP8 pages, on every rank. `runner`: the first rank's."""
    group.order(messages.FindScales())
    found = find_kv_scales(config, files, runner)
    others, stage = group.answers(messages.ScalesFound), group.link.stage
    if stage is None:
        return found
    # One rank of each stage: all of its ranks have the same.
    every = [runner.kv_scales, *others[stage.ranks_each - 1 :: stage.ranks_each]]
    keys, values = ([scale for one in every for scale in getattr(one, part)] for part in ("keys", "values"))
    said = KVScales(tuple(keys), tuple(values)).described()
    return tuple(replace(decision, value=said) for decision in found)


def scales_found(config: EngineConfig, files: ModelFiles, runner: Runner | GpuRunner) -> messages.ScalesFound:
    """Of a rank that was told to find them with the others."""
    find_kv_scales(config, files, runner)
    scales = runner.kv_scales
    return messages.ScalesFound(list(scales.keys), list(scales.values))


def hung_s(config: EngineConfig) -> float:
    """How long another rank may keep this one waiting; 0: for ever."""
    limit_s = config.engine_hang_timeout
    return HUNG_S if limit_s is None else HUNG_SHARE * limit_s
