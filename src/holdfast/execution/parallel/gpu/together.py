"""Which way ranks on GPUs exchange numbers, and why: memory that they map of one another for what is small, NCCL for
the rest, or one of the two alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.parallel.gpu.exchange import MOST_RANKS
from holdfast.observability.decisions import Decision
from holdfast.units import format_bytes

NO_PEERS = "NCCL_P2P_DISABLE"


class GpuCollectives(Collectives, Protocol):
    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        """onto += the sum of all ranks' x, which means nothing afterwards. Contiguous, of one shape."""

    def limit(self, limit_s: float) -> None:
        """How long another rank may let this one wait, from what is launched next on; 0: for ever."""

    def check(self) -> None:
        """Raises where another rank did not come: nothing that was computed since means anything."""

    def give_up(self) -> None:
        """From any thread: nothing waits for the others any longer."""


class SmallAndLarge:
    """`small` for what fits there at once, `large` for the rest."""

    def __init__(self, small: GpuCollectives, large: GpuCollectives, most_bytes: int) -> None:
        self._small, self._large, self._most_bytes = small, large, most_bytes
        self.rank, self.size = small.rank, small.size
        self.name = f"{small.name} up to {format_bytes(most_bytes)}, {large.name} beyond"

    def _for(self, nbytes: int) -> GpuCollectives:
        return self._small if nbytes <= self._most_bytes else self._large

    def all_reduce(self, x: torch.Tensor) -> None:
        self._for(x.nbytes).all_reduce(x)

    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        self._for(x.nbytes).add_reduced(x, onto)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        self._for(len(part) * max(widths) * part.element_size()).gather(part, widths, out)

    def broadcast(self, x: torch.Tensor) -> None:
        self._for(x.nbytes).broadcast(x)

    def limit(self, limit_s: float) -> None:
        self._small.limit(limit_s)
        self._large.limit(limit_s)

    def check(self) -> None:
        self._small.check()
        self._large.check()

    def give_up(self) -> None:
        self._small.give_up()
        self._large.give_up()

    def close(self) -> None:
        self._small.close()
        self._large.close()


def against_exchange(uuids: Sequence[str], *, disabled: bool, environment: Mapping[str, str] | None = None) -> str:
    """Why ranks on these GPUs do not map one another's memory, as far as this process can tell; empty: nothing is
    against it. `disabled`: by --disable-custom-all-reduce."""
    if disabled:
        return "--disable-custom-all-reduce"
    given = os.environ if environment is None else environment
    if given.get(NO_PEERS, "0") not in ("", "0"):
        return f"{NO_PEERS} is set"
    if len(uuids) > MOST_RANKS:
        return f"{len(uuids)} ranks are more than {MOST_RANKS}"
    places = {uuid: _place(uuid) for uuid in uuids}
    for uuid, one in places.items():
        for other in places.values():
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} ({uuid}) has no peer access to GPU {other}"
    return ""


def _place(uuid: str) -> int:
    """As torch counts devices."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            return index
    return -1


def exchange_decision(collectives: Collectives, against: str, uuids: Sequence[str]) -> Decision:
    """For the log at start and `/memory`."""
    if against:
        return Decision("all_reduce", collectives.name, f"not over CUDA IPC: {against}", "hardware")
    shared = len(set(uuids)) < len(uuids)
    reason = "ranks of one GPU map one another's memory" if shared else "each GPU reads the memory of all others"
    return Decision("all_reduce", collectives.name, reason, "hardware")
