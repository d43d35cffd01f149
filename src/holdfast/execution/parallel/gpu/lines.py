"""What a rank on a GPU hands on to a rank of the next stage and takes from one of the stage before, through GPU memory
that they map of one another (gpu/cuda/rank_exchange.cu), or through memory of the host where the other is on another
machine (node_lines.py). Fit for CUDA graphs: turns are counted on the GPU.

Nobody waits for whoever takes, but for what was handed on two turns before. Who these ranks are is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.errors import EngineError, EngineHungError
from holdfast.execution.parallel.gpu.exchange import exchange_grid, exchange_kernels
from holdfast.execution.parallel.gpu.node_lines import NodeLine
from holdfast.execution.parallel.gpu.peer_memory import PeerMemory
from holdfast.footprint.gpu import LINE_WORDS_BYTES, line_memory_bytes
from holdfast.units import format_duration

VECTOR_BYTES = 16
_LIMIT = 3
"""Word of `state`, as rank_exchange.cu has it."""
_GIVE_UP, _MISSED = range(2)


@dataclass(frozen=True, slots=True)
class LineTo:
    """One end of a line: the rank at the other, and what a slot of it holds."""

    rank: int
    slot_bytes: int
    node_line: NodeLine | None = None
    """To a rank of another machine; None: memory that both map."""


class ExchangeLines:
    """`memory`: this rank's, of which its words and slots begin `offset` bytes behind the first; None: no other rank
    maps it. `places`: where the memory of each rank lies; what others on other machines have is not asked for.
    `before`, `behind`: None: it takes nothing, or hands nothing on."""

    def __init__(
        self,
        device: torch.device,
        memory: PeerMemory | None,
        places: Sequence[int],
        rank: int,
        offset: int,
        before: LineTo | None,
        behind: LineTo | None,
        *,
        limit_s: float = 0.0,
    ) -> None:
        self._memory, self._rank, self._device = memory, rank, device
        self._kernels = exchange_kernels(2, device.index or 0)
        words = [place + offset for place in places]
        self._before, self._behind = before, behind
        self._put_state = torch.zeros(4, dtype=torch.int32, device=device)
        self._take_state = torch.zeros(4, dtype=torch.int32, device=device)
        self._told = torch.zeros(16, dtype=torch.int32, device="cpu", pin_memory=True)
        self._put_places = self._take_places = torch.zeros(4, dtype=torch.int64, device=device)
        if behind is not None and behind.node_line is None:
            assert memory is not None
            assert memory.nbytes >= offset + line_memory_bytes(behind.slot_bytes)
            self._put_places = _places(words[rank], words[behind.rank], words[rank], behind.slot_bytes, device)
        if before is not None and before.node_line is None:
            self._take_places = _places(words[rank], words[before.rank], words[before.rank], before.slot_bytes, device)
        if behind is not None and behind.node_line is not None:
            self._put_places = _places_of(behind.node_line, device)
        if before is not None and before.node_line is not None:
            self._take_places = _places_of(before.node_line, device)
        ends = (before, behind)
        self._node_lines = [end.node_line for end in ends if end is not None and end.node_line is not None]
        for line in self._node_lines:
            line.tell(self.give_up)
        self._limit_s = 0.0
        self.limit(limit_s)

    def put(self, numbers: torch.Tensor) -> None:
        """To the rank behind. Contiguous, of four bytes each or two; may be changed by what is launched next."""
        assert self._behind is not None
        assert numbers.is_contiguous()
        assert numbers.nbytes <= self._behind.slot_bytes, "a slot holds all that is handed on at a time"
        self._kernels.put[numbers.element_size()](
            exchange_grid(-(-numbers.nbytes // VECTOR_BYTES)), self._put_places, self._put_state, self._told, numbers,
            numbers.numel(), self._behind.rank,
        )  # fmt: skip

    def take(self, out: torch.Tensor) -> None:
        """What the rank before has handed on next, of the same shape and kind."""
        assert self._before is not None
        assert out.is_contiguous()
        assert out.nbytes <= self._before.slot_bytes
        self._kernels.take[out.element_size()](
            exchange_grid(-(-out.nbytes // VECTOR_BYTES)), self._take_places, self._take_state, self._told, out,
            out.numel(), self._before.rank,
        )  # fmt: skip

    def limit(self, limit_s: float) -> None:
        """How long another rank may let this one wait, from what is launched next on. 0: for ever."""
        self._limit_s = limit_s
        for state in (self._put_state, self._take_state):
            state[_LIMIT] = min(int(limit_s * 1000), (1 << 31) - 1)

    def check(self) -> None:
        """Raises where another rank did not come: nothing that was computed since means anything."""
        for line in self._node_lines:
            line.check()
        told = self._told.tolist()
        if told[_MISSED]:
            raise EngineHungError(
                f"rank {told[_MISSED] - 1} has not come to where rank {self._rank} waits for it on the GPU",
                needed=f"within {format_duration(self._limit_s)}",
                found="nothing of it in its memory",
            )
        if told[_GIVE_UP]:
            raise EngineError("the ranks of this engine do not wait for one another any more: one of them has ended")

    def give_up(self) -> None:
        """From any thread: whatever waits on the GPU, now or later, does not wait any longer."""
        self._told[_GIVE_UP] = 1

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        finally:  # Threads and sockets end also where the device has failed.
            for line in self._node_lines:
                line.close()
        if self._memory is not None:
            self._memory.close()


def _places_of(line: NodeLine, device: torch.device) -> torch.Tensor:
    return _places(line.device_place, line.device_place, line.device_place, line.slot_bytes, device)


def _places(own: int, other: int, sender: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """As the kernels take them: the words of both, and the slots of whoever hands on."""
    first = sender + LINE_WORDS_BYTES
    return torch.tensor([own, other, first, first + slot_bytes], dtype=torch.int64, device=device)
