"""Collectives of CPU ranks over sockets, by torch's gloo: slower than shared memory, and good between machines too.

The process group is this object's own: the program that the engine runs in may have another.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed

from holdfast.errors import EngineDiedError, EngineError
from holdfast.execution.parallel.segment import LOOK_NS, Watch
from holdfast.execution.parallel.sockets.listen import OPEN_PORTS, listen_at

TIMEOUT_S = 60.0
"""To find one another."""
LONGEST_S = 86_400.0
LOOK_S = LOOK_NS / 1e9
ASK_S = 0.02
LOOPBACK = "127.0.0.1"
Store: TypeAlias = torch.distributed.Store


def open_store(port: int | None, size: int, host: str = LOOPBACK) -> torch.distributed.TCPStore:
    """Where ranks find one another: the first one's (None), or that one's by its port. It listens at `host` alone.
    Raises EngineError where it is not reached."""
    own = listen_at(host) if port is None else None
    place = port or (0 if own is None else own.getsockname()[1])
    try:
        return torch.distributed.TCPStore(
            host,
            place,
            size,
            is_master=own is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S),
            master_listen_fd=None if own is None else own.detach(),
        )
    except RuntimeError as error:
        raise EngineError(
            f"rank 0 is not reached at {host} port {place}, where ranks find one another",
            needed=f"an answer within {TIMEOUT_S:g} s",
            found=str(error).splitlines()[0],
            fix=OPEN_PORTS,
        ) from error


def _await_all(store: torch.distributed.Store, size: int, timeout_s: float, watch: Watch) -> None:
    """Until all ranks are about to make the process group: gloo asks nobody while it waits for them."""
    names, until_s = [f"here/{rank}" for rank in range(size)], time.monotonic() + timeout_s
    while not store.check(names):
        if time.monotonic() > until_s:
            raise RuntimeError(f"waited {timeout_s:g} s")
        watch(0.0)  # How long they may take is known here.
        time.sleep(ASK_S)


class GlooCollectives:
    """`store`: where ranks find one another. Sums come together in the ring's order, the same on all ranks, but not in
    the order of ranks."""

    name = "gloo"

    def __init__(
        self,
        store: torch.distributed.Store,
        rank: int,
        size: int,
        timeout_s: float = 0.0,
        host: str = LOOPBACK,
        watch: Watch | None = None,
    ) -> None:
        """`timeout_s`: for the others; 0: as long as gloo allows. `host`: where they reach this rank. `watch`: called
        while they are awaited, and raises where they will not come: gloo itself does not notice a machine that falls
        silent."""
        self.rank, self.size, self._timeout_s, self._watch = rank, size, timeout_s or LONGEST_S, watch
        try:
            options = torch.distributed.ProcessGroupGloo._Options()
            options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=self._timeout_s)
            store.set(f"here/{rank}", b"")
            if watch is not None:
                _await_all(store, size, self._timeout_s, watch)
            self._group = torch.distributed.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise EngineError(f"rank {rank} has not found all {size} ranks: {error}") from error

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dtype is torch.float32:
            self._done(self._group.allreduce([x]))
            return
        wide = x.float()
        self._done(self._group.allreduce([wide]))
        x.copy_(wide)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        # Gloo wants equal parts: all are as wide as the widest.
        padded = part.new_zeros((len(part), max(widths)))
        padded[:, : part.shape[1]] = part
        parts = [[torch.empty_like(padded) for _ in widths]] if out is not None else []
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._done(self._group.gather(parts, [padded], options))
        if out is not None:
            torch.cat([one[:, :width] for one, width in zip(parts[0], widths, strict=True)], dim=1, out=out)

    def broadcast(self, x: torch.Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._done(self._group.broadcast([x], options))

    def close(self) -> None:
        """Nothing is held beyond the process group, which goes with this object."""

    def _await(self, work: torch.distributed.Work, watch: Watch) -> None:
        waited_s = 0.0
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    # It has failed, or was done just after the wait for it had ended: which of the two, it knows.
                    work.wait()
                    return
            waited_s += LOOK_S
            try:
                watch(waited_s)
            except BaseException:
                # Whoever gives such a group back, be it the end of the process, waits for what will not come.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                raise

    def _done(self, work: torch.distributed.Work) -> None:
        try:
            if self._watch is None:
                work.wait()
            else:
                self._await(work, self._watch)
        except RuntimeError as error:
            raise EngineDiedError(
                f"rank {self.rank}: another rank has ended or does not answer: {error}",
                needed=f"an answer within {self._timeout_s:g} s",
            ) from error
