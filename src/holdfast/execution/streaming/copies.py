"""Copies from host memory to a GPU beside what it computes, with a fence each way:

    computing  ── reads a slot ──┬───────────────────────── waits ──► reads it again
    the link                     └─ waits ──► copies into it ──┘

Counts what the link moved, how long it was busy, and how long computing waited for it. Knows nothing of layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from holdfast.records import LinkUse

MOST_TIMED = 256
"""Pairs of events that may be on their way; beyond it nothing is timed for a while."""


class Copies(Protocol):
    """A mark is a point that computing or copying passes; it may be set again and again."""

    def mark(self) -> Any: ...

    def after_launched(self, mark: Any) -> None:
        """Passed when all that was launched so far is computed."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any, done: Sequence[Any]) -> None:
        """Begins once `after` is passed, and returns at once; `done` are passed when it has arrived."""

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
        """When this returns all that was launched is computed, and nothing is on its way."""

    def close(self) -> None:
        """When this returns nothing is on its way."""

    def use(self) -> LinkUse: ...


class CudaCopies:
    """On a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._bytes, self._began_s = 0, time.monotonic()
        self._busy, self._stalled = _Timed(), _Timed()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def after_launched(self, mark: torch.cuda.Event) -> None:
        mark.record(torch.cuda.current_stream(self._device))

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event, done: Sequence[torch.cuda.Event]
    ) -> None:
        self._stream.wait_event(after)
        timed = self._busy.begin(self._stream)
        with torch.cuda.stream(self._stream):
            target[: len(source)].copy_(source, non_blocking=True)
        timed.end(self._stream)
        for mark in done:
            mark.record(self._stream)
        self._bytes += source.nbytes

    def await_copy(self, mark: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        timed = self._stalled.begin(stream)
        stream.wait_event(mark)
        timed.end(stream)

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def now(self, source: torch.Tensor, target: torch.Tensor) -> None:
        torch.cuda.synchronize(self._device)
        target[: len(source)].copy_(source)
        torch.cuda.synchronize(self._device)

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._stream.synchronize()

    def use(self) -> LinkUse:
        return LinkUse(
            copied_bytes=self._bytes,
            busy_s=self._busy.total_s(),
            stalled_s=self._stalled.total_s(),
            over_s=time.monotonic() - self._began_s,
        )


class _Pair:
    """Around a piece of work on a stream."""

    def __init__(self) -> None:
        self.first, self.last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def end(self, stream: torch.cuda.Stream) -> None:
        self.last.record(stream)


class _Timed:
    """The seconds of all that is over. What cannot be timed, because too much is on its way, counts as the mean."""

    def __init__(self) -> None:
        self._running: deque[_Pair] = deque()
        self._idle = [_Pair() for _ in range(MOST_TIMED)]
        self._seconds, self._count, self._missed = 0.0, 0, 0

    def begin(self, stream: torch.cuda.Stream) -> _Pair:
        self._collect()
        if not self._idle:
            self._missed += 1
            return _Pair()
        pair = self._idle.pop()
        pair.first.record(stream)
        self._running.append(pair)
        return pair

    def _collect(self) -> None:
        while self._running and self._running[0].last.query():
            pair = self._running.popleft()
            self._seconds += pair.first.elapsed_time(pair.last) / 1000
            self._count += 1
            self._idle.append(pair)

    def total_s(self) -> float:
        self._collect()
        return self._seconds * (1 + self._missed / max(1, self._count))
