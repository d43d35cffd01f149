"""What one rank has of a stored tensor: its rows read as ranges of the file, its columns cut out of rows a tile at a
time. Knows bytes and where blocks end; expands nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import numpy.typing
import torch

from holdfast.checkpoints import LAYOUTS
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.errors import CheckpointError
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import PIECE
from holdfast.models import TensorSpec

TILE_BYTES = 4 << 20
"""Of rows that columns are cut out of."""
Bytes = numpy.typing.NDArray[numpy.uint8]


def read_piece(checkpoint: Checkpoint, name: str, tensor: TensorSpec, expert: int | None = None) -> torch.Tensor:
    """This rank's bytes of `name`, flat. `expert`: of a stack, one expert's; where each expert lies under a name of its
    own, `name` is that one's and there is nothing to skip."""
    piece = tensor.cut
    assert piece is not None
    stored = checkpoint.tensors[name]
    *_, rows, columns = (1, *piece.whole) if len(piece.whole) == 1 else piece.whole
    block = LAYOUTS[stored.layout]
    row_bytes = columns // block.block_elements * block.block_bytes
    first_byte = expert * rows * row_bytes if expert is not None and len(stored.shape) == len(piece.whole) else 0
    if piece.axis == len(piece.whole) - 1:
        spans = [_bytes_of(one, block.block_elements, block.block_bytes, name) for one in piece.ranges]
        return torch.from_numpy(_columns(checkpoint, name, first_byte, rows, row_bytes, spans))
    sizes = [(last - first) * row_bytes for first, last in piece.ranges]
    target, begin = numpy.empty(sum(sizes), dtype=numpy.uint8), 0
    for (first, _), size in zip(piece.ranges, sizes, strict=True):
        checkpoint.read_range(name, first_byte + first * row_bytes, target[begin : begin + size].data)
        begin += size
    return torch.from_numpy(target)


def _bytes_of(numbers: tuple[int, int], elements: int, nbytes: int, name: str) -> tuple[int, int]:
    if any(number % elements for number in numbers):
        raise CheckpointError(f"{name} is not cut at its blocks", needed=f"multiples of {elements}", found=str(numbers))
    return numbers[0] // elements * nbytes, numbers[1] // elements * nbytes


def _columns(
    checkpoint: Checkpoint, name: str, first_byte: int, rows: int, row_bytes: int, spans: list[tuple[int, int]]
) -> Bytes:
    width = sum(last - first for first, last in spans)
    target = numpy.empty((rows, width), dtype=numpy.uint8)
    at_once = max(1, min(rows, TILE_BYTES // row_bytes))
    tile = numpy.empty((at_once, row_bytes), dtype=numpy.uint8)
    for first in range(0, rows, at_once):
        part = tile[: min(at_once, rows - first)]
        checkpoint.read_range(name, first_byte + first * row_bytes, part.reshape(-1).data)
        begin = 0
        for start, end in spans:
            target[first : first + len(part), begin : begin + end - start] = part[:, start:end]
            begin += end - start
    return target.reshape(-1)


def fill_piece(target: torch.Tensor, tensor: TensorSpec, fill: Callable[[torch.Tensor], None]) -> None:
    """`fill` makes all of a tensor, of which this rank's part is kept: of dummies, so that ranks have parts of the same
    numbers, and of quantized matrices that are expanded."""
    piece = tensor.cut
    if piece is None:
        fill(target)
        return
    shape = piece.whole if target.dim() == len(piece.whole) else piece.whole[1:]
    whole = torch.empty(shape, dtype=target.dtype, device=target.device)
    fill(whole)
    axis = piece.axis - len(piece.whole) + target.dim()
    torch.cat([whole.narrow(axis, first, last - first) for first, last in piece.ranges], axis, out=target)


def whole_of(tensor: TensorSpec) -> TensorSpec:
    """As the model has it, of which a rank may have a part."""
    if tensor.piece is None:
        return tensor
    whole = tensor.piece.whole
    return replace(tensor, shape=whole, experts=whole[0] if tensor.experts else 0, piece=None)


def fill_cut(matrix: ScaledMatrix, first: int, tensor: TensorSpec, fill: Callable[[ScaledMatrix, int], None]) -> None:
    """`fill` makes all rows of codes from the row on that it is told: for rows first, first+1, ... of `matrix`. Of a
    rank the whole for a moment, because formats have their own orders of codes, and scales of whole rows."""
    if tensor.cut is None:
        fill(matrix, first)
        return
    rows, columns = tensor.cut.whole[-2:]
    whole = ScaledMatrix(matrix.layout, rows, columns, matrix.codes.device)
    fill(whole, 0)
    cut_scaled(matrix, first, whole, tensor)


def cut_scaled(matrix: ScaledMatrix, first: int, whole: ScaledMatrix, tensor: TensorSpec) -> None:
    """This rank's part of `whole`, to rows first, first+1, ... of `matrix`: codes, the scales of their groups, and
    which inputs they take."""
    piece, layout = tensor.cut, matrix.layout
    assert piece is not None
    rows, columns = tensor.shape[-2:]
    by_rows = piece.axis == len(piece.whole) - 2
    high, wide = layout.group_rows, layout.group or whole.columns
    codes = (1, PIECE if layout.four_bits else 1)
    for name, (tall, broad) in (("codes", codes), ("scales", (high, wide)), ("zeros", (high, wide))):
        source, target = getattr(whole, name), getattr(matrix, name)
        if source is None:
            continue
        unit = tall if by_rows else broad
        if by_rows or broad < whole.columns:
            source = _joined(source, 0 if by_rows else 1, [(a // unit, -(-b // unit)) for a, b in piece.ranges])
        target[first // tall : first // tall + len(source)].copy_(source)
    if matrix.order is not None and whole.order is not None:
        # Ranges of columns are of those in their order, in whole groups; the inputs that they take may be any rank's.
        matrix.order.copy_(whole.order if by_rows else _joined(whole.order, 0, list(piece.ranges)))
    if matrix.inputs is not None and whole.inputs is not None:
        matrix.inputs.copy_(torch.maximum(matrix.inputs, whole.inputs))
    assert columns == matrix.columns, "the rank's own columns"
    assert first + rows <= matrix.rows, "and rows"


def _joined(plane: torch.Tensor, axis: int, ranges: list[tuple[int, int]]) -> torch.Tensor:
    bits = plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane  # cat has no kernel for it.
    return torch.cat([bits.narrow(axis, first, last - first) for first, last in ranges], axis).view(plane.dtype)
