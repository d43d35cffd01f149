"""Which LoRA adapter is in which place of the runner, and whose turn it is when places run out. Loads nothing.

A place whose adapter nobody runs with keeps it until another is needed: the least recently used goes first.

Nobody waits for ever: when the first in line needs a place that is not there, those behind it may go before it: those
without an adapter, who keep no place taken, and those whose adapter runs already and who were in line when it began to
wait. These are finitely many, and with them the adapters that run come to an end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Line

from holdfast.records.lora import AdapterRef
from holdfast.scheduler.sequence import Sequence


class AdapterTurns:
    """`most`: places there are; 0: no request brings an adapter."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = list(range(most - 1, -1, -1))
        self._place: OrderedDict[AdapterRef, int] = OrderedDict()
        """The least recently started first."""
        self._running: dict[AdapterRef, int] = {}
        """Sequences that run with each."""
        self._kept_waiting: tuple[Sequence, int] | None = None
        """The first in line, and the number of the last who may go before it."""

    @property
    def running(self) -> list[str]:
        """Names, in no order of meaning."""
        return sorted({adapter.name for adapter in self._running})

    def asked_for(self, waiting: Line[Sequence]) -> list[str]:
        if not self._most:
            return []
        return sorted({one.request.adapter.name for one in waiting if one.request.adapter is not None})

    def has_room(self, adapter: AdapterRef | None) -> bool:
        if adapter is None or adapter in self._running or self._free:
            return True
        return len(self._running) < len(self._place)

    def next_in_line(self, waiting: Line[Sequence], last_number: int) -> Sequence | None:
        """Who may be admitted now as far as adapters go; `last_number`: of the request that came last."""
        if not waiting:
            return None
        first = waiting[0]
        if self.has_room(first.request.adapter):
            return first
        if self._kept_waiting is None or self._kept_waiting[0] is not first:
            self._kept_waiting = first, last_number
        last = self._kept_waiting[1]
        for other in waiting:
            adapter = other.request.adapter
            if adapter is None or (other.order[2] <= last and self.has_room(adapter)):
                return other
        return None

    def enter(self, adapter: AdapterRef | None) -> int:
        """The place of a sequence that starts; -1: it has no adapter. There is room: `has_room` was asked."""
        if adapter is None:
            return -1
        if adapter not in self._place:
            self._place[adapter] = self._free.pop() if self._free else self._idle()
        self._place.move_to_end(adapter)
        self._running[adapter] = self._running.get(adapter, 0) + 1
        return self._place[adapter]

    def leave(self, adapter: AdapterRef | None) -> None:
        """A sequence of it runs no more. Its place stays its own until somebody needs it."""
        if adapter is None:
            return
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]

    def _idle(self) -> int:
        oldest = next(adapter for adapter in self._place if adapter not in self._running)
        return self._place.pop(oldest)
