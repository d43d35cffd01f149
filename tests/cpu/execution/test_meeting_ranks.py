"""Ranks of several machines that find one another by sockets: while they wait they look around, and leave when another
will not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed

from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.sockets.gloo import GlooCollectives
from holdfast.execution.parallel.sockets.key_proof import KEY_BYTES
from holdfast.execution.parallel.sockets.stage_lines import open_lines

SOON_S = 10.0
KEY = b"k" * KEY_BYTES


class Watch:
    """Raises when it has been looked around so often."""

    def __init__(self, times: int) -> None:
        self._left = times

    def __call__(self, waited_s: float) -> None:
        self._left -= 1
        if self._left <= 0:
            raise EngineDiedError("rank 1 (node 1) has ended: node 1 is lost")


def lines(store: torch.distributed.Store, rank: int, sources: list[int], targets: list[int], watch):
    return open_lines(store, rank, sources, targets, host="127.0.0.1", key=KEY, watch=watch)


@pytest.mark.parametrize(
    "meet",
    [
        lambda store, watch: lines(store, 0, [1], [], watch),
        lambda store, watch: lines(store, 0, [], [1], watch),
        lambda store, watch: GlooCollectives(store, 0, 2, 3.0, watch=watch),
    ],
    ids=["reached", "reaching", "gloo"],
)
def test_one_that_will_not_come_ends_the_wait(meet: Callable) -> None:
    began_s = time.monotonic()
    with pytest.raises(EngineDiedError, match="node 1 is lost"):
        meet(torch.distributed.HashStore(), Watch(2))
    assert time.monotonic() - began_s < 2.5


def test_one_that_comes_late_is_met() -> None:
    store, other, looked = torch.distributed.HashStore(), dict[str, object](), list[float]()

    def join() -> None:
        other["in"], other["out"] = lines(store, 1, [0], [0], lambda waited_s: None)

    late = threading.Timer(0.5, join)
    late.start()
    sources, targets = lines(store, 0, [1], [1], looked.append)
    late.join(SOON_S)
    assert (list(sources), list(targets)) == ([1], [1])
    assert looked
    for line in (*sources.values(), *targets.values(), *other["in"].values(), *other["out"].values()):
        line.close()
