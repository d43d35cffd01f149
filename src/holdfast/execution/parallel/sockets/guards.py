"""Connections beside gloo's, to the same ranks of other machines, on which nothing is ever said: where the way there
drops all packets gloo waits for as long as it may, and these end within seconds. Knows nothing of gloo."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch.distributed

from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.segment import Watch
from holdfast.execution.parallel.sockets.connect_ranks import connect_ranks
from holdfast.execution.parallel.sockets.stage_lines import hang_up


class Guards:
    """`lines`: to other ranks, by their numbers."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines = lines

    def check(self) -> None:
        """Raises where another machine does not answer. Of a rank that has ended gloo hears itself."""
        for rank, line in self._lines.items():
            try:
                line.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise EngineDiedError(f"the connection to rank {rank} is lost: {error}") from error

    def close(self) -> None:
        for line in self._lines.values():
            hang_up(line)


def open_guards(
    store: torch.distributed.Store, rank: int, others: Sequence[int], *, host: str, key: bytes, watch: Watch
) -> Guards:
    """To `others`, each of which does the same."""
    lower, higher = [other for other in others if other < rank], [other for other in others if other > rank]
    own = torch.distributed.PrefixStore("guards", store)
    incoming, outgoing = connect_ranks(own, rank, lower, higher, host=host, key=key, watch=watch)
    return Guards(incoming | outgoing)
