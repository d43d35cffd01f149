"""What a rank on a GPU has to do with the others, as rank_link.py has it of one on a CPU: collectives with those of its
stage and lines to other stages, once all ranks have opened their GPUs and found one another. Knows no process and no
model.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.execution.parallel.gpu.stage import GpuStage
    from holdfast.execution.parallel.gpu.together import GpuCollectives, JoinedGpus


class GpuRankLink:
    """`collectives`: None until they are joined, and where a stage is one rank. `stage`: None until then, and where
    every rank has a part of all layers."""

    def __init__(self) -> None:
        self._joined: JoinedGpus | None = None
        self._given_up = False

    @property
    def collectives(self) -> GpuCollectives | None:
        return None if self._joined is None else self._joined.collectives

    @property
    def stage(self) -> GpuStage | None:
        return None if self._joined is None else self._joined.stage

    @property
    def resumes(self) -> bool:
        """Never: what was launched waits on the device for the step that was left."""
        return False

    def go_on_from(self, count: int) -> None:
        raise AssertionError("ranks on GPUs do not resume")

    def join(self, joined: JoinedGpus) -> None:
        self._joined = joined
        if self._given_up:  # One had ended before there was anything to wait with.
            joined.give_up()

    def close(self) -> None:
        """Nothing yet: steps may still be under way. `leave` follows."""

    def leave(self) -> None:
        """What ranks have opened to one another is closed, once none of this one's steps is under way."""
        if self._joined is not None:
            with contextlib.suppress(RuntimeError):  # A device that has failed gives nothing back; it ends with us.
                self._joined.close()

    def give_up(self) -> None:
        """From any thread, when another rank has ended: nothing waits for it on the device any longer."""
        self._given_up = True
        if self._joined is not None:
            self._joined.give_up()
