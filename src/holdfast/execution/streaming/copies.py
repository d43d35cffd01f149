"""Copies between host memory and a GPU beside what it computes: the one owner of each direction of a link, with a
fence each way:

    computing  ── reads a slot ──┬───────────────────────── waits ──► reads it again
    the link                     └─ waits ──► copies into it ──┘

What has no deadline waits until the link has time for it (`link.schedule`). What goes to the host has a stream of its
own: the other direction of the link. Counts what each moved, how long it was busy, and how long computing waited for
it. Knows nothing of layers, nor of pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.execution.link.schedule import LinkSchedule
from holdfast.records import LinkUse

MOST_TIMED = 256
"""Pairs of events that may be on their way; beyond it nothing is timed for a while."""
Piece = tuple[torch.Tensor, torch.Tensor]
"""(source, target), which is as long or longer."""


class Copies(Protocol):
    """A mark is a point that computing or copying passes; it may be set again and again."""

    def mark(self) -> Any: ...

    def after_launched(self, mark: Any) -> None:
        """Passed when all that was launched so far is computed."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any, done: Sequence[Any]) -> None:
        """From the host. Begins once `after` is passed, and returns at once; `done` are passed when it has arrived."""

    def copy_pieces(self, pieces: Sequence[Piece], after: Any, done: Sequence[Any]) -> None:
        """As `copy`, one behind the other; `done` are passed when all have arrived."""

    def launch(self, work: Callable[[], None]) -> None:
        """Computes something behind all that was launched so far, and before all that is launched later."""

    def copy_later(self, source: torch.Tensor, target: torch.Tensor, after: Any, done: Sequence[Any]) -> None:
        """From the host, without a deadline: piece by piece, when `after` is passed and the link has time, which is
        looked at with each call of this object. `done` are passed when all of it has arrived; who awaits one of them
        lets it go at once. Neither memory may go before that."""

    def copy_back(self, pieces: Sequence[Piece], after: Any, done: Sequence[Any]) -> None:
        """To the host's pinned memory, beside what comes from there. Begins once `after` is passed; `done` are passed
        when all have arrived."""

    def await_copy(self, mark: Any) -> None:
        """What is launched from now on waits until it is passed."""

    def passed(self, mark: Any) -> bool:
        """Without waiting."""

    def capturing(self) -> bool:
        """What is launched now is captured, to be computed as often as it is launched later."""

    def now(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """In either direction, after all that was launched; it has arrived when this returns."""

    def wait(self, mark: Any) -> None:
        """On the host."""

    def settle(self) -> None:
        """When this returns all that was launched is computed, and nothing is on its way. What waits for the link still
        does."""

    def close(self) -> None:
        """When this returns nothing is on its way, and what waited for the link never goes."""

    def timed(self) -> tuple[float, int]:
        """Seconds and bytes of all copies to the GPU that are over and were timed."""

    def use(self) -> LinkUse:
        """Of the way to the GPU."""

    def use_back(self) -> LinkUse:
        """Of the way to the host."""


@dataclass(eq=False, slots=True)
class _LaterCopy:
    source: torch.Tensor
    target: torch.Tensor
    after: torch.cuda.Event
    done: Sequence[torch.cuda.Event]


class CudaCopies:
    """On a stream of its own for each direction. For one thread."""

    def __init__(self, device: torch.device, schedule: LinkSchedule[Any] | None = None) -> None:
        self._device, self._stream, self._back = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._bytes, self._back_bytes, self._began_s = 0, 0, time.monotonic()
        self._busy, self._stalled, self._back_busy = _Timed(), _Timed(), _Timed()
        self._schedule: LinkSchedule[_LaterCopy] = LinkSchedule() if schedule is None else schedule
        self._pending: dict[int, _LaterCopy] = {}
        """By the marks that they will pass: an event that was never recorded counts as passed."""
        self._on_way: deque[tuple[torch.cuda.Event, int, bool]] = deque()
        """(passed when it arrived, bytes, whether it had a deadline), in order; kept while something waits."""

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def after_launched(self, mark: torch.cuda.Event) -> None:
        mark.record(torch.cuda.current_stream(self._device))

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event, done: Sequence[torch.cuda.Event]
    ) -> None:
        self.copy_pieces([(source, target)], after, done)

    def copy_pieces(self, pieces: Sequence[Piece], after: torch.cuda.Event, done: Sequence[torch.cuda.Event]) -> None:
        self._send(pieces, after, done, due=True)
        self._schedule.due(sum(source.nbytes for source, _ in pieces))
        self._go_on()

    def launch(self, work: Callable[[], None]) -> None:
        work()
        # A product that is launched early reads weights while the kernel before it ends, which must not be this work.
        torch.zeros(1, device=self._device)

    def _send(
        self, pieces: Sequence[Piece], after: torch.cuda.Event, done: Sequence[torch.cuda.Event], *, due: bool
    ) -> None:
        nbytes = sum(source.nbytes for source, _ in pieces)
        self._stream.wait_event(after)
        pair = self._busy.begin(self._stream, nbytes)
        with torch.cuda.stream(self._stream):
            for source, target in pieces:
                target[: len(source)].copy_(source, non_blocking=True)
        self._busy.end(pair, self._stream)
        for mark in done:
            mark.record(self._stream)
        self._bytes += nbytes
        if self._schedule or not due:
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            self._on_way.append((arrived, nbytes, due))

    def copy_later(
        self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event, done: Sequence[torch.cuda.Event]
    ) -> None:
        if not self._schedule:  # What has a deadline, and may be on its way, was not looked at so far.
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
            self._on_way = deque([(arrived, 1, True)])
        later = _LaterCopy(source, target, after, done)
        self._schedule.add(later, source.nbytes)
        self._pending |= {id(mark): later for mark in done}
        self._go_on()

    def copy_back(self, pieces: Sequence[Piece], after: torch.cuda.Event, done: Sequence[torch.cuda.Event]) -> None:
        self._back.wait_event(after)
        pair = self._back_busy.begin(self._back)
        with torch.cuda.stream(self._back):
            for source, target in pieces:
                target[: len(source)].copy_(source, non_blocking=True)
        self._back_busy.end(pair, self._back)
        for mark in done:
            mark.record(self._back)
        self._back_bytes += sum(source.nbytes for source, _ in pieces)

    def _go_on(self) -> None:
        """What waits for the link goes, as far as there is time now."""
        if not self._schedule or self.capturing():
            return
        while self._on_way and self._on_way[0][0].query():
            self._on_way.popleft()
        due = sum(nbytes for _, nbytes, hurried in self._on_way if hurried)
        later = sum(nbytes for _, nbytes, hurried in self._on_way if not hurried)
        for piece in self._schedule.pieces(due, later, lambda one: bool(one.after.query())):
            self._send_piece(*piece)

    def _send_piece(self, later: _LaterCopy, first: int, last: int, ended: bool) -> None:
        done = later.done if ended else ()
        self._send([(later.source[first:last], later.target[first:last])], later.after, done, due=False)
        for mark in done:
            if self._pending.get(id(mark)) is later:
                del self._pending[id(mark)]

    def _hurry(self, mark: torch.cuda.Event) -> None:
        """What passes this mark is needed now."""
        later = self._pending.get(id(mark))
        if later is not None:
            for piece in self._schedule.awaited(later):
                self._send_piece(*piece)

    @property
    def waiting_bytes(self) -> int:
        """That were not asked of the link yet."""
        return self._schedule.waiting_bytes

    def await_copy(self, mark: torch.cuda.Event) -> None:
        self._hurry(mark)
        stream = torch.cuda.current_stream(self._device)
        pair = self._stalled.begin(stream)
        stream.wait_event(mark)
        self._stalled.end(pair, stream)

    def passed(self, mark: torch.cuda.Event) -> bool:
        self._go_on()
        return id(mark) not in self._pending and bool(mark.query())

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def now(self, source: torch.Tensor, target: torch.Tensor) -> None:
        torch.cuda.synchronize(self._device)
        began_s = time.monotonic()
        target[: len(source)].copy_(source)
        torch.cuda.synchronize(self._device)
        seconds = time.monotonic() - began_s
        if source.is_cuda:
            self._back_bytes += source.nbytes
            self._back_busy.add(seconds)
        else:
            self._bytes += source.nbytes
            self._busy.add(seconds, source.nbytes)

    def wait(self, mark: torch.cuda.Event) -> None:
        self._hurry(mark)
        mark.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._schedule.dropped()
        self._pending.clear()
        self._on_way.clear()
        with suppress(RuntimeError):  # A device that has failed copies nothing any more.
            self._stream.synchronize()
            self._back.synchronize()

    def timed(self) -> tuple[float, int]:
        return self._busy.timed()

    def use(self) -> LinkUse:
        return LinkUse(
            copied_bytes=self._bytes,
            busy_s=self._busy.total_s(),
            stalled_s=self._stalled.total_s(),
            over_s=time.monotonic() - self._began_s,
        )

    def use_back(self) -> LinkUse:
        return LinkUse(
            link="vram-ram",
            copied_bytes=self._back_bytes,
            busy_s=self._back_busy.total_s(),
            over_s=time.monotonic() - self._began_s,
        )


def back_rate(copies: Copies, source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes a second to the host's pinned memory, where nothing else is on its way."""
    for _ in range(2):  # What is only done once is done then.
        began_s, after, done = time.monotonic(), copies.mark(), copies.mark()
        copies.after_launched(after)
        copies.copy_back([(source, target)], after, [done])
        copies.wait(done)
        took_s = time.monotonic() - began_s
    return source.nbytes / max(took_s, 1e-6)


class _Pair:
    """Around a piece of work on a stream."""

    nbytes = 0

    def __init__(self) -> None:
        self.first, self.last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class _Timed:
    """The seconds of all that is over. What cannot be timed, because too much is on its way, counts as the mean."""

    def __init__(self) -> None:
        self._running: deque[_Pair] = deque()
        self._idle: list[_Pair] = []
        self._seconds, self._count, self._missed, self._bytes = 0.0, 0, 0, 0

    def begin(self, stream: torch.cuda.Stream, nbytes: int = 0) -> _Pair | None:
        """None: it is not timed."""
        self._collect()
        if len(self._running) >= MOST_TIMED:
            self._missed += 1
            return None
        pair = self._idle.pop() if self._idle else _Pair()
        pair.nbytes = nbytes
        pair.first.record(stream)
        return pair

    def end(self, pair: _Pair | None, stream: torch.cuda.Stream) -> None:
        """What was begun with this pair; of what was interrupted nobody hears."""
        if pair is not None:
            pair.last.record(stream)
            self._running.append(pair)

    def add(self, seconds: float, nbytes: int = 0) -> None:
        """That were timed otherwise."""
        self._seconds, self._count, self._bytes = self._seconds + seconds, self._count + 1, self._bytes + nbytes

    def _collect(self) -> None:
        while self._running and self._running[0].last.query():
            pair = self._running.popleft()
            self._seconds += pair.first.elapsed_time(pair.last) / 1000
            self._count += 1
            self._bytes += pair.nbytes
            self._idle.append(pair)

    def timed(self) -> tuple[float, int]:
        """Seconds and bytes of what was timed."""
        self._collect()
        return self._seconds, self._bytes

    def total_s(self) -> float:
        self._collect()
        return self._seconds * (1 + self._missed / max(1, self._count))
