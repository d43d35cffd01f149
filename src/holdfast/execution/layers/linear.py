"""Products with a weight matrix, one method a way of storing it. Knows nothing of what the matrix is for.

Every method can write x·Wᵀ (+ bias) into a buffer, or add it to one: the residual stream takes its sums that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from holdfast.execution.layers.rounding import input_scales, rounded_inputs
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models.spec import ShardPiece

TILE_BYTES = 2 << 20
"""Of the float tile a quantized product expands at a time: small enough to be still in cache when it is used."""

WholeRows = Callable[[torch.Tensor, ShardPiece], torch.Tensor]
"""Of one rank's part [rows, columns] of rows, which the piece says, [rows, all columns]."""


class Linear(Protocol):
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""

    @property
    def nbytes(self) -> int: ...

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x·Wᵀ + bias."""

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x·Wᵀ + bias."""


class DenseLinear:
    """The matrix as it is multiplied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.rows, self.columns = weight.shape
        self._turned = weight.t()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self._turned, out=out)
        else:
            torch.addmm(self.bias, x, self._turned, out=out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.addmm_(x, self._turned)
        if self.bias is not None:
            out += self.bias

    def select(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.weight, 0, rows, out=out)


class PackedLinear:
    """The matrix reordered once by oneDNN into the form its products read; only useful where those are in hardware."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.rows, self.columns = weight.shape
        self.bias = bias
        self._bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    @property
    def nbytes(self) -> int:
        return self._bytes + (0 if self.bias is None else self.bias.nbytes)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._product(x))

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out += self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


class QuantizedLinear:
    """A quantized matrix, expanded tile by tile into one cache-sized buffer and multiplied from there."""

    def __init__(
        self, matrix: QuantizedMatrix | ScaledMatrix, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self.matrix, self.bias, self._dtype = matrix, bias, dtype
        self.rows, self.columns = matrix.rows, matrix.columns
        self._tile_rows = min(self.rows, max(1, TILE_BYTES // (self.columns * 4)))

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        self.add(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        rounded = quantized_inputs(x, self.matrix)
        tile = torch.empty((self._tile_rows, self.columns), dtype=rounded.dtype, device=x.device)
        for first in range(0, self.rows, self._tile_rows):
            last = min(first + self._tile_rows, self.rows)
            weight = tile[: last - first]
            self.matrix.dequantize(first, last, weight)
            if rounded.dtype == out.dtype:
                out[:, first:last].addmm_(rounded, weight.t())
            else:
                out[:, first:last] += torch.mm(rounded, weight.t())
        if self.bias is not None:
            out += self.bias

    def select(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self.matrix.dequantize_some(rows, out)


def quantized_inputs(x: torch.Tensor, matrix: QuantizedMatrix | ScaledMatrix) -> torch.Tensor:
    """What a quantized matrix is multiplied with: x itself, or x rounded as its format says, in float32."""
    if isinstance(matrix, QuantizedMatrix) or matrix.layout.inputs == "plain":
        return x
    return rounded_inputs(x, matrix.layout, matrix.inputs)


class DividedLinear:
    """One rank's columns of a matrix whose inputs are rounded with one scale for all of a row. `base`: takes inputs
    that are divided by it; without the bias, which is not. `largest`: of each row [rows, columns] the largest size that
    any rank has, float32 [rows, 1]; None: its ranks are not known yet."""

    def __init__(
        self,
        base: Linear,
        layout: ScaledLayout,
        bias: torch.Tensor | None,
        largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.base, self.layout, self.bias, self._largest = base, layout, bias, largest
        self.rows, self.columns = base.rows, base.columns

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def among(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> DividedLinear:
        return DividedLinear(self.base, self.layout, self.bias, largest)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert self._largest is not None, "of a rank that is among others"
        scales = input_scales(self._largest(x), self.layout)
        self.base.write(x / scales, out)
        out.mul_(scales)
        if self.bias is not None:
            out += self.bias

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        product = torch.empty_like(out)
        self.write(x, product)
        out += product


class GatheredLinear:
    """One rank's columns of a matrix whose columns have an order of their own: they take inputs that lie anywhere in a
    row. `base`: takes them in that order. `order`: which of the whole row they are. `piece`: which of it this rank is
    given. `whole_rows`: makes of that all of each row; None: its ranks are not known yet."""

    def __init__(
        self, base: Linear, order: torch.Tensor, piece: ShardPiece, whole_rows: WholeRows | None = None
    ) -> None:
        self.base, self.order, self.piece, self._whole_rows = base, order, piece, whole_rows
        self.rows, self.columns = base.rows, base.columns

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.order.nbytes

    def among(self, whole_rows: WholeRows) -> GatheredLinear:
        return GatheredLinear(self.base, self.order, self.piece, whole_rows)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.write(self._inputs(x), out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.add(self._inputs(x), out)

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        assert self._whole_rows is not None, "of a rank that is among others"
        return self._whole_rows(x, self.piece).index_select(1, self.order)


def scaled_linear(
    matrix: ScaledMatrix, dtype: torch.dtype, bias: torch.Tensor | None, piece: ShardPiece | None, *, compiled: bool
) -> Linear:
    """Products with a matrix of codes, which is not to be used any more. `piece`: what a rank has of it. `compiled`: by
    compiled kernels, where they read it."""
    layout = matrix.layout
    order = matrix.take_order() if layout.gathered_inputs else None
    own = None if layout.divided_inputs else bias
    by_kernels = compiled and layout.compiles(matrix.columns)
    made: Linear = matrix.compiled(own) if by_kernels else QuantizedLinear(matrix, dtype, own)
    if layout.divided_inputs:
        return DividedLinear(made, layout, bias)
    if order is None:
        return made
    assert piece is not None, "of a rank's columns"
    return GatheredLinear(made, order, piece)


class StackedLinear:
    """Matrices over the same input whose outputs stand side by side, each stored in its own way."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.rows, self.columns = sum(part.rows for part in parts), parts[0].columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for part in self.parts:
            part.write(x, out[:, first : first + part.rows])
            first += part.rows

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for part in self.parts:
            part.add(x, out[:, first : first + part.rows])
            first += part.rows
