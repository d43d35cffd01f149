"""All that one CPU rank has to do with the others: collectives with those of its stage, and its place among the stages.

Made once for a rank from its number and the memory that all share. Knows no process and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed

from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.parallel.pipeline import PipelineStage
from holdfast.execution.parallel.segment import Segment, StageSegment, Watch
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.execution.parallel.sockets.gloo import LOOPBACK, GlooCollectives
from holdfast.execution.parallel.sockets.guards import Guards, open_guards
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.execution.parallel.sockets.stage_lines import open_lines


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks that do not share memory find one another."""

    store: torch.distributed.Store
    host: str = LOOPBACK
    """Where others reach this rank."""
    key: bytes = b""
    """That all ranks of this start have, and nobody else."""
    timeout_s: float = 0.0
    """That another rank may let this one wait; 0: for ever."""


class RankLink:
    """`collectives`: None where a stage has one rank. `stage`: None where there is one stage."""

    def __init__(self, segment: Segment, rank: int, watch: Watch, nodes: int = 1) -> None:
        layout = segment.layout
        self._segment, self._rank, self._watch = segment, rank, watch
        self.spread = Spread(layout.size, layout.stages, nodes)
        self.stage_index, self.place = divmod(rank, layout.tensor_parallel)
        several = layout.tensor_parallel > 1
        shared = StageSegment(segment, self.stage_index) if layout.stages > 1 else segment
        self._shared = SharedMemoryCollectives(shared, self.place, watch) if several else None
        self.collectives: Collectives | None = self._shared
        self.stage = PipelineStage(segment, rank, watch) if layout.stages > 1 else None
        self._guards = Guards({})

    def meet(self, meeting: Meeting, *, all_by_gloo: bool) -> None:
        """What cannot go through memory goes by sockets: sums of ranks on several nodes (`all_by_gloo`: all sums), and
        what stages hand on between nodes. Waits until the ranks concerned are there."""
        if self.stage is not None and self.spread.nodes > 1:
            self.stage.use_lines(
                *open_lines(
                    meeting.store,
                    self._rank,
                    self.spread.sources(self._rank),
                    self.spread.targets(self._rank),
                    host=meeting.host,
                    key=meeting.key,
                    watch=self._watch,
                )
            )
        if self._shared is not None and (all_by_gloo or self.spread.sums_cross(self.stage_index)):
            self._guard(meeting)
            own = torch.distributed.PrefixStore(f"stage{self.stage_index}", meeting.store)
            size = self._segment.layout.tensor_parallel
            self.collectives = GlooCollectives(own, self.place, size, meeting.timeout_s, meeting.host, self._look)
            self._shared = None

    def _guard(self, meeting: Meeting) -> None:
        """The ways to those of its stage that are on other nodes."""
        node, stage = self.spread.node_of(self._rank), self.spread.ranks_in(self.stage_index)
        others = [other for other in stage if self.spread.node_of(other) != node]
        self._guards = open_guards(
            meeting.store, self._rank, others, host=meeting.host, key=meeting.key, watch=self._watch
        )

    def _look(self, waited_s: float) -> None:
        """While gloo waits. Rank 0 has the clock, and hears of nodes that are lost; the others end with their node's
        agent, and where they do not reach one another."""
        if self._rank == 0:
            self._watch(waited_s)
        self._guards.check()

    def give_up(self) -> None:
        """When another rank has ended. Nothing to do: all waiting here ends with the alarm."""

    def close(self) -> None:
        """Sockets to ranks of other nodes; nobody computes any more."""
        if self.stage is not None:
            self.stage.close()
        self._guards.close()

    @property
    def resumes(self) -> bool:
        """Whether a step that was left in the middle can be followed by another."""
        return self.collectives is self._shared and self.spread.nodes == 1

    def go_on_from(self, count: int) -> None:
        """After an alarm: what was under way is nobody's, and all ranks count from here."""
        if self.stage is not None:
            self.stage.go_on_from(count)
        if self._shared is not None:
            self._shared.go_on_from(count)
        else:
            self._segment.counts[self._rank].post(count)
