"""Which machine (node) a rank is on, and what crosses from one to another. Numbers only; opens nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranks in their order over nodes, as many on each."""

    size: int
    """Ranks."""
    stages: int = 1
    nodes: int = 1

    @property
    def each(self) -> int:
        """Ranks of a node."""
        return self.size // self.nodes

    @property
    def tensor_parallel(self) -> int:
        return self.size // self.stages

    def node_of(self, rank: int) -> int:
        return rank // self.each

    def ranks_of(self, node: int) -> range:
        return range(node * self.each, (node + 1) * self.each)

    def ranks_in(self, stage: int) -> range:
        return range(stage * self.tensor_parallel, (stage + 1) * self.tensor_parallel)

    def sums_cross(self, stage: int) -> bool:
        """Whether the ranks of a stage are on several nodes."""
        return len({self.node_of(rank) for rank in self.ranks_in(stage)}) > 1

    def handed_over(self, stage: int) -> bool:
        """Whether what this stage hands on, or the last one shows rank 0, goes to another node: then all of it goes by
        sockets."""
        behind = self.ranks_in(stage + 1) if stage + 1 < self.stages else range(1)
        return len({self.node_of(rank) for rank in (*self.ranks_in(stage), *behind)}) > 1

    def targets(self, rank: int) -> list[int]:
        """Ranks to which this one sends by a socket what its stage has computed: the one at its place in the next
        stage; of the last stage, rank 0."""
        stage = rank // self.tensor_parallel
        if self.stages == 1 or not self.handed_over(stage):
            return []
        return [rank + self.tensor_parallel] if stage + 1 < self.stages else [0]

    def sources(self, rank: int) -> list[int]:
        """From which it gets something by a socket."""
        return [other for other in range(self.size) if rank in self.targets(other)]
