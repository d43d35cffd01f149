"""In which order bytes cross a link: over a simulated one, whose time is counted, and which does one thing after the
other. What has a deadline is hardly late, what has none is not forgotten, and all of it arrives once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from simulated_copies import unpinned_memory

from holdfast.execution.link.schedule import IDLE_BYTES, SHARE, LinkSchedule
from holdfast.execution.streaming.copies import MOST_TIMED, CudaCopies
from holdfast.execution.tiers.gpu import GpuPageCopies, HostMemory
from holdfast.kvcache import Tier
from holdfast.records import BlockCopy, StepPlan

RATE = 55e9
LOOK_S = 0.0005


class Link:
    """One thing after the other, at RATE."""

    def __init__(self) -> None:
        self.schedule = LinkSchedule[str]()
        self.now_s, self._free_s = 0.0, 0.0
        self._on_way: deque[tuple[float, int, bool]] = deque()
        self.arrived = {True: 0, False: 0}

    def ask(self, nbytes: int, due: bool) -> float:
        """When it will have arrived."""
        self._free_s = max(self._free_s, self.now_s) + nbytes / RATE
        self._on_way.append((self._free_s, nbytes, due))
        return self._free_s

    def weights(self, nbytes: int) -> float:
        found = self.ask(nbytes, True)
        self.schedule.due(nbytes)
        self.look()
        return found

    def look(self) -> None:
        due, later = (sum(size for _, size, hurried in self._on_way if hurried is kind) for kind in (True, False))
        for _, first, last, _ in self.schedule.pieces(due, later):
            self.ask(last - first, False)

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + LOOK_S)
            while self._on_way and self._on_way[0][0] <= self.now_s:
                _, size, due = self._on_way.popleft()
                self.arrived[due] += size
            self.look()


def test_an_idle_link_is_busy_with_what_has_no_deadline() -> None:
    link = Link()
    link.schedule.add("pages", 10**10)
    link.look()
    link.pass_time(0.1)
    assert link.arrived[False] > 0.9 * 0.1 * RATE


def test_what_has_a_deadline_waits_for_little() -> None:
    link = Link()
    link.schedule.add("pages", 10**10)
    link.look()
    link.pass_time(0.01)
    arrives_s = link.weights(220_000_000)
    assert arrives_s - link.now_s <= (220_000_000 + IDLE_BYTES) / RATE + 1e-9


def test_beside_weights_that_never_end_the_others_have_their_share_and_no_more() -> None:
    """As a model does that streams: half a layer is asked for when one was computed, far ahead."""
    link, half = Link(), 222_000_000
    link.schedule.add("pages", 10**12)
    asked = 0
    while link.now_s < 2.0:
        while asked - link.arrived[True] < 4 * half:
            link.weights(half)
            asked += half
        link.pass_time(half / RATE / 2)
    share = link.arrived[False] / link.arrived[True]
    assert 0.9 * SHARE < share < 1.1 * SHARE


def test_weights_of_a_whole_step_that_are_asked_for_at_once_leave_others_their_share() -> None:
    """Launching a step takes milliseconds: its weights are all in the queue before the first of them has come."""
    link, half, halves = Link(), 111_000_000, 160
    link.schedule.add("pages", 10**12)
    late_s, asked = 0.0, 0
    while link.now_s < 4.0:
        if asked - link.arrived[True] <= halves * half // 4:
            begin_s, behind = link.now_s, asked - link.arrived[True]
            for number in range(1, halves + 1):
                late_s = max(late_s, link.weights(half) - begin_s - (behind + number * half) / RATE)
            asked += halves * half
        link.pass_time(0.01)
    share = link.arrived[False] / link.arrived[True]
    assert 0.9 * SHARE < share < 1.1 * SHARE
    assert late_s < 1.1 * SHARE * 1.25 * halves * half / RATE


def test_nothing_is_earned_for_what_comes_later() -> None:
    link = Link()
    for _ in range(100):
        link.weights(222_000_000)
    link.schedule.add("pages", 10**9)
    link.look()
    assert link.schedule.waiting_bytes == 10**9


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_goes_once_and_in_order(seed: int) -> None:
    rng, schedule = random.Random(seed), LinkSchedule[int](piece_bytes=10, idle_bytes=40, share=0.5)
    sizes, sent, ended, held = dict[int, int](), dict[int, int](), list[int](), set[int]()

    def take(pieces: Any) -> int:
        total = 0
        for item, first, last, over in pieces:
            assert first == sent[item] < last <= sizes[item]
            sent[item], total = last, total + last - first
            assert over == (last == sizes[item])
            ended.extend([item] if over else [])
        return total

    for number in range(200):
        if rng.random() < 0.3:
            sizes[number], sent[number] = rng.randint(1, 60), 0
            schedule.add(number, sizes[number])
        if rng.random() < 0.3:
            schedule.due(rng.randint(0, 100))
        held = {item for item in sizes if rng.random() < 0.3}
        due, later = rng.choice([0, 50]), rng.choice([0, 35, 45])
        went = take(schedule.pieces(due, later, lambda item, held=held: item not in held))
        assert went <= 40 if due else went < 40 + 10 - min(later, 40)
        if rng.random() < 0.1 and (left := [item for item in sizes if sent[item] < sizes[item]]):
            take(schedule.awaited(rng.choice(left)))
    while schedule:
        assert take(schedule.pieces(0, 0)) > 0
    assert sent == sizes
    assert sorted(ended) == sorted(sizes)


class FakeEvent:
    def __init__(self, **settings: Any) -> None:
        self.recorded = self.over = False

    def record(self, stream: Any = None) -> None:
        self.recorded, self.over = True, False

    def query(self) -> bool:
        return self.over or not self.recorded  # As CUDA has it.

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        return None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CudaCopies:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return CudaCopies(torch.device("cpu"), LinkSchedule(piece_bytes=8, idle_bytes=16, share=0.5))


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.uint8)


def over(*events: FakeEvent) -> None:
    for event in events:
        event.synchronize()


def test_a_mark_of_what_waits_is_not_passed(copies: CudaCopies) -> None:
    """An event that was never recorded counts as passed."""
    target, done = torch.zeros(40, dtype=torch.uint8), copies.mark()
    copies.copy_later(numbers(40), target, copies.mark(), [done])
    assert not copies.passed(done)
    while copies.waiting_bytes:
        assert not copies.passed(done)
        over(*(arrived for arrived, _, _ in copies._on_way))
    assert done.recorded
    over(done)
    assert copies.passed(done)
    assert torch.equal(target, numbers(40))
    assert copies.use().copied_bytes == 40
    copies.close()


@pytest.mark.parametrize("how", ["await_copy", "wait"])
def test_what_is_awaited_goes_at_once(copies: CudaCopies, how: str) -> None:
    first, second = torch.zeros(400, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    marks = [copies.mark(), copies.mark()]
    copies.copy_later(numbers(200).repeat(2), first, copies.mark(), [marks[0]])
    copies.copy_later(numbers(100), second, copies.mark(), [marks[1]])
    getattr(copies, how)(marks[1])
    assert torch.equal(second, numbers(100))
    assert marks[1].recorded
    assert copies.waiting_bytes == 400
    assert not copies.passed(marks[0])
    copies.close()
    assert copies.waiting_bytes == 0


def test_what_nobody_has_read_yet_is_not_written_and_others_go_before_it(copies: CudaCopies) -> None:
    """Nor does the link wait for it: weights would have to wait too."""
    read, targets = copies.mark(), [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    copies.after_launched(read)
    copies.copy_later(numbers(8, 1), targets[0], read, [copies.mark()])
    copies.copy_later(numbers(8, 9), targets[1], copies.mark(), [copies.mark()])
    over(*(arrived for arrived, _, _ in copies._on_way))
    copies._go_on()
    assert [int(target[0]) for target in targets] == [0, 9]
    assert read not in copies._stream.waited
    over(read)
    copies._go_on()
    assert int(targets[0][0]) == 1
    copies.close()


def test_the_way_back_is_a_stream_of_its_own(copies: CudaCopies) -> None:
    computed, done, target = copies.mark(), copies.mark(), torch.zeros(8, dtype=torch.uint8)
    copies.copy_back([(numbers(8, 5), target)], computed, [done])
    assert computed in copies._back.waited
    assert not copies._stream.waited
    assert done.recorded
    assert copies.use().copied_bytes == 0
    over(done, *(pair.last for pair in copies._back_busy._running))
    back = copies.use_back()
    assert (back.link, back.copied_bytes, back.busy_s) == ("vram-ram", 8, 0.001)
    copies.close()


class ClockedEvent(FakeEvent):
    """Passed at once."""

    now_ms = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.over, self.at_ms = True, ClockedEvent.now_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        assert isinstance(other, ClockedEvent)
        assert self.recorded, "CUDA refuses it"
        assert other.recorded, "CUDA refuses it"
        return other.at_ms - self.at_ms


@pytest.mark.usefixtures("copies")
def test_a_copy_that_was_interrupted_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", ClockedEvent)
    copies, interrupted = CudaCopies(torch.device("cpu")), False

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if interrupted:
            raise KeyboardInterrupt
        ClockedEvent.now_ms += 1.0
        yield

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    timed = 0
    for number in range(3 * MOST_TIMED):  # Those that are used again were recorded before.
        interrupted = number % 3 == 2
        with suppress(KeyboardInterrupt):
            copies.copy(numbers(8), torch.zeros(8, dtype=torch.uint8), copies.mark(), [copies.mark()])
            timed += 1
        ClockedEvent.now_ms += 5.0
        assert copies.timed() == (pytest.approx(timed / 1000), timed * 8)
    assert copies.use().busy_s == pytest.approx(timed / 1000)
    copies.close()


@pytest.mark.parametrize("weights", [True, False], ids=["beside weights", "alone"])
def test_pages_go_behind_weights_and_at_once_where_none_come(copies: CudaCopies, weights: bool) -> None:
    pool, memory = torch.zeros((8, 16), dtype=torch.uint8), unpinned_memory([4096])
    memory.pieces[0][:64] = numbers(64, 1)
    pages = GpuPageCopies(lambda: pool, 16, copies, lambda: weights, HostMemory(memory, 16), None)
    layer, arrived = torch.zeros(64, dtype=torch.uint8), copies.mark()
    copies.copy(numbers(64), layer, copies.mark(), [arrived])
    loads = [BlockCopy(number, Tier.HOST, number, Tier.DEVICE, number + 1, False, b"") for number in range(4)]
    pages.begin(StepPlan(step_id=1, copies=loads))
    computed = pages._coming[0].mark if not weights else copies._schedule._later[0].item.after
    if not weights:
        assert torch.equal(pool[1:5].flatten(), numbers(64, 1))
    else:
        assert not pool.any()  # The weights are on their way, and the pages' last reader is.
        over(computed)
        copies.copy(numbers(32), layer, copies.mark(), [arrived])
        assert torch.equal(pool[1:5].flatten()[:24], torch.cat([numbers(16, 1), torch.zeros(8)]))  # Half of it.
        assert copies.waiting_bytes == 48
        assert pages.over(wait=False) == ([], [])
        assert pages.over(wait=True)[1] == []  # There is nothing else to do: all of it goes.
        assert torch.equal(pool[1:5].flatten(), numbers(64, 1))
    over(*(piece.mark for piece in pages._coming))
    stores = [BlockCopy(9, Tier.DEVICE, 1, Tier.HOST, 200, False, b"")]
    pages.launch_stores(StepPlan(step_id=2, copies=stores))
    assert torch.equal(memory.pieces[0][200 * 16 : 201 * 16], numbers(16, 1))
    assert (copies.use().copied_bytes, copies.use_back().copied_bytes) == (64 * 2 + (32 if weights else 0), 16)
    pages.close()
