"""Which LoRA adapter is in which place of the runner, and whose turn it is when places run out. Loads nothing.

A runner is asked for an adapter as soon as somebody in line wants it and a place can be had, and says when it is there;
nobody starts before. A place whose adapter nobody runs with keeps it until another is needed: the least recently used
goes first, those last that somebody in line asks for, and never one that somebody earlier in line waits for.

Nobody waits for ever, and nobody for an adapter that he did not ask for:
  - while the first in line waits for its adapter to come, everybody else whose adapter is there goes before it.
  - while it waits for a place, those behind it may go before it: those without an adapter, who keep no place taken, and
    those whose adapter runs already and who were in line when it began to wait. These are finitely many, and with them
    the adapters that run come to an end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from collections.abc import Sequence as Line

from holdfast.records.lora import AdapterRef
from holdfast.records.steps import AdapterArrival, AdapterFetch
from holdfast.scheduler.sequence import Sequence


class LoraScheduler:
    """`most`: places there are; 0: no request brings an adapter."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = list(range(most - 1, -1, -1))
        self._place: OrderedDict[AdapterRef, int] = OrderedDict()
        """The least recently started first."""
        self._arriving: dict[int, AdapterRef] = {}
        """By place: asked for, and not there yet."""
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

    @property
    def arriving(self) -> list[int]:
        """Numbers of adapters that were asked for and are not there yet."""
        return sorted(adapter.number for adapter in self._arriving.values())

    def fetch_for(self, waiting: Line[Sequence]) -> list[AdapterFetch]:
        """Adapters of those in line that can have a place now, and did not yet: they are asked for from now on."""
        found, wanted = list[AdapterFetch](), set[AdapterRef]()
        for sequence in waiting if self._most else ():
            adapter = sequence.request.adapter
            if adapter is None or adapter in wanted:
                continue
            if adapter not in self._place:
                place = self._free.pop() if self._free else self._vacate(wanted, waiting)
                if place is None:
                    break
                self._place[adapter], self._arriving[place] = place, adapter
                found.append(AdapterFetch(place, adapter))
            wanted.add(adapter)
        return found

    def arrive(self, arrival: AdapterArrival) -> AdapterRef | None:
        """It is there, or its place is free again. Says which; None: it was asked for before an engine started over."""
        adapter = self._arriving.pop(arrival.place, None)
        if adapter is not None and arrival.failure is not None:
            del self._place[adapter]
            self._free.append(arrival.place)
        return adapter

    def has_room(self, adapter: AdapterRef | None) -> bool:
        """Whether a sequence with it could start now."""
        return adapter is None or (adapter in self._place and not self._awaited(adapter))

    def _awaited(self, adapter: AdapterRef | None) -> bool:
        return adapter in self._arriving.values()

    def next_in_line(self, waiting: Line[Sequence], last_number: int) -> Sequence | None:
        """Who may be admitted now as far as adapters go; `last_number`: of the request that came last."""
        if not waiting:
            return None
        first = waiting[0]
        if self.has_room(first.request.adapter):
            return first
        if self._kept_waiting is None or self._kept_waiting[0] is not first:
            self._kept_waiting = first, last_number
        last = last_number if self._awaited(first.request.adapter) else self._kept_waiting[1]
        for other in waiting:
            adapter = other.request.adapter
            if adapter is None or (other.order[2] <= last and self.has_room(adapter)):
                return other
        return None

    def enter(self, adapter: AdapterRef | None) -> int:
        """The place of a sequence that starts; -1: it has no adapter. There is room: `has_room` was asked."""
        if adapter is None:
            return -1
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

    def _vacate(self, wanted: Container[AdapterRef], waiting: Line[Sequence]) -> int | None:
        """The place of the least recently used that nobody runs with, and that is not among the `wanted`; of one that
        nobody in line asks for, if there is any."""
        idle = [
            adapter
            for adapter in self._place
            if adapter not in self._running and adapter not in wanted and not self._awaited(adapter)
        ]
        if not idle:
            return None
        requested = {sequence.request.adapter for sequence in waiting}
        return self._place.pop(next((adapter for adapter in idle if adapter not in requested), idle[0]))
