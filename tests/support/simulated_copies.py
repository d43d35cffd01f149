"""A simulated GPU for streamed layers: copies that come late, and slots that are poisoned until then.

SimulatedCopies    beside real computing on a CPU: a reader that does not wait finds NaN
QueuedCopies       two queues that run interleaved at random, held together by marks alone
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.execution.streaming.copies import Piece
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.records import LinkUse

POISON = 0xFF
"""NaN in every type of number."""


def unpinned_memory(sizes: Sequence[int]) -> PinnedMemory:
    cpu = torch.device("cpu")
    return PinnedMemory(sizes, cpu, pin=lambda address, nbytes: 0, unpin=lambda addresses, device: None)


class _Copy:
    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target, self.arrived = source, target, False
        target.fill_(POISON)

    def arrive(self) -> None:
        if not self.arrived:
            self._target[: len(self._source)].copy_(self._source)
            self.arrived = True


class SimulatedCopies:
    """A copy poisons its slot at once, and arrives when it is waited for, or at random a bit earlier: nothing is in
    time for a reader that does not wait. A mark is the copies that it stands behind."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.copied: list[int] = []
        self.later: list[int] = []
        self.back: list[int] = []
        """Bytes of each: of those with a deadline, without one, and to the host."""
        self._late: list[_Copy] = []

    def mark(self) -> list[_Copy]:
        return []

    def after_launched(self, mark: list[_Copy]) -> None:
        mark.clear()  # What is launched on a CPU is computed.

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: list[_Copy], done: Sequence[list[_Copy]]) -> None:
        self.copy_pieces([(source, target)], after, done)

    def copy_pieces(self, pieces: Sequence[Piece], after: list[_Copy], done: Sequence[list[_Copy]]) -> None:
        self._begin(pieces, done)
        self.copied.append(sum(source.nbytes for source, _ in pieces))

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def copy_later(
        self, source: torch.Tensor, target: torch.Tensor, after: list[_Copy], done: Sequence[list[_Copy]]
    ) -> None:
        self._begin([(source, target)], done)
        self.later.append(source.nbytes)

    def copy_back(self, pieces: Sequence[Piece], after: list[_Copy], done: Sequence[list[_Copy]]) -> None:
        self._begin(pieces, done)
        self.back.append(sum(source.nbytes for source, _ in pieces))

    def _begin(self, pieces: Sequence[Piece], done: Sequence[list[_Copy]]) -> None:
        copies = [_Copy(source, target) for source, target in pieces]
        self._late = [*(one for one in self._late if not one.arrived), *copies]
        for mark in done:
            mark[:] = copies

    def await_copy(self, mark: list[_Copy]) -> None:
        self.wait(mark)

    def capturing(self) -> bool:
        return False

    def passed(self, mark: list[_Copy]) -> bool:
        if self._random.random() < 0.5:
            self.wait(mark)
        return all(copy.arrived for copy in mark)

    def wait(self, mark: list[_Copy]) -> None:
        for copy in mark:
            copy.arrive()

    def now(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target[: len(source)].copy_(source)

    def settle(self) -> None:
        self.wait(self._late)

    def close(self) -> None:
        return None

    def timed(self) -> tuple[float, int]:
        return 0.0, 0

    def use(self) -> LinkUse:
        return LinkUse(copied_bytes=sum(self.copied) + sum(self.later))

    def use_back(self) -> LinkUse:
        return LinkUse(link="vram-ram", copied_bytes=sum(self.back))


@dataclass(slots=True)
class _Point:
    """Where a mark was set last."""

    passed: bool = True


@dataclass(slots=True)
class _Mark:
    point: _Point = field(default_factory=_Point)


class QueuedCopies:
    """Computing is what `launch` is given; it and copies are run by `run_some`, in any order that marks allow."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._computing: deque[Callable[[], bool]] = deque()
        self._link: deque[Callable[[], bool]] = deque()

    def launch(self, work: Callable[[], None]) -> None:
        self._computing.append(lambda: (work(), True)[1])

    def run_some(self) -> None:
        for _ in range(self._random.randrange(6)):
            self._run_one()

    @property
    def idle(self) -> bool:
        return not self._computing and not self._link

    def run_all(self) -> None:
        while self._computing or self._link:
            assert self._run_one() or self._run_one() or self._run_one() or self._moves(), "both queues wait"

    def _moves(self) -> bool:
        return any(queue and self._step(queue) for queue in (self._computing, self._link))

    def _run_one(self) -> bool:
        queue = self._random.choice((self._computing, self._link))
        return bool(queue) and self._step(queue)

    def _step(self, queue: deque[Callable[[], bool]]) -> bool:
        if not queue[0]():
            return False
        queue.popleft()
        return True

    def mark(self) -> _Mark:
        return _Mark()

    def _set(self, queue: deque[Callable[[], bool]], mark: _Mark) -> None:
        point = mark.point = _Point(passed=False)

        def pass_point() -> bool:
            point.passed = True
            return True

        queue.append(pass_point)

    def _await(self, queue: deque[Callable[[], bool]], mark: _Mark) -> None:
        point = mark.point
        queue.append(lambda: point.passed)

    def after_launched(self, mark: _Mark) -> None:
        self._set(self._computing, mark)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: _Mark, done: Sequence[_Mark]) -> None:
        self.copy_pieces([(source, target)], after, done)

    def copy_pieces(self, pieces: Sequence[Piece], after: _Mark, done: Sequence[_Mark]) -> None:
        self._await(self._link, after)
        for source, target in pieces:
            self._copy(source, target)
        for mark in done:
            self._set(self._link, mark)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._link.append(lambda: target.fill_(POISON) is target)
        half = len(source) // 2
        self._link.append(lambda: target[:half].copy_(source[:half]) is not None)
        self._link.append(lambda: target[half : len(source)].copy_(source[half:]) is not None)

    def copy_later(self, source: torch.Tensor, target: torch.Tensor, after: _Mark, done: Sequence[_Mark]) -> None:
        raise AssertionError("weights have a deadline")

    def copy_back(self, pieces: Sequence[Piece], after: _Mark, done: Sequence[_Mark]) -> None:
        raise AssertionError("weights do not go back")

    def await_copy(self, mark: _Mark) -> None:
        self._await(self._computing, mark)

    def capturing(self) -> bool:
        return False

    def passed(self, mark: _Mark) -> bool:
        self.run_some()
        return mark.point.passed

    def wait(self, mark: _Mark) -> None:
        while not mark.point.passed:
            assert self._run_one() or self._moves(), "both queues wait"

    def now(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.run_all()
        target[: len(source)].copy_(source)

    def settle(self) -> None:
        self.run_all()

    def close(self) -> None:
        self.run_all()

    def timed(self) -> tuple[float, int]:
        return 0.0, 0

    def use(self) -> LinkUse:
        return LinkUse()

    def use_back(self) -> LinkUse:
        return LinkUse(link="vram-ram")
