"""Sums over sockets while another machine falls silent: gloo would wait as long as it may, rank 0 looks around."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed

from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.sockets.gloo import GlooCollectives

SOON_S = 10.0


def pair(watch) -> list[GlooCollectives]:
    store, found = torch.distributed.HashStore(), dict[int, GlooCollectives]()

    def join(rank: int) -> None:
        found[rank] = GlooCollectives(store, rank, 2, watch=watch if rank == 0 else None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    return [found[0], found[1]]


def test_a_rank_that_will_not_come_ends_the_wait_with_what_is_known_of_it() -> None:
    looked = list[float]()

    def watch(waited_s: float) -> None:
        looked.append(waited_s)
        if waited_s > 0.5:
            raise EngineDiedError("rank 1 (node 1) has ended: node 1 is lost")

    first, second = pair(watch)
    looked.clear()  # While they met.
    began_s = time.monotonic()
    with pytest.raises(EngineDiedError, match="node 1 is lost"):
        first.all_reduce(torch.ones(4))
    del first  # Which nobody waits for any more.
    assert time.monotonic() - began_s < SOON_S
    assert looked == pytest.approx([0.2, 0.4, 0.6])
    del second


def test_a_rank_that_comes_late_is_waited_for() -> None:
    looked, late = list[float](), torch.full((4,), 2.0)
    first, second = pair(looked.append)
    looked.clear()
    other = threading.Timer(0.5, second.all_reduce, (late,))
    other.start()
    own = torch.ones(4)
    first.all_reduce(own)
    other.join(SOON_S)
    assert own.tolist() == late.tolist() == [3.0] * 4
    assert looked
