"""All that one CPU rank has to do with the others: collectives with those of its stage, and its place among the stages.

Made once for a rank from its number and the memory that all share. Knows no process and no model.
"""

from __future__ import annotations

import torch.distributed

from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.parallel.gloo import GlooCollectives
from holdfast.execution.parallel.pipeline import PipelineStage
from holdfast.execution.parallel.segment import Segment, StageSegment, Watch
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives


class RankLink:
    """`collectives`: None where a stage has one rank. `stage`: None where there is one stage."""

    def __init__(self, segment: Segment, rank: int, watch: Watch) -> None:
        layout = segment.layout
        self._segment, self._rank = segment, rank
        self.stage_index, self.place = divmod(rank, layout.tensor_parallel)
        several = layout.tensor_parallel > 1
        shared = StageSegment(segment, self.stage_index) if layout.stages > 1 else segment
        self._shared = SharedMemoryCollectives(shared, self.place, watch) if several else None
        self.collectives: Collectives | None = self._shared
        self.stage = PipelineStage(segment, rank, watch) if layout.stages > 1 else None

    def use_gloo(self, store: torch.distributed.Store, timeout_s: float = 0.0) -> None:
        """For sums, in place of shared memory. Waits until all ranks of the stage are there."""
        size = self._segment.layout.tensor_parallel
        if self._shared is not None:
            own = torch.distributed.PrefixStore(f"stage{self.stage_index}", store)
            self.collectives, self._shared = GlooCollectives(own, self.place, size, timeout_s), None

    def give_up(self) -> None:
        """When another rank has ended. Nothing to do: all waiting here ends with the alarm."""

    @property
    def resumes(self) -> bool:
        """Whether a step that was left in the middle can be followed by another."""
        return self.collectives is self._shared

    def go_on_from(self, count: int) -> None:
        """After an alarm: what was under way is nobody's, and all ranks count from here."""
        if self.stage is not None:
            self.stage.go_on_from(count)
        if self._shared is not None:
            self._shared.go_on_from(count)
        else:
            self._segment.counts[self._rank].post(count)
