"""An open checkpoint: reads one tensor's bytes at a time, and holds its tensors against a ModelSpec.

Knows nothing of what the bytes mean beyond their layout's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Literal

from holdfast.checkpoints.bounded_files import open_file
from holdfast.checkpoints.files import ModelFiles, StoredTensor
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.checkpoints.formats.quantized_tensors import PART_NAMES, SCALE_PARTS, STACKED_PARTS
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, TensorSpec

if TYPE_CHECKING:
    import numpy.typing

_READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB a call."""


class Checkpoint:
    """Files are opened at the first read and closed by `close` or at the end of a `with`.

    The peak of reading is the one tensor that `read` returns; nothing is cached or mapped. Threads may read at the same
    time.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], format: Literal["safetensors", "gguf"]) -> None:
        self.tensors = tensors
        self.format: Literal["safetensors", "gguf"] = format
        self._files: dict[Path, BinaryIO] = {}
        self._opening = Lock()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str, *, part: int = 0, parts: int = 1) -> numpy.typing.NDArray[numpy.uint8]:
        """The stored bytes, flat, in fresh memory that the caller may write to and owns: all of them, or one of several
        equal parts (an expert of a stack)."""
        import numpy  # Only here: those who count bytes do without.

        wanted = self._tensor(name).nbytes // parts
        target = numpy.empty(wanted, dtype=numpy.uint8)
        self._read_at(name, part * wanted, target.data)
        return target

    def read_into(self, name: str, target: numpy.typing.NDArray[numpy.uint8]) -> None:
        """All stored bytes, to where they are kept: flat, and as long as they are."""
        assert target.nbytes == self._tensor(name).nbytes, "the bytes of the tensor, no more and no fewer"
        self._read_at(name, 0, target.data)

    def read_range(self, name: str, start: int, target: memoryview) -> None:
        """What the tensor has from `start` on, as many bytes as `target` has."""
        assert start + target.nbytes <= self._tensor(name).nbytes, "within the tensor"
        self._read_at(name, start, target)

    def _tensor(self, name: str) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}", needed=name)
        return tensor

    def _read_at(self, name: str, start: int, view: memoryview) -> None:
        """Fills `view` with what the tensor has from `start` on."""
        tensor = self._tensor(name)
        offset, wanted, done = tensor.offset + start, view.nbytes, 0
        try:
            descriptor = self._descriptor(tensor.path)
            while done < wanted:
                count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{tensor.path}: the file is truncated: it ends within tensor {name!r}",
                        needed=f"{wanted} bytes at {offset}",
                        found=f"{done} bytes",
                        fix="download the file again",
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{tensor.path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, path: Path) -> int:
        with self._opening:
            if path not in self._files:
                self._files[path] = open_file(path)
            return self._files[path].fileno()


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Of remote files too: their tensors can be counted and matched, and none can be read."""
    if files.format == "gguf":
        header = files.header or gguf.read_header(files.weights[0])
        return Checkpoint(header.tensors, "gguf")
    if files.format == "safetensors":
        tensors = files.tensors if files.tensors is not None else safetensors.read_headers(files.weights)
        return Checkpoint(tensors, "safetensors")
    raise CheckpointError(
        f"{files.path}: no weights here",
        needed="*.safetensors or one .gguf",
        fix="give a folder with weights, or load_format=dummy for random ones",
    )


def extra_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the checkpoint holds beyond the spec, by its own names."""
    known = {stored_name(tensor, checkpoint) for tensor in spec.tensors}
    modules: set[str] = set()
    if checkpoint.format == "safetensors":
        known |= {name for tensor in spec.tensors if tensor.experts for name, _ in tensor.in_safetensors()}
        if spec.quantization is not None:
            modules = {name.removesuffix(".weight") for name in known if name.endswith(".weight")}
            stacked = [tensor.hf_name for tensor in spec.tensors if tensor.experts and tensor.hf_name]
            known |= {name + part for name in stacked for part in STACKED_PARTS}
    return tuple(
        name for name in checkpoint.tensors if name not in known and not _is_part(name, modules, checkpoint.tensors)
    )


def _is_part(name: str, modules: Set[str], stored: Mapping[str, StoredTensor]) -> bool:
    """Whether it is one of the tensors that a quantizer spread a matrix of these modules over, or a bias beside them:
    GPTQ's tools write one to every matrix, and loading refuses one that is not zero."""
    found = PART_NAMES.match(name)
    if found is not None:
        return found[1] in modules
    module = name.removesuffix(".bias")
    return module != name and module in modules and any(f"{module}.{part}" in stored for part in SCALE_PARTS)


def stored_name(tensor: TensorSpec, checkpoint: Checkpoint) -> str:
    return tensor.gguf_name if checkpoint.format == "gguf" else tensor.hf_name


def piece_of(stored: StoredTensor, tensor: TensorSpec) -> StoredTensor:
    """The stored tensor as if the file had one rank's part alone: its shape and its bytes. As it is where that is all
    of it."""
    if tensor.piece is None:
        return stored
    share, whole = stored.nbytes * tensor.elements, prod(tensor.piece.whole)
    if share % whole and stored.packed is None:
        raise CheckpointError(f"{stored.name} is not cut at its blocks", found=str(list(tensor.shape)))
    return replace(stored, shape=tensor.shape, nbytes=share // whole)
