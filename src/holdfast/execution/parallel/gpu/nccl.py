"""Collectives of ranks on GPUs of their own by NCCL: any size, any link between them. torch brings it.

Sums come together in NCCL's order, rounded at each rank in the type of the numbers; all ranks have the same bits. The
process group is this object's own: the program that the engine runs in may have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed

from holdfast.errors import EngineError
from holdfast.execution.parallel.sockets.gloo import LONGEST_S


def nccl_available() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


class NcclCollectives:
    """`store`: where ranks find one another. `limit_s`: for the others; 0: as long as NCCL allows."""

    name = "NCCL"

    def __init__(
        self, store: torch.distributed.Store, rank: int, size: int, device: torch.device, *, limit_s: float = 0.0
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit_s or LONGEST_S)
        try:
            with torch.cuda.device(device):
                self._group = torch.distributed.ProcessGroupNCCL(store, rank, size, options)
                # The first one sets up what a capture may not, and shows that all ranks are there.
                self._group.allreduce([torch.zeros(1, device=device)]).wait()
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise EngineError(
                f"rank {rank} has not found all {size} ranks by NCCL", found=said, fix="NCCL_DEBUG=INFO says more"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()  # By the stream, not by the host.

    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        """onto += the sum of all ranks' x, which means nothing afterwards."""
        self.all_reduce(x)
        onto.add_(x)

    def gather(self, part: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None) -> None:
        # It wants equal parts: all are as wide as the widest.
        padded = part
        if part.shape[1] < max(widths):
            padded = part.new_zeros((len(part), max(widths)))
            padded[:, : part.shape[1]] = part
        parts = [[torch.empty_like(padded) for _ in widths]] if out is not None else []
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather(parts, [padded], options).wait()
        if out is not None:
            torch.cat([one[:, :width] for one, width in zip(parts[0], widths, strict=True)], dim=1, out=out)

    def broadcast(self, x: torch.Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()

    def limit(self, limit_s: float) -> None:
        """NCCL's is set when it begins."""

    def check(self) -> None:
        """torch's own watch ends a process whose rank does not come."""

    def give_up(self) -> None:
        """From any thread. What waits on the GPU ends."""
        self._group.abort()

    def close(self) -> None:
        self._group.abort()
