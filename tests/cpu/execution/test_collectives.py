"""What ranks of one machine do together, in threads that share a segment: sums with the same bits everywhere, in the
order of ranks, parts of any width, and messages longer than the mailbox."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from holdfast.execution import native
from holdfast.execution.parallel.mailbox import Receiver, Sender
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.share import RankShare
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.footprint.cpu import MAIL_BYTES

pytestmark = pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code")

RANKS = 3
Found = TypeVar("Found")


def watch(waited_s: float) -> None:
    assert waited_s < 60, "another rank does not come"


def together(run: Callable[[SharedMemoryCollectives], Found]) -> list[Found]:
    """What each of three ranks makes of it."""
    layout = SegmentLayout(RANKS, 4096)
    first = Segment(layout)
    segments = [first, *(Segment(layout, first.descriptor) for _ in range(1, RANKS))]
    with ThreadPoolExecutor(RANKS) as threads:
        members = [SharedMemoryCollectives(segment, rank, watch) for rank, segment in enumerate(segments)]
        found = list(threads.map(run, members))
    first.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 1000), (9, 1024)])
def test_sums_are_in_the_order_of_ranks_on_all_of_them(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Larger ones than a slot too, several times over, so that slots are used again."""
    parts = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(10 * turn + rank)).to(dtype)
            for rank in range(RANKS)
        ]
        for turn in range(4)
    ]

    def run(member: SharedMemoryCollectives) -> list[torch.Tensor]:
        made = [turn[member.rank].clone() for turn in parts]
        for x in made:
            member.all_reduce(x)
        return made

    for found in together(run):
        for x, (first, second, third) in zip(found, parts, strict=True):
            assert torch.equal(x, ((first.float() + second.float()) + third.float()).to(dtype))


def test_parts_of_any_width_stand_side_by_side_on_the_first() -> None:
    widths = [5, 700, 3]
    parts = [torch.full((4, width), float(rank)) for rank, width in enumerate(widths)]

    def run(member: SharedMemoryCollectives) -> torch.Tensor:
        out = torch.empty((4, sum(widths)))
        for _ in range(3):
            member.gather(parts[member.rank], widths, out if member.rank == 0 else None)
        return out

    assert torch.equal(together(run)[0], torch.cat(parts, dim=1))


def test_all_have_what_the_first_has() -> None:
    def run(member: SharedMemoryCollectives) -> torch.Tensor:
        x = torch.arange(900) * (1 if member.rank == 0 else 0)
        member.broadcast(x)
        return x

    assert all(torch.equal(x, torch.arange(900)) for x in together(run))


def test_all_have_the_largest_of_any() -> None:
    parts = [[0.5, 8.0, 1.0], [2.0, 0.25, 1.0], [1.0, 4.0, 64.0]]

    def run(member: SharedMemoryCollectives) -> list[float]:
        share = RankShare(member, [(0, 1), (1, 2), (2, 3)], 1, torch.float32)
        return share.largest(parts[member.rank])

    assert together(run) == [[2.0, 8.0, 64.0]] * RANKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_whoever_watches_ends_the_waiting(dtype: torch.dtype) -> None:
    """In compiled code too: what it raises is raised there, and what was counted stays so."""
    segment = Segment(SegmentLayout(2, 4096))

    def give_up(waited_s: float) -> None:
        raise TimeoutError(f"after {waited_s:.1f} s")

    member = SharedMemoryCollectives(segment, 0, give_up)
    with pytest.raises(TimeoutError, match=r"after 0\.2 s"):
        (member.all_reduce if dtype is torch.float32 else member.broadcast)(torch.ones(8, dtype=dtype))
    assert member.count == segment.counts[0].value == 1
    segment.alarm.post(1)
    with pytest.raises(TimeoutError, match=r"after 0\.0 s"):
        member.all_reduce(torch.ones(8))
    segment.close()


@pytest.mark.parametrize("stages", [1, RANKS])
def test_messages_come_in_order_and_whole(stages: int) -> None:
    """Of a pipeline several lie there at once, and readers are not at the same."""
    messages = [b"a", b"b" * (2 * MAIL_BYTES + 5), b"c" * MAIL_BYTES, b"d"]
    layout = SegmentLayout(RANKS, 4096, stages, 4096, 4096)
    first = Segment(layout)

    def receive(rank: int) -> list[bytes]:
        receiver = Receiver(Segment(layout, first.descriptor), rank, watch)
        return [receiver.receive() for _ in messages]

    with ThreadPoolExecutor(RANKS) as threads:
        heard = [threads.submit(receive, rank) for rank in (1, 2)]
        sender = Sender(first, watch)
        for message in messages:
            sender.send(message)
        assert [one.result() for one in heard] == [messages, messages]


def test_a_pipeline_takes_messages_of_as_many_steps_as_it_has_stages() -> None:
    """Nobody reads yet: the first stage need not wait for the last one to come to a step."""
    sender = Sender(Segment(SegmentLayout(RANKS, 4096, RANKS, 4096, 4096)), _no_wait)
    for _ in range(RANKS):
        sender.send(b"plan")
    with pytest.raises(TimeoutError):
        sender.send(b"one too many")


def _no_wait(waited_s: float) -> None:
    raise TimeoutError
