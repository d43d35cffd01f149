"""An open checkpoint: reads one tensor's bytes at a time, and holds its tensors against a ModelSpec.

Knows nothing of what the bytes mean beyond their layout's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Literal

from holdfast.checkpoints.bounded_files import open_file
from holdfast.checkpoints.files import ModelFiles, StoredTensor
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.checkpoints.formats.block_layouts import ENGINE_LAYOUTS
from holdfast.checkpoints.validation.tensor_shapes import require_no_more
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, TensorSpec

if TYPE_CHECKING:
    import numpy.typing

_READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB a call."""


class Checkpoint:
    """Files are opened at the first read and closed by `close` or at the end of a `with`.

    The peak of reading is the one tensor that `read` returns; nothing is cached or mapped.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], format: Literal["safetensors", "gguf"]) -> None:
        self.tensors = tensors
        self.format: Literal["safetensors", "gguf"] = format
        self._files: dict[Path, BinaryIO] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str, *, part: int = 0, parts: int = 1) -> numpy.typing.NDArray[numpy.uint8]:
        """The stored bytes, flat, in fresh memory that the caller may write to and owns: all of them, or one of several
        equal parts (an expert of a stack)."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}", needed=name)
        import numpy  # Only here: those who count bytes do without.

        wanted = tensor.nbytes // parts
        offset = tensor.offset + part * wanted
        target = numpy.empty(wanted, dtype=numpy.uint8)
        view = target.data
        done = 0
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
        return target

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


def match(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The stored tensor of every canonical name; optional ones may be missing from the result.

    Raises CheckpointError when a tensor is missing, of another shape, or stored as the engine cannot read, and when
    there are more layers than the spec has.
    """
    require_no_more(spec, checkpoint)
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for tensor in spec.tensors:
        stored, lacking = _find(tensor, spec, checkpoint)
        if stored is not None:
            found[tensor.name] = stored
        elif not tensor.optional:
            missing.append(lacking)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the {len(spec.tensors)} tensors that its config requires",
            needed=", ".join(missing[:3]) + more,
            found=f"{len(checkpoint.tensors)} tensors, such as " + ", ".join(list(checkpoint.tensors)[:3]),
            fix="download the model again; if it still fails, its config.json belongs to another model",
        )
    return found


def extra_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the checkpoint holds beyond the spec, by its own names."""
    known = {stored_name(tensor, checkpoint) for tensor in spec.tensors}
    if checkpoint.format == "safetensors":
        known |= {name for tensor in spec.tensors if tensor.experts for name, _ in tensor.in_safetensors()}
    return tuple(name for name in checkpoint.tensors if name not in known)


def _find(tensor: TensorSpec, spec: ModelSpec, checkpoint: Checkpoint) -> tuple[StoredTensor | None, str]:
    """The stored tensor, or the name under which there is none. Experts that lie one by one are told as one stack,
    under the name they have in common."""
    name = stored_name(tensor, checkpoint)
    if "{expert}" not in name:
        stored = checkpoint.tensors.get(name)
        if stored is not None:
            _check(tensor.shape, tensor, stored, spec)
        return stored, name
    parts: list[StoredTensor] = []
    for one, shape in tensor.in_safetensors():
        stored = checkpoint.tensors.get(one)
        if stored is None:
            return None, one
        _check(shape, tensor, stored, spec)
        parts.append(stored)
    first = parts[0]
    other = next((part for part in parts if part.layout != first.layout), None)
    if other is not None:
        raise CheckpointError(
            f"the experts of {tensor.name} have different tensor types",
            needed=f"{first.layout}, as {first.name}",
            found=f"{other.layout}: {other.name}",
        )
    total = sum(part.nbytes for part in parts)
    return StoredTensor(name, tensor.shape, first.layout, first.path, first.offset, total), name


def stored_name(tensor: TensorSpec, checkpoint: Checkpoint) -> str:
    return tensor.gguf_name if checkpoint.format == "gguf" else tensor.hf_name


def _check(shape: tuple[int, ...], tensor: TensorSpec, stored: StoredTensor, spec: ModelSpec) -> None:
    # GGUF keeps a matrix of one row as a vector.
    if stored.shape != shape and (len(shape) == 1 or stored.shape != tuple(size for size in shape if size != 1)):
        raise CheckpointError(
            f"the shape of tensor {stored.name!r} ({tensor.name}) does not match the config of {spec.architecture}",
            needed=str(list(shape)),
            found=f"{list(stored.shape)} in {stored.path.name}",
        )
    if stored.layout not in ENGINE_LAYOUTS:
        raise CheckpointError(
            f"tensor {stored.name!r} is stored as {stored.layout}, which this engine does not support",
            needed="one of " + ", ".join(sorted(ENGINE_LAYOUTS)),
            found=stored.layout,
            fix="use another file of this model, such as Q8_0, Q4_1 or BF16",
        )
