"""How much of a GPU's memory captured steps may take, and what each was measured to take: of a decoder whose layers may
leave again, so that nothing was captured at the start.

    room ┬ taken      measured around each capture, by the count that the budget is kept by
         └ next       what the next capture is expected to take: it is not begun where that is not left

Sizes of graphs are the driver's and torch's (whole segments, cuBLAS's memory for the stream of captures): none is known
before it was measured, so the first has a bound. Captures nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast.execution.gpu.memory.accounting import GpuHeld
from holdfast.units import MIB, counted, format_bytes

log = logging.getLogger("holdfast")

MARGIN = 1.25
"""More than the largest that was measured so far: the next is of another size, or kind of work."""
LEAST_NEXT_BYTES = 24 * MIB
"""torch takes segments of 2 and of 20 MiB: a capture that finds both full takes one of each."""
STEPS_BETWEEN_LOOKS = 256
"""To ask what is free waits for the device."""


class _Memory(Protocol):
    def held(self) -> GpuHeld: ...

    def told_bytes(self) -> int | None: ...

    def kept_by_torch(self) -> int: ...


class GraphsRoom:
    """`first_bytes`: what the first capture takes at most. `all_bytes`: of all that there can be, with it.
    `least_next_bytes`: what any other may take."""

    def __init__(
        self, memory: _Memory, first_bytes: int, all_bytes: int, least_next_bytes: int = LEAST_NEXT_BYTES
    ) -> None:
        self._memory, self._first, self._all, self._least_next = memory, first_bytes, all_bytes, least_next_bytes
        self.budget: Callable[[], int] = lambda: 0
        """Bytes that the engine may hold in all."""
        self.nbytes = 0
        """That the arbiter has given now; 0: no graph may be captured."""
        self.measured: list[int] = []
        """Bytes that each capture took, since room was given last: they stay when the room is gone, to be looked at."""
        self.given_back_bytes = 0
        """When they were closed last. cuBLAS's memory of the engine's own stream is in it, which the next step takes
        again, and what torch had freed of others."""
        self.kept_bytes = 0
        """Of those that were closed, what did not come back."""
        self._closed, self._captures, self._driver_bytes = True, 0, 0
        """`_driver_bytes`: of what they took, what is not torch's."""
        self._said, self._given_up, self._steps_to_wait = False, False, 0

    @property
    def wanted_bytes(self) -> int:
        """For all graphs; 0 where they were seen to take more."""
        return 0 if self._given_up else self._all

    @property
    def taken_bytes(self) -> int:
        return 0 if self._closed else sum(self.measured)

    @property
    def any_measured(self) -> bool:
        """Since room was given, and before they were closed."""
        return not self._closed

    @property
    def exceeded(self) -> bool:
        return self.taken_bytes > self.nbytes

    @property
    def next_bytes(self) -> int:
        """The first sets up what all share: it counts until a second was measured."""
        if self._closed or not self._captures:
            return self._first
        return max(self._least_next, int(MARGIN * max(self.measured[1:] or self.measured)))

    def give(self, nbytes: int) -> None:
        """For graphs to be captured from now on, or with 0 for none; those that there were are closed then."""
        self.nbytes, self._said, self._steps_to_wait = nbytes, False, 0
        if nbytes and self._closed:
            self.measured = []

    def may_capture(self) -> bool:
        """Whether the next graph has room, in the books and on the GPU as it is now. Where not, why is said once."""
        if self._steps_to_wait:
            self._steps_to_wait -= 1
            return False
        needed, left = self.next_bytes, self.nbytes - self.taken_bytes
        if needed > left:
            self._wait(needed, f"{format_bytes(max(0, left))} is left of their room")
            return False
        # A driver that does not tell processes apart leaves the books.
        own, there = self._memory.told_bytes(), self._memory.held().free_bytes
        if own is not None:
            there = min(there, self.budget() - own)
        if needed > there:
            self._wait(needed, f"{format_bytes(max(0, there))} is left of the budget on the GPU")
            return False
        return True

    def _wait(self, needed: int, found: str) -> None:
        self._steps_to_wait = STEPS_BETWEEN_LOOKS
        if not self._said:
            log.info(
                "%s; steps of other sizes are launched without: the next may take %s, and %s",
                self.told(), format_bytes(needed), found,
            )  # fmt: skip
        self._said = True

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around a capture: what it takes, also where it fails, is taken of the room."""
        own, torch = self._held()
        if self._closed:
            self._closed, self._captures, self._driver_bytes, self.measured = False, 0, 0, []
        try:
            yield
        finally:
            own_then, torch_then = self._held()
            # A driver that does not tell processes apart counts what a neighbour gives back meanwhile against it.
            taken = max(0, own_then - own, torch_then - torch)
            self.measured.append(taken)
            self._driver_bytes += max(0, taken - (torch_then - torch))
        self._captures += 1
        log.debug("a CUDA graph took %s: %s", format_bytes(taken), self.told())

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Around closing all of them: what comes back is measured, not expected."""
        taken, (own, torch) = self.taken_bytes, self._held()
        yield
        own_then, torch_then = self._held()
        self.given_back_bytes = own - own_then
        # torch gives back what it has freed of others, too, which must not hide what the driver keeps.
        driver_gave = self.given_back_bytes - (torch - torch_then)
        missing = max(taken - self.given_back_bytes, self._driver_bytes - driver_gave)
        # Where neighbours are not told apart theirs is in it: no more is missing than there was room for.
        self.kept_bytes = min(max(0, self.kept_bytes + missing), self._all)
        if taken > self.nbytes:
            log.warning(
                "CUDA graphs took more than the room that was counted for them, and were closed: steps are launched "
                "without them from now on; %s",
                self.told(),
            )
            self._given_up = True
        self._closed, self.nbytes = True, 0

    def _held(self) -> tuple[int, int]:
        """By the engine, and of that by torch. Where processes are not told apart, of the GPU by all: what changes in a
        moment is the engine's, whoever was there when it came."""
        told, held = self._memory.told_bytes(), self._memory.held()
        return held.total_bytes - held.free_bytes if told is None else told, self._memory.kept_by_torch()

    def told(self) -> str:
        """What was measured."""
        graphs = counted(len(self.measured), "CUDA graph")
        each = ", ".join(f"{one / MIB:.1f}" for one in self.measured)
        return (
            f"{graphs} took {format_bytes(sum(self.measured))} of {format_bytes(self.nbytes)}"
            f" (MiB each: {each or 'none'}; at the last close {format_bytes(max(0, self.given_back_bytes))} came back,"
            f" {format_bytes(self.kept_bytes)} did not)"
        )
