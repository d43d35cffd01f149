"""Sums over sockets while another machine falls silent: gloo would wait as long as it may, rank 0 looks around."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed
from deadlines import PATIENCE_S

from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.sockets.gloo import GlooCollectives


def pair(watch) -> list[GlooCollectives]:
    store, found = torch.distributed.HashStore(), dict[int, GlooCollectives]()

    def join(rank: int) -> None:
        found[rank] = GlooCollectives(store, rank, 2, watch=watch if rank == 0 else None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [found[0], found[1]]


def test_a_rank_that_will_not_come_ends_the_wait_with_what_is_known_of_it() -> None:
    looked = list[float]()

    def watch(waited_s: float) -> None:
        looked.append(waited_s)
        if waited_s > 0.5:
            raise EngineDiedError("rank 1 (node 1) has ended: node 1 is lost")

    first, second = pair(watch)
    looked.clear()  # While they met.
    with pytest.raises(EngineDiedError, match="node 1 is lost"):
        first.all_reduce(torch.ones(4))
    del first  # Which nobody waits for any more.
    assert looked == pytest.approx([0.2, 0.4, 0.6])
    del second


class DoneAfterTheWait:
    """Of a rank that arrives, or fails, when the wait for it has just ended."""

    def __init__(self, failure: str) -> None:
        self.failure, self.waits = failure, 0

    def wait(self, limit: object = None) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)

    def is_completed(self) -> bool:
        return self.waits > 0


def test_a_rank_that_comes_as_the_wait_ends_has_come() -> None:
    """Not one that was too late: nobody had given it up."""
    looked = list[float]()
    GlooCollectives._await(None, DoneAfterTheWait(""), looked.append)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="connection reset"):
        GlooCollectives._await(None, DoneAfterTheWait("connection reset"), looked.append)  # type: ignore[arg-type]
    assert looked == []


def test_a_rank_that_comes_late_is_waited_for() -> None:
    looked, late = threading.Semaphore(0), torch.full((4,), 2.0)
    first, second = pair(lambda waited_s: looked.release() if waited_s else None)  # Not while they met.

    def come_late() -> None:
        for _ in range(2):  # So often was it looked for.
            assert looked.acquire(timeout=PATIENCE_S)
        second.all_reduce(late)

    other = threading.Thread(target=come_late)
    other.start()
    own = torch.ones(4)
    first.all_reduce(own)
    other.join(PATIENCE_S)
    assert own.tolist() == late.tolist() == [3.0] * 4
