"""Ranks on GPUs as processes on a machine without one: what they say to each other, load, measure and launch is theirs;
kernels run in Triton's interpreter, GPU memory that ranks map of one another is memory that they share of the host.

Run as a program it is a rank that is not the first, as engine/ranks/entry.py is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from node_line_ends import LineEnd
from simulated_copies import unpinned_memory

from holdfast.errors import EngineError
from holdfast.execution.parallel.gpu.lines import LineTo
from holdfast.execution.parallel.pipeline import PipelineStage
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.footprint.gpu import line_memory_bytes
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.units import GIB

CPU = torch.device("cpu")
HANDLE_BYTES, SLOT_BYTES = 64, 4096
RANKS, MOST_S = 2, 60.0
STAGED, LINE_BYTES = "FAKE_RANK_GPUS_STAGED", 1 << 16
"""Set: ranks are stages."""
NODES = "FAKE_RANK_GPUS_NODES"
"""Set: stages are on nodes of their own."""
FREE_BYTES, TOTAL_BYTES = 60 * GIB, 80 * GIB


def shared_layout() -> SegmentLayout:
    """Of two ranks of one stage, or of a stage each."""
    if STAGED not in os.environ:
        return SegmentLayout(RANKS, SLOT_BYTES)
    return SegmentLayout(RANKS, SLOT_BYTES, 2, LINE_BYTES, LINE_BYTES)


class SharedPeerMemory:
    """Rank 0's is what all of them map: a handle is where the system shows it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.segment = Segment(shared_layout())
        self.handle = f"/proc/{os.getpid()}/fd/{self.segment.descriptor}".encode().ljust(HANDLE_BYTES, b"\0")

    def open_peers(self, handles: Sequence[bytes], rank: int) -> list[int]:
        assert [len(handle) for handle in handles] == [HANDLE_BYTES] * RANKS
        assert handles[rank] == self.handle
        if rank:
            place = handles[0].rstrip(b"\0").decode()
            self.segment = Segment(self.segment.layout, os.open(place, os.O_RDWR))
        return [1000 + number for number in range(len(handles))]

    def close(self) -> None: ...


class SharedLines:
    """Between the two stages of CPU ranks, with all that ranks on GPUs ask for beside."""

    def __init__(
        self,
        device: torch.device,
        memory: SharedPeerMemory,
        places: Sequence[int],
        rank: int,
        offset: int,
        before: LineTo | None,
        behind: LineTo | None,
        *,
        limit_s: float,
    ) -> None:
        assert places == [1000, 1001]
        assert (offset, limit_s > 60) == (0, True), "no rank has others in its stage"
        assert before is not None
        assert behind is not None
        assert before.rank == behind.rank == 1 - rank
        assert memory.nbytes == line_memory_bytes(behind.slot_bytes)
        self._rank, self._before, self._behind, self._given_up = rank, before, behind, False
        self._stage = PipelineStage(memory.segment, rank, self._look)

    def put(self, numbers: torch.Tensor) -> None:
        assert numbers.is_contiguous()
        assert numbers.nbytes <= self._behind.slot_bytes
        (self._stage.show if self._rank else self._stage.hand_on)(numbers)

    def take(self, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        assert out.nbytes <= self._before.slot_bytes
        if self._rank:
            self._stage.take(out)
        else:
            self._stage.collect(out, [out.shape[1]])

    def _look(self, waited_s: float) -> None:
        if waited_s:
            self.check()
        assert waited_s < MOST_S, f"rank {self._rank} waits for ever"

    def limit(self, limit_s: float) -> None: ...

    def check(self) -> None:
        if self._given_up:
            raise EngineError("the ranks of this engine do not wait for one another any more: one of them has ended")

    def give_up(self) -> None:
        self._given_up = True

    def close(self) -> None: ...


class LinesBetweenNodes:
    """With the real ends of lines between nodes, and their sockets; what kernels do there is done here."""

    def __init__(
        self,
        device: torch.device,
        memory: SharedPeerMemory | None,
        places: Sequence[int],
        rank: int,
        offset: int,
        before: LineTo | None,
        behind: LineTo | None,
        *,
        limit_s: float,
    ) -> None:
        assert limit_s > 60
        self._rank, self._given_up, ends = rank, False, (before, behind)
        self._own: PipelineStage | None = None
        if any(end is not None and end.node_line is None for end in ends):  # Two stages on this node.
            assert memory is not None
            self._own = PipelineStage(memory.segment, rank % RANKS, self._look)
        self._lines = [end.node_line for end in ends if end is not None and end.node_line is not None]
        assert len(self._lines) + (self._own is not None) == sum(end is not None for end in ends)
        for line in self._lines:
            line.tell(self.give_up)
        self._before = None if before is None or before.node_line is None else LineEnd(before.node_line, self._look)
        self._behind = None if behind is None or behind.node_line is None else LineEnd(behind.node_line, self._look)

    def put(self, numbers: torch.Tensor) -> None:
        assert numbers.is_contiguous()
        if self._behind is not None:
            self._behind.put(numbers)
        else:
            assert self._own is not None
            self._own.hand_on(numbers)

    def take(self, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        if self._before is not None:
            self._before.take(out)
        else:
            assert self._own is not None
            self._own.take(out)

    def _look(self, waited_s: float) -> None:
        self.check()
        assert waited_s < MOST_S, f"rank {self._rank} waits for ever"

    def limit(self, limit_s: float) -> None: ...

    def check(self) -> None:
        for line in self._lines:
            line.check()
        if self._given_up:
            raise EngineError("the ranks of this engine do not wait for one another any more: one of them has ended")

    def give_up(self) -> None:
        self._given_up = True

    def close(self) -> None:
        for line in self._lines:
            line.close()


class SharedExchange:
    """Sums of CPU ranks, with all that ranks on GPUs ask for beside."""

    name = "CUDA IPC"

    def __init__(
        self, memory: SharedPeerMemory, places: Sequence[int], rank: int, slot_bytes: int, *, limit_s: float
    ) -> None:
        assert places == [1000, 1001]
        assert limit_s > 60
        self._own = SharedMemoryCollectives(memory.segment, rank, self._look)
        self._given_up, self.limit_s = False, limit_s
        self.rank, self.size = rank, len(places)
        self.all_reduce, self.gather, self.broadcast = self._own.all_reduce, self._own.gather, self._own.broadcast

    def add_reduced(self, x: torch.Tensor, onto: torch.Tensor) -> None:
        self.all_reduce(x)
        onto.add_(x)

    def _look(self, waited_s: float) -> None:
        if waited_s:
            self.check()
        assert waited_s < MOST_S, f"rank {self.rank} waits for ever"

    def limit(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def check(self) -> None:
        if self._given_up:
            raise EngineError("the ranks of this engine do not wait for one another any more: one of them has ended")

    def give_up(self) -> None:
        self._given_up = True

    def close(self) -> None: ...


def install(patch: pytest.MonkeyPatch) -> None:
    """In the process of every rank."""
    import quick_interpreter  # noqa: F401

    from holdfast.engine.ranks.gpu import rank
    from holdfast.execution.gpu.layers import linear
    from holdfast.execution.gpu.memory import accounting
    from holdfast.execution.triton_kernels.attention import decode

    splits = decode.decode_splits
    patch.setattr(linear, "SKINNY_ROWS", 0)
    patch.setattr(decode, "decode_splits", lambda *sizes, codes: min(4, splits(*sizes, codes=codes)))
    patch.setattr(rank, "open_device", lambda uuid: CPU)
    patch.setattr(rank, "PeerMemory", SharedPeerMemory)
    patch.setattr(rank, "ExchangeCollectives", SharedExchange)
    patch.setattr(rank, "ExchangeLines", LinesBetweenNodes if NODES in os.environ else SharedLines)
    patch.setattr(rank, "pinned_line", lambda size, device: unpinned_memory([line_memory_bytes(size)]))
    patch.setattr(accounting, "process_bytes", lambda uuid, pid: GIB)
    for name, answer in (("mem_get_info", (FREE_BYTES, TOTAL_BYTES)), ("synchronize", None), ("empty_cache", None),
                         ("reset_peak_memory_stats", None), ("memory_allocated", 0),
                         ("max_memory_allocated", 0)):  # fmt: skip
        patch.setattr(torch.cuda, name, lambda *_, told=answer: told)


def show_a_gpu(patch: pytest.MonkeyPatch) -> NvidiaGpu:
    """To whoever asks the driver what this machine has."""
    from holdfast.engine.ranks.nodes import report

    gpu = NvidiaGpu(
        index=0, uuid="GPU-0", name="fake", total_bytes=TOTAL_BYTES, free_bytes=FREE_BYTES, capability=(9, 0)
    )
    patch.setattr(report, "probe", lambda: NvidiaMachine(gpus=(gpu,)))
    return gpu


def start_ranks_here(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Other ranks are this file instead of entry.py."""
    from holdfast.engine.ranks import children

    program = folder / "rank"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join(one for one in sys.path if one)
    patch.setenv("PYTHONPATH", path)
    patch.setattr(children, "sys", SimpleNamespace(executable=str(program)))


def main() -> Any:
    from holdfast.engine.ranks import entry

    install(pytest.MonkeyPatch())
    sys.argv = [sys.argv[0], *sys.argv[-3:]]
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
