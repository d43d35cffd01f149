"""Which way ranks on GPUs exchange numbers, and why: memory that they map of one another for what is small, NCCL for
the rest, or one of the two alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.parallel.gpu.exchange import MOST_RANKS
from holdfast.execution.parallel.gpu.stage import GpuStage, StageLines
from holdfast.observability.decisions import Decision
from holdfast.units import format_bytes

NO_PEERS = "NCCL_P2P_DISABLE"
LINES_BY = "CUDA IPC"
"""How stages hand on: what NCCL sends waits for whoever receives, and two stages that send to each other would wait for
ever."""
THROUGH_RAM = "sockets, through pinned memory"
BETWEEN_NODES = "sockets between nodes, through pinned memory"


class GpuCollectives(Collectives, Protocol):
    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        """onto += the sum of all ranks' x, which means nothing afterwards. Contiguous, of one shape."""

    def limit(self, limit_s: float) -> None:
        """How long another rank may let this one wait, from what is launched next on; 0: for ever."""

    def check(self) -> None:
        """Raises where another rank did not come: nothing that was computed since means anything."""

    def give_up(self) -> None:
        """From any thread: nothing waits for the others any longer."""


@dataclass(frozen=True, slots=True)
class JoinedGpus:
    """All that a rank has to do with others, as one thing to check and to give up."""

    collectives: GpuCollectives | None
    """With the ranks of its stage; None: it is alone there."""
    stage: GpuStage | None
    """None: every rank has a part of all layers."""

    def _each(self) -> Iterator[GpuCollectives | StageLines]:
        if self.collectives is not None:
            yield self.collectives
        if self.stage is not None:
            yield self.stage.lines

    def limit(self, limit_s: float) -> None:
        """How long another rank may let this one wait, from what is launched next on; 0: for ever."""
        for one in self._each():
            one.limit(limit_s)

    def check(self) -> None:
        """Raises where another rank did not come."""
        for one in self._each():
            one.check()

    def give_up(self) -> None:
        """From any thread: nothing waits for the others any longer."""
        for one in self._each():
            one.give_up()

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # Also where one of them fails.
            for one in self._each():
                all_of_them.callback(one.close)


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


def exchange_decisions(joined: JoinedGpus, against: str, uuids: Sequence[str], nodes: int = 1) -> list[Decision]:
    """For the log at start and `/memory`."""
    of_a_node = uuids[: len(uuids) // nodes]
    shared = len(set(of_a_node)) < len(of_a_node)
    reason = "ranks of one GPU map one another's memory" if shared else "each GPU reads the memory of all others"
    found = []
    if joined.collectives is not None:
        said = f"not over CUDA IPC: {against}" if against else reason
        found.append(Decision("all_reduce", joined.collectives.name, said, "hardware"))
    if joined.stage is not None:
        value, more = LINES_BY, "NCCL's sends wait for whoever receives"
        if against:
            value, reason = THROUGH_RAM, f"not over CUDA IPC: {against}"
        elif nodes > 1:
            value = BETWEEN_NODES if joined.stage.count == nodes else f"{BETWEEN_NODES}; {LINES_BY} on each"
            reason = f"stages are on {nodes} nodes"
        found.append(Decision("stage_lines", value, f"{reason}; {more}", "hardware"))
    return found
