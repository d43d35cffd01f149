"""In which order bytes cross one direction of a link. It is a queue that does one thing after the other, and what was
asked of it cannot be taken back:

    with a deadline      weights of a layer that is computed soon: asked for at once, in the order of need
    without one          pages that may come when there is time: in pieces. Over an idle link only as many as it is soon
                         done with; while others are on their way a small share of what these have, right behind them,
                         so that nothing waits for ever, be it asked for a whole step ahead
    awaited after all    goes at once, all that is left of it

So what has a deadline waits for IDLE_BYTES and SHARE of its own at most, and what has none has SHARE of the link at
least. Knows no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

PIECE_BYTES = 4 << 20
"""That what has a deadline may find before it, of PCIe 5 a thirteenth of a millisecond."""
IDLE_BYTES = 32 << 20
"""On their way at once over a link that has nothing else to do: half a millisecond, so that a step is hardly late, and
enough that the link is not idle between two looks."""
SHARE = 1 / 32
"""Of the bytes with a deadline, that others may have beside them."""


@dataclass(slots=True)
class Later(Generic[Item]):
    """Without a deadline."""

    item: Item
    nbytes: int
    sent_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.nbytes - self.sent_bytes


class LinkSchedule(Generic[Item]):
    """Of one direction. `piece_bytes`, `idle_bytes` and `share`: as above."""

    def __init__(self, piece_bytes: int = PIECE_BYTES, idle_bytes: int = IDLE_BYTES, share: float = SHARE) -> None:
        self._piece_bytes, self._idle_bytes, self._share = piece_bytes, max(idle_bytes, piece_bytes), share
        self._later: deque[Later[Item]] = deque()
        self._earned = 0.0
        """Bytes without a deadline that may go beside those that have one."""

    @property
    def waiting_bytes(self) -> int:
        return sum(one.left_bytes for one in self._later)

    def __bool__(self) -> bool:
        return bool(self._later)

    def add(self, item: Item, nbytes: int) -> None:
        self._later.append(Later(item, nbytes))

    def due(self, nbytes: int) -> None:
        """So many with a deadline were asked for."""
        if self._later:  # Nobody earns for what is not there yet.
            self._earned = min(self._earned + self._share * nbytes, float(self._idle_bytes))

    def pieces(
        self, due_bytes: int, later_bytes: int, ready: Callable[[Item], bool] = lambda item: True
    ) -> Iterator[tuple[Item, int, int, bool]]:
        """What is to be asked for now: (item, first byte, last byte, whether it is the end of it). `due_bytes` and
        `later_bytes`: of both kinds, on their way now. `ready`: whether it may go; others go before it."""
        left = self._idle_bytes - later_bytes
        while due_bytes or left > 0:
            work = next((one for one in self._later if ready(one.item)), None)
            if work is None:
                return
            size = min(self._piece_bytes, work.left_bytes)
            if due_bytes:
                if size > self._earned:
                    return
                self._earned -= size
            left -= size
            yield self._sent(work, size)

    def awaited(self, item: Item) -> Iterator[tuple[Item, int, int, bool]]:
        """All that is left of it, at once."""
        for work in [one for one in self._later if one.item is item]:
            yield self._sent(work, work.left_bytes)

    def dropped(self) -> list[Item]:
        """All that is left, which then never goes."""
        found = [one.item for one in self._later]
        self._later.clear()
        return found

    def _sent(self, work: Later[Item], size: int) -> tuple[Item, int, int, bool]:
        first = work.sent_bytes
        work.sent_bytes += size
        if ended := not work.left_bytes:
            self._later.remove(work)
            self._earned = self._earned if self._later else 0.0
        return work.item, first, work.sent_bytes, ended
