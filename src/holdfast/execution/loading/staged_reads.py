"""Tensors of a checkpoint on their way to a GPU, ahead of need: threads read pieces of files into pinned buffers, from
which they are copied while others are read.

    files     ══ t0 ═══ t1 ══ t2 ═ ...      in the order in which they will be asked for, piece by piece
    buffers   [t0.0][t0.1][t1.0][t2.0]       each is filled again when its copy is over
    GPU       t0 ◄── copied in the order in which they are asked for

Read by one thread into new pages and copied from there, a tensor came at a third of what the disk's cache gives. What
is asked for in another order, or was not foreseen, is read then. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.files import StoredTensor
from holdfast.errors import EngineError
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.hardware import processor
from holdfast.models import ModelSpec, TensorSpec

log = logging.getLogger("holdfast")

PIECE_BYTES = 16 << 20
BUFFERS, MOST_READERS = 16, 8
WORTH_BYTES = 1 << 20
"""Smaller tensors are read when they are asked for."""
IN_ORDER = {name: at for at, name in enumerate(("qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down"))}
"""Of a layer's matrices: which is loaded when."""
PASSED_OVER = 16
"""Tensors that were foreseen so far before one that is asked for are not waited for any longer: nobody wants them."""


def expected_names(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> list[str]:
    """The checkpoint's names of what is read whole, in the order in which a model is loaded. `stored`: by canonical
    name."""

    def turn(at: int, tensor: TensorSpec) -> tuple[int, int, int]:
        if tensor.layer is None:
            return -1 if tensor.name == "embed" else len(spec.layers), 0, at
        return tensor.layer, IN_ORDER.get(tensor.name.rpartition(".")[2], -1), at

    known = [(at, one) for at, one in enumerate(spec.tensors) if one.name in stored and not one.experts]
    read_whole = [(at, one) for at, one in known if one.piece is None or stored[one.name].packed is not None]
    found = [stored[tensor.name] for _, tensor in sorted(read_whole, key=lambda one: turn(*one))]
    return [part.name for one in found for part in ([one] if one.packed is None else one.packed.parts.values())]


def staged_reads(checkpoint: Checkpoint, names: Sequence[str], device: torch.device) -> StagedReads | None:
    """Of these, in the order in which they will be asked for, those that are worth it; None: none is, as on a CPU,
    where bytes are read to where they stay."""
    worth = [name for name in names if checkpoint.tensors[name].nbytes >= WORTH_BYTES]
    pieces = sum(-(-checkpoint.tensors[name].nbytes // PIECE_BYTES) for name in worth)
    if not worth or device.type != "cuda":
        return None
    try:
        buffers = PinnedMemory([PIECE_BYTES] * min(BUFFERS, pieces), device)
    except EngineError as error:  # It is only slower.
        log.warning("tensors are read one after the other: %s (%s)", error.message, error.found)
        return None
    return StagedReads(checkpoint, worth, buffers, device)


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    copied: torch.cuda.Event | None
    """Passed when what was in it is on the GPU."""


@dataclass(slots=True)
class _Coming:
    """A tensor that is being read, or was."""

    name: str
    at: int
    """In the order that was foreseen."""
    nbytes: int
    asked_bytes: int = 0
    pieces: deque[tuple[int, _Buffer, Future[None]]] = field(default_factory=deque)
    """(first byte, where to, when), in order."""


class StagedReads:
    """`names`: of the checkpoint, in the order in which they will be asked for. `buffers`: pieces of equal size, closed
    with this. For one thread."""

    def __init__(
        self, checkpoint: Checkpoint, names: Sequence[str], buffers: PinnedMemory, device: torch.device
    ) -> None:
        self._checkpoint, self._memory, self._device = checkpoint, buffers, device
        on_gpu = device.type == "cuda"
        self._free = deque(_Buffer(piece, torch.cuda.Event() if on_gpu else None) for piece in buffers.pieces)
        """The one that was copied from first comes first."""
        self._piece_bytes = buffers.pieces[0].nbytes
        self._later = deque(
            _Coming(name, at, checkpoint.tensors[name].nbytes) for at, name in enumerate(dict.fromkeys(names))
        )
        self._coming: dict[str, _Coming] = {}
        self._foreseen = set(names)
        self._readers = ThreadPoolExecutor(min(MOST_READERS, len(buffers.pieces), processor().cores), "staged-reader")
        self._go_on()

    def bring(self, name: str) -> torch.Tensor:
        """All its bytes, on the device: what is launched from now on finds them there."""
        made = torch.empty(self._checkpoint.tensors[name].nbytes, dtype=torch.uint8, device=self._device)
        for first, piece in self.pieces(name):
            made[first : first + len(piece)].copy_(piece, non_blocking=True)
        return made

    def fill(self, name: str, kind: torch.dtype, numbers: torch.Tensor) -> None:
        """Its numbers, of this kind, in order as they come, without a place for all of its bytes on the device."""
        for first, piece in self.pieces(name):
            part = piece.view(kind)
            numbers[first // kind.itemsize :][: len(part)].copy_(part, non_blocking=True)

    def foreseen(self, name: str) -> bool:
        """Whether it is read ahead, and was not taken yet."""
        return name in self._foreseen

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte, bytes in the host's memory) of one that is foreseen, in order. Each may be used until the next
        is asked for, by what was launched until then too."""
        coming = self._begin(name)
        while coming.pieces or coming.asked_bytes < coming.nbytes:
            if not coming.pieces:
                self._make_way(coming)
                self._ask(coming, waiting=True)
            first, buffer, read = coming.pieces[0]
            read.result()
            yield first, buffer.memory[: min(self._piece_bytes, coming.nbytes - first)]
            coming.pieces.popleft()
            self._release(buffer)
            self._go_on()
        del self._coming[name]
        self._foreseen.discard(name)

    def _begin(self, name: str) -> _Coming:
        coming = self._coming.get(name)
        if coming is None:
            coming = next(one for one in self._later if one.name == name)
            self._later.remove(coming)
            self._coming[name] = coming
        for other in list(self._coming.values()):
            if other.at < coming.at - PASSED_OVER:
                self._drop(other)
        return coming

    def _make_way(self, coming: _Coming) -> None:
        """A buffer for it: what comes last gives one up."""
        while not self._free:
            self._drop(max((one for one in self._coming.values() if one is not coming), key=lambda one: one.at))

    def _drop(self, coming: _Coming) -> None:
        """It is not foreseen any more."""
        del self._coming[coming.name]
        self._foreseen.discard(coming.name)
        for _, buffer, read in coming.pieces:
            read.exception()  # Its thread may still write there.
            self._free.appendleft(buffer)  # Nobody copies from it.

    def _go_on(self) -> None:
        """Begins to read as many pieces as there are buffers that nobody copies from."""
        for coming in self._coming.values():
            while coming.asked_bytes < coming.nbytes:
                if not self._ask(coming):
                    return
        while self._later and self._ask(self._later[0]):
            coming = self._later.popleft()
            self._coming[coming.name] = coming
            while coming.asked_bytes < coming.nbytes:
                if not self._ask(coming):
                    return

    def _ask(self, coming: _Coming, *, waiting: bool = False) -> bool:
        """Begins to read its next piece, where there is a buffer for it."""
        if not self._free:
            return False
        buffer = self._free[0]
        if buffer.copied is not None and not buffer.copied.query():
            if not waiting:
                return False
            buffer.copied.synchronize()
        self._free.popleft()
        first = coming.asked_bytes
        size = min(self._piece_bytes, coming.nbytes - first)
        view = buffer.memory[:size].numpy().data
        read = self._readers.submit(self._checkpoint.read_range, coming.name, first, view)
        coming.asked_bytes = first + size
        coming.pieces.append((first, buffer, read))
        return True

    def _release(self, buffer: _Buffer) -> None:
        if buffer.copied is not None:
            buffer.copied.record(torch.cuda.current_stream(self._device))
        self._free.append(buffer)

    def close(self) -> None:
        """When this returns nothing is read, and nothing is copied from the buffers."""
        self._readers.shutdown(cancel_futures=True)
        self._coming.clear()
        self._later.clear()
        self._free.clear()
        self._memory.close()
