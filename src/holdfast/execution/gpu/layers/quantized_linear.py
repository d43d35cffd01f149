"""Products on a GPU with matrices that stay quantized, GGUF's blocks or codes with scales, and inputs as they are.

    to FEW_QUANTIZED_ROWS    one kernel: norm, product, gate or sum, decoded in registers
    to SKINNY_BLOCK_ROWS     the same without norm and gate, which are kernels of their own
    more                     expanded to a tile of rows at a time, which the second level cache holds, and cuBLAS

Knows nothing of what a matrix is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.quantized.block_products import block_gate_up, block_product
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes, dequantize_tile, embed_blocks
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_QUANTIZED_ROWS
from holdfast.execution.triton_kernels.quantized.scaled_products import scaled_gate_up, scaled_product
from holdfast.execution.triton_kernels.quantized.scaled_rows import embed_scaled, expand_scaled, gather_columns
from holdfast.execution.triton_kernels.quantized.split_sums import Workspace
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.gpu import EXPANDED_BYTES, SKINNY_BLOCK_ROWS, SPLIT_COUNTERS, SUMS_BYTES


class QuantizedWorkspace:
    """What all such products share, one after the other on one stream; allocated with the first matrix, before any
    step. The memory that rows are expanded to also has the sums of split products, and inputs put into another order:

        | rows of numbers, for many rows of inputs          |
        | sums of splits (SUMS_BYTES) | inputs in order     |     for few
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._memory: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None

    def _bytes(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(EXPANDED_BYTES, dtype=torch.uint8, device=self._device)
        return self._memory

    def expanded(self, columns: int) -> torch.Tensor:
        """Rows of a quantized matrix as numbers."""
        words = self._bytes().view(self._dtype)
        return words[: len(words) // columns * columns].view(-1, columns)

    def splits(self) -> Workspace:
        if self._counters is None:
            self._counters = torch.zeros(SPLIT_COUNTERS, dtype=torch.int32, device=self._device)
        return Workspace(self._bytes()[:SUMS_BYTES].view(torch.float32), self._counters)

    def ordered(self, rows: int, columns: int) -> torch.Tensor:
        """Inputs of few rows."""
        return self._bytes()[SUMS_BYTES:].view(self._dtype)[: rows * columns].view(rows, columns)


class _Blocks:
    """The kernels of GGUF's blocks."""

    order = None

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self.planes = BlockPlanes(
            matrix.layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small
        )
        self.kind: tuple[object, ...] = (matrix.layout, matrix.quants.shape)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: Workspace, bias: torch.Tensor | None, *,
        norm: torch.Tensor | None = None, epsilon: float = 0.0, add: bool = False,
    ) -> None:  # fmt: skip
        block_product(x, self.planes, out, workspace, bias=bias, norm_weight=norm, epsilon=epsilon, accumulate=add)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: Workspace, bias: torch.Tensor | None,
        norm: torch.Tensor, epsilon: float, activation: Activation,
    ) -> None:  # fmt: skip
        block_gate_up(
            x, self.planes, out, workspace, bias=bias, norm_weight=norm, epsilon=epsilon, activation=activation
        )

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        dequantize_tile(self.planes, first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        embed_blocks(tokens, slots, positions, self.planes, out)


class _Codes:
    """The kernels of codes with scales."""

    def __init__(self, matrix: ScaledMatrix) -> None:
        self._matrix, self.order = matrix, matrix.order
        self.kind: tuple[object, ...] = (matrix.layout, matrix.rows, matrix.columns)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: Workspace, bias: torch.Tensor | None, *,
        norm: torch.Tensor | None = None, epsilon: float = 0.0, add: bool = False,
    ) -> None:  # fmt: skip
        scaled_product(x, self._matrix, out, workspace, bias=bias, norm_weight=norm, epsilon=epsilon, accumulate=add)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: Workspace, bias: torch.Tensor | None,
        norm: torch.Tensor, epsilon: float, activation: Activation,
    ) -> None:  # fmt: skip
        scaled_gate_up(
            x, self._matrix, out, workspace, bias=bias, norm_weight=norm, epsilon=epsilon, activation=activation
        )

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        expand_scaled(self._matrix, first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        embed_scaled(tokens, slots, positions, self._matrix, out)


class QuantizedGpuLinear:
    def __init__(self, linear: QuantizedLinear, workspace: QuantizedWorkspace) -> None:
        matrix = linear.matrix
        self._form: _Blocks | _Codes = _Codes(matrix) if isinstance(matrix, ScaledMatrix) else _Blocks(matrix)
        self._rows, self.bias, self._workspace = matrix.rows, linear.bias, workspace
        self._tile, self._splits = workspace.expanded(matrix.columns), workspace.splits()

    @property
    def kind(self) -> tuple[object, ...]:
        return *self._form.kind, self.bias is None

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= SKINNY_BLOCK_ROWS:
            self._form.multiply(self._in_order(x), out, self._splits, self.bias)
            return
        for first, last, tile in self._tiles():
            torch.mm(x, tile.t(), out=out[:, first:last])
        if self.bias is not None:
            out += self.bias

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        if len(x) <= FEW_QUANTIZED_ROWS and self._form.order is None:
            self._form.multiply(x, out, self._splits, self.bias, norm=norm, epsilon=epsilon)
            return
        kernels.rms_norm(x, norm, epsilon, normed)
        self.write(normed, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= SKINNY_BLOCK_ROWS:
            self._form.multiply(self._in_order(x), out, self._splits, self.bias, add=True)
            return
        for first, last, tile in self._tiles():
            out[:, first:last].addmm_(x, tile.t())
        if self.bias is not None:
            out += self.bias

    def gated(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        activation: Activation,
        normed: torch.Tensor,
        gate_up: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if len(x) <= FEW_QUANTIZED_ROWS and self._form.order is None:
            self._form.gate_up(x, out, self._splits, self.bias, norm, epsilon, activation)
            return
        self.write_normed(x, norm, epsilon, normed, gate_up)
        kernels.gate(gate_up, activation, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._form.embed(tokens, slots, positions, out)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        if self._form.order is None:
            return x
        ordered = self._workspace.ordered(*x.shape)
        gather_columns(x, self._form.order, ordered)
        return ordered

    def _tiles(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for first in range(0, self._rows, len(self._tile)):
            last = min(first + len(self._tile), self._rows)
            tile = self._tile[: last - first]
            self._form.expand(first, last, tile)
            yield first, last, tile
