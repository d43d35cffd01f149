"""Collectives of ranks that map one another's GPU memory, by kernels of our own (gpu/cuda/rank_exchange.cu): small sums
in one kernel, between ranks of one GPU too. Fit for CUDA graphs. Larger tensors go in pieces.

A rank that does not come is told of by `check`: the kernels stop waiting, and what was computed means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

import torch

from holdfast.errors import EngineError, EngineHungError
from holdfast.execution.gpu.cuda.module import Module, text
from holdfast.execution.parallel.gpu.peer_memory import PeerMemory
from holdfast.footprint.gpu import EXCHANGE_BLOCKS, MOST_EXCHANGE_RANKS, exchange_memory_bytes
from holdfast.units import format_duration

MOST_RANKS = MOST_EXCHANGE_RANKS
THREADS = 512
ONE_SHOT_BYTES = {2: 1 << 30, 3: 512 << 10, 4: 512 << 10}
"""By ranks, up to which every rank reads all of every other's; beyond, each adds up its share. As others found it on
machines with NVLink; not measured here."""
ONE_SHOT_OF_MANY_BYTES = 256 << 10
VECTOR_BYTES = 16
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_COUNT, _LEFT, _FAILED, _LIMIT = range(4)
"""Words of `state` as rank_exchange.cu has them."""
_GIVE_UP, _MISSED = range(2)


class ExchangeKernels:
    def __init__(self, size: int) -> None:
        module = Module(text("rank_exchange"), exchange_macros(size))
        kinds = _NAMES.values()
        self.sums = {
            (shots, kind): module.kernel(f"{shots}_shot_{kind}", threads=THREADS)
            for shots in ("one", "two")
            for kind in kinds
        }
        self.gather = {unit: module.kernel(f"gather_{unit}", threads=THREADS) for unit in (1, 2, 4, 8, 16)}
        self.broadcast = {unit: module.kernel(f"broadcast_{unit}", threads=THREADS) for unit in (1, 2, 4, 8, 16)}
        self.put = {element: module.kernel(f"put_{element}", threads=THREADS) for element in (2, 4)}
        self.take = {element: module.kernel(f"take_{element}", threads=THREADS) for element in (2, 4)}


def exchange_macros(size: int) -> dict[str, int]:
    return {"RANKS": size, "BLOCKS": EXCHANGE_BLOCKS, "WIDE": THREADS}


@cache
def exchange_kernels(size: int, device: int) -> ExchangeKernels:
    with torch.cuda.device(device):
        return ExchangeKernels(size)


def exchange_grid(items: int) -> tuple[int, int, int]:
    """The same on all ranks, because it goes by sizes alone."""
    return max(1, min(EXCHANGE_BLOCKS, -(-items // THREADS))), 1, 1


class ExchangeCollectives:
    """`memory`: this rank's. `places`: where the memory of each rank lies, as `open_peers` found them. `limit_s`: that
    another rank may let this one wait; 0: for ever."""

    name = "CUDA IPC"

    def __init__(
        self, memory: PeerMemory, places: Sequence[int], rank: int, slot_bytes: int, *, limit_s: float = 0.0
    ) -> None:
        device = memory.device
        self.rank, self.size, self.slot_bytes = rank, len(places), slot_bytes
        assert slot_bytes % VECTOR_BYTES == 0
        assert memory.nbytes >= exchange_memory_bytes(slot_bytes)
        self._memory, self._kernels = memory, exchange_kernels(len(places), device.index or 0)
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._state = torch.zeros(4, dtype=torch.int32, device=device)
        self._told = torch.zeros(16, dtype=torch.int32, device="cpu", pin_memory=True)
        self._limit_s, self._widths = 0.0, dict[tuple[int, ...], torch.Tensor]()
        self.limit(limit_s)

    def limit(self, limit_s: float) -> None:
        """From what is launched next on. 0: for ever."""
        self._limit_s = limit_s
        self._state[_LIMIT] = min(int(limit_s * 1000), (1 << 31) - 1)

    def all_reduce(self, x: torch.Tensor, *, two_shot: bool | None = None) -> None:
        """`two_shot`: whether each rank adds up its share alone; None: by the size."""
        self._sum(x, None, two_shot)

    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor, *, two_shot: bool | None = None) -> None:
        """onto += the sum of all ranks' x, rounded before. Both contiguous; x means nothing afterwards."""
        self._sum(x, onto, two_shot)

    def _sum(self, x: torch.Tensor, onto: torch.Tensor | None, two_shot: bool | None) -> None:
        assert x.is_contiguous()
        assert onto is None or (onto.is_contiguous() and onto.shape == x.shape)
        flat, target = x.view(-1), None if onto is None else onto.view(-1)
        each, kind = self.slot_bytes // x.element_size(), _NAMES[x.dtype]
        for first in range(0, flat.numel(), each):
            part = flat[first : first + each]
            many = self._in_two(part.nbytes) if two_shot is None else two_shot
            self._kernels.sums["two" if many else "one", kind](
                exchange_grid(-(-part.nbytes // VECTOR_BYTES)), self._places, self._state, self._told, part,
                None if target is None else target[first : first + each], part.numel(), self.rank, self.slot_bytes,
            )  # fmt: skip

    def _in_two(self, nbytes: int) -> bool:
        return nbytes > ONE_SHOT_BYTES.get(self.size, ONE_SHOT_OF_MANY_BYTES)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        assert part.is_contiguous()
        assert part.shape[1] == widths[self.rank]
        assert out is None or (out.is_contiguous() and out.shape == (len(part), sum(widths)))
        element = part.element_size()
        # By what all ranks know: a block has to touch the same places on each of them.
        unit = gcd(VECTOR_BYTES, *(width * element for width in widths))
        kernel, in_units = self._kernels.gather[unit], self._width_units(tuple(widths), element, unit)
        rows = max(1, self.slot_bytes // (max(widths) * element))
        assert rows * max(widths) * element <= self.slot_bytes, "a slot holds a row of the widest part"
        for first in range(0, len(part), rows):
            piece = part[first : first + rows]
            most = len(piece) * max(widths) * element // unit
            target = None if out is None else out[first : first + rows]
            kernel(
                exchange_grid(most), self._places, self._state, self._told, piece, target, in_units, len(piece),
                self.rank, self.slot_bytes,
            )  # fmt: skip

    def _width_units(self, widths: tuple[int, ...], element: int, unit: int) -> torch.Tensor:
        found = tuple(width * element // unit for width in widths)
        if found not in self._widths:  # Not while a graph is captured: the first step of its kind is not.
            self._widths[found] = torch.tensor(found, dtype=torch.int32, device=self._places.device)
        return self._widths[found]

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        flat = x.view(-1).view(torch.uint8)
        for first in range(0, len(flat), self.slot_bytes):
            piece = flat[first : first + self.slot_bytes]
            # By the element and the length, which are the same everywhere; addresses are whole elements.
            unit = x.element_size()
            self._kernels.broadcast[unit](
                exchange_grid(len(piece) // unit), self._places, self._state, self._told, piece, len(piece) // unit,
                self.rank, self.slot_bytes,
            )  # fmt: skip

    def check(self) -> None:
        """Raises where another rank did not come: nothing that was computed since means anything."""
        told = self._told.tolist()
        if told[_MISSED]:
            raise EngineHungError(
                f"rank {told[_MISSED] - 1} has not come to where rank {self.rank} waits for it on the GPU",
                needed=f"within {format_duration(self._limit_s)}",
                found="nothing of it in its memory",
            )
        if told[_GIVE_UP]:
            raise EngineError("the ranks of this engine do not wait for one another any more: one of them has ended")

    def give_up(self) -> None:
        """From any thread: whatever waits on the GPU, now or later, does not wait any longer."""
        self._told[_GIVE_UP] = 1

    def close(self) -> None:
        torch.cuda.synchronize(self._memory.device)
        self._memory.close()
