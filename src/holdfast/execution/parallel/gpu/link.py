"""What a rank on a GPU has to do with the others, as rank_link.py has it of one on a CPU: collectives, once all ranks
have opened their GPUs and found one another. There are no stages here. Knows no process and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.execution.parallel.gpu.together import GpuCollectives


class GpuRankLink:
    """`collectives`: None until they are joined."""

    def __init__(self) -> None:
        self.collectives: GpuCollectives | None = None
        self._given_up = False

    @property
    def stage(self) -> None:
        """Every rank has a part of all layers."""

    @property
    def resumes(self) -> bool:
        """Never: what was launched waits on the device for the step that was left."""
        return False

    def go_on_from(self, count: int) -> None:
        raise AssertionError("ranks on GPUs do not resume")

    def join(self, collectives: GpuCollectives) -> None:
        self.collectives = collectives
        if self._given_up:  # One had ended before there was anything to wait with.
            collectives.give_up()

    def close(self) -> None:
        """Nothing of it is held here."""

    def give_up(self) -> None:
        """From any thread, when another rank has ended: nothing waits for it on the device any longer."""
        self._given_up = True
        if self.collectives is not None:
            self.collectives.give_up()
