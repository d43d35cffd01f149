"""Products on a GPU with matrices that stay quantized, GGUF's blocks or codes with scales, and inputs as they are.

    1                        one kernel: norm and product, where codes are of four bits (`vector_products`)
    to FEW_QUANTIZED_ROWS    product and gate, or sum, decoded in registers
    to SKINNY_BLOCK_ROWS     the same without the gate, which is a kernel of its own
    more                     expanded to a tile of rows at a time, which the second level cache holds, and cuBLAS
    from SPARE_ROWS on       the same with a larger tile or all of the matrix at once, where a buffer is idle; and with
                             the gate in the product, where the GPU has that (`gated_hopper`)

int4 codes and K-quants are rearranged for tensor cores where the GPU and their shape allow it (`cuda.int4`,
`cuda.kquant`): then one kernel has product and gate, or sum, to its `most_rows`; for one row the norm too.

Knows nothing of what a matrix is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.fragments import rearrange
from holdfast.execution.gpu.cuda.int4 import FragmentMatrix, against_int4
from holdfast.execution.gpu.cuda.int4_experts import against_int4_experts, compile_expert_products
from holdfast.execution.gpu.cuda.kquant import BITS, KQUANT_ROWS, KquantMatrix, against_kquant, compile_table
from holdfast.execution.gpu.cuda.module import NO_GATE, kernel_decision
from holdfast.execution.gpu.cuda.row_product import RowProducts
from holdfast.execution.gpu.layers.prefill_kernel import GATED_ROWS, HOPPER, choose_gated_product
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.quantized.block_products import block_gate_up, block_product
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes, dequantize_tile, embed_blocks
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_QUANTIZED_ROWS
from holdfast.execution.triton_kernels.quantized.scaled_products import scaled_gate_up, scaled_product
from holdfast.execution.triton_kernels.quantized.scaled_rows import embed_scaled, expand_scaled, gather_columns
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.triton_kernels.quantized.vector_products import (
    vector_product,
    vectors_of_blocks,
    vectors_of_codes,
)
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.gpu import EXPANDED_BYTES, SKINNY_BLOCK_ROWS, SPLIT_COUNTERS, SUMS_BYTES
from holdfast.observability.decisions import Decision

WHOLE_ROWS = 128
LINE_BYTES = 128
OWN_SUMS_ROWS = 128
"""Of x: sums of all blocks that share tiles of more have no room in SUMS_BYTES."""
SPARE_ROWS = GATED_ROWS
"""Of inputs: with fewer, products from a tile that stays in the cache were faster (one run on an H200, 4,096 x 4,096
with 2,048 of them: 117 us, and 141 through memory)."""


class QuantizedWorkspace:
    """What all such products share, one after the other on one stream; allocated with the first matrix, before any
    step. The memory that rows are expanded to also has the sums of split products, and inputs put into another order:

        | rows of numbers, for many rows of inputs          |
        | sums of splits (SUMS_BYTES) | inputs in order     |     for few

    `spare` is a buffer of someone else's, in which nothing is kept from one product to the next. With more than
    OWN_SUMS_ROWS sums of splits lie there, and from SPARE_ROWS on rows are expanded there, where more of it is free
    than that memory has: inputs or outputs may lie in it.

    `activation` of the model: kernels are compiled ahead for it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        spare: torch.Tensor | None = None,
        activation: Activation = "silu",
    ) -> None:
        self.dtype, self.device, self.gate = dtype, device, kernels.activation_code(activation)
        self._spare = torch.empty(0, dtype=torch.uint8) if spare is None else spare.view(-1).view(torch.uint8)
        self._memory: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None
        self._in_fragments: dict[str, list[str | None]] = {}
        self.rows = RowProducts(self.gate)

    def _bytes(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(EXPANDED_BYTES, dtype=torch.uint8, device=self.device)
        return self._memory

    def make_room(self) -> None:
        self._bytes()

    def expanded(self, columns: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Where rows of a quantized matrix go as numbers, for the product of x into `out`, which are left as they are:
        a multiple of WHOLE_ROWS of them, so that what is written begins where cuBLAS's fast kernels can. Until the
        next product."""
        memory = self._bytes()
        if len(x) >= SPARE_ROWS:
            memory = max(memory, self._beside(x, out), key=torch.Tensor.numel)
        words = memory.view(self.dtype)
        rows = len(words) // columns
        rows -= rows % WHOLE_ROWS if rows >= WHOLE_ROWS else 0
        return words[: rows * columns].view(rows, columns)

    def _beside(self, *kept: torch.Tensor) -> torch.Tensor:
        """What of the spare buffer lies behind all these."""
        end, size = 0, self._spare.nbytes
        for one in kept:
            begin = one.data_ptr() - self._spare.data_ptr()
            if begin < size and begin + _spanned(one) > 0:
                end = max(end, begin + _spanned(one))
        return self._spare[-(-end // LINE_BYTES) * LINE_BYTES : size // LINE_BYTES * LINE_BYTES]

    def splits(self) -> SplitSums:
        if self._counters is None:
            self._counters = torch.zeros(SPLIT_COUNTERS, dtype=torch.int32, device=self.device)
        return SplitSums(self._bytes()[:SUMS_BYTES].view(torch.float32), self._counters)

    def splits_beside(self, x: torch.Tensor, out: torch.Tensor) -> SplitSums:
        """The same for the product of x into `out`, in the spare buffer where that has more room."""
        own, spare = self.splits(), self._beside(x, out).view(torch.float32)
        return SplitSums(spare, own.counters) if len(spare) > len(own.sums) else own

    def ordered(self, rows: int, columns: int) -> torch.Tensor:
        """Inputs of few rows."""
        return self._bytes()[SUMS_BYTES:].view(self.dtype)[: rows * columns].view(rows, columns)

    def against_fragments(self, matrix: ScaledMatrix | QuantizedMatrix) -> str | None:
        """Why a matrix of int4 codes, or of GGUF's blocks, is not rearranged for tensor cores, None if it is; for
        `decisions` too."""
        if isinstance(matrix, ScaledMatrix):
            about = "int4_products"
            against = against_int4(matrix.layout, matrix.rows, matrix.columns, self.dtype, self.device)
        else:
            about, against = "gguf_products", against_kquant(matrix.layout, matrix.rows, self.dtype, self.device)
        self._in_fragments.setdefault(about, []).append(against)
        return against

    def against_experts(self, matrix: ScaledMatrix, experts: int) -> str | None:
        """The same of a matrix of all experts, one below the other, which is multiplied as it lies."""
        outputs = matrix.rows // experts
        against = against_int4_experts(matrix.layout, experts, outputs, matrix.columns, self.dtype, self.device)
        if matrix.layout.codes == "int4":
            self._in_fragments.setdefault("expert_products", []).append(against)
        if against is None:
            capability = torch.cuda.get_device_capability(self.device)
            compile_expert_products(matrix.layout, experts, self.dtype, capability, self.gate)
        return against

    @property
    def decisions(self) -> list[Decision]:
        """On matrices of int4 codes and of GGUF's blocks, where there are any."""
        return [kernel_decision(about, found) for about, found in self._in_fragments.items()]


def _spanned(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last row: of columns of a wider buffer, those behind them are
    another product's outputs."""
    if not tensor.numel():
        return 0
    return len(tensor) * tensor.stride(0) * tensor.itemsize


class _Blocks:
    """The kernels of GGUF's blocks."""

    order = None
    most_rows, most_gated = SKINNY_BLOCK_ROWS, FEW_QUANTIZED_ROWS

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._planes = BlockPlanes(
            matrix.layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small
        )
        self.kind: tuple[object, ...] = (matrix.layout, matrix.quants.shape)
        self.vectors = vectors_of_blocks(self._planes)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, add: bool
    ) -> None:
        block_product(x, self._planes, out, workspace, bias=bias, accumulate=add)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, kind: Activation
    ) -> None:
        block_gate_up(x, self._planes, out, workspace, bias=bias, activation=kind)

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        dequantize_tile(self._planes, first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        embed_blocks(tokens, slots, positions, self._planes, out)


class _Codes:
    """The kernels of codes with scales."""

    most_rows, most_gated = SKINNY_BLOCK_ROWS, FEW_QUANTIZED_ROWS

    def __init__(self, matrix: ScaledMatrix) -> None:
        self._matrix, self.order = matrix, matrix.order
        self.kind: tuple[object, ...] = (matrix.layout, matrix.rows, matrix.columns)
        self.vectors = vectors_of_codes(matrix)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, add: bool
    ) -> None:
        scaled_product(x, self._matrix, out, workspace, bias=bias, accumulate=add)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, kind: Activation
    ) -> None:
        scaled_gate_up(x, self._matrix, out, workspace, bias=bias, activation=kind)

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        expand_scaled(self._matrix, first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        embed_scaled(tokens, slots, positions, self._matrix, out)


class _Fragments:
    """The kernels of int4 codes in the order that tensor cores read."""

    vectors = None

    def __init__(self, matrix: ScaledMatrix, workspace: QuantizedWorkspace) -> None:
        dtype = workspace.dtype
        if not matrix.in_fragments:  # An embedding may be the head too.
            rearrange(matrix)
        self._matrix, self.order = FragmentMatrix(matrix, dtype, workspace.gate), matrix.order
        self._row = workspace.rows.make(matrix, dtype)
        # Inputs in another order are put into the workspace, which holds fewer.
        self.most_rows = self.most_gated = self._matrix.most_rows if matrix.order is None else SKINNY_BLOCK_ROWS
        self.kind: tuple[object, ...] = ("fragments", matrix.layout, matrix.rows, matrix.columns)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, add: bool
    ) -> None:
        if self._row is not None and self._row.takes(x):
            self._row.product(x, out, bias=bias, accumulate=add)
        else:
            self._matrix.product(x, out, workspace, bias=bias, accumulate=add)

    def takes_norm(self, x: torch.Tensor, norm: torch.Tensor, *, gated: bool = False) -> bool:
        return self.order is None and self._row is not None and self._row.takes(x, norm=norm, gated=gated)

    def multiply_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, out: torch.Tensor, workspace: SplitSums,
        bias: torch.Tensor | None, kind: Activation | None = None,
    ) -> None:  # fmt: skip
        """Of one row that `takes_norm` takes; with `kind` gated."""
        if self._row is None:
            raise EngineError("this matrix has no products of a normed row")
        gate = NO_GATE if kind is None else kernels.activation_code(kind)
        self._row.product(x, out, bias=bias, gate=gate, norm=norm, epsilon=epsilon)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, kind: Activation
    ) -> None:
        gate = kernels.activation_code(kind)
        if self._row is not None and self._row.takes(x, gated=True):
            self._row.product(x, out, bias=bias, gate=gate)
        else:
            self._matrix.product(x, out, workspace, bias=bias, gate=gate)

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        self._matrix.expand(first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._matrix.embed(tokens, slots, positions, out)


class _Tiles:
    """The kernels of K-quants in the order that tensor cores read."""

    order = vectors = None
    most_rows = KQUANT_ROWS

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._matrix = KquantMatrix(matrix.weave())
        self.most_gated = FEW_QUANTIZED_ROWS if self._matrix.takes_gate else 0
        self.kind: tuple[object, ...] = ("tiles", matrix.layout, matrix.rows, matrix.columns)
        compile_table(BITS[matrix.layout], dtype, matrix.columns)

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, add: bool
    ) -> None:
        self._matrix.product(x, out, workspace, bias=bias, accumulate=add)

    def takes_norm(self, x: torch.Tensor, norm: torch.Tensor, *, gated: bool = False) -> bool:
        return self._matrix.takes_norm(x, norm, gated=gated)

    def multiply_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, out: torch.Tensor, workspace: SplitSums,
        bias: torch.Tensor | None, kind: Activation | None = None,
    ) -> None:  # fmt: skip
        """Of one row; with `kind` gated."""
        activation = None if kind is None else kernels.activation_code(kind)
        self._matrix.product(x, out, workspace, bias=bias, activation=activation, norm=norm, epsilon=epsilon)

    def gate_up(
        self, x: torch.Tensor, out: torch.Tensor, workspace: SplitSums, bias: torch.Tensor | None, kind: Activation
    ) -> None:
        self._matrix.product(x, out, workspace, bias=bias, activation=kernels.activation_code(kind))

    def expand(self, first: int, last: int, out: torch.Tensor) -> None:
        self._matrix.expand(first, last, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._matrix.embed(tokens, slots, positions, out)


class QuantizedGpuLinear:
    def __init__(self, linear: QuantizedLinear, workspace: QuantizedWorkspace) -> None:
        matrix = linear.matrix
        self._form = _form(matrix, workspace)
        self._rows, self._columns, self.bias, self._workspace = matrix.rows, matrix.columns, linear.bias, workspace
        self._splits = workspace.splits()
        workspace.make_room()
        self.gating = choose_gated_product(
            (matrix.rows, matrix.columns), workspace.dtype, workspace.device, linear.bias
        )
        """Which kernel `gated` takes for many rows."""

    @property
    def kind(self) -> tuple[object, ...]:
        return *self._form.kind, self.bias is None

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= self._form.most_rows:
            self._multiply(x, out, add=False)
            return
        for first, last, tile in self._tiles(x, out):
            if self.bias is None:
                torch.mm(x, tile.t(), out=out[:, first:last])
            else:
                torch.addmm(self.bias[first:last], x, tile.t(), out=out[:, first:last])

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        if len(x) == 1 and self._form.vectors is not None:
            vector_product(x, self._form.vectors, out, bias=self.bias, norm_weight=norm, epsilon=epsilon)
            return
        if isinstance(self._form, _Tiles | _Fragments) and self._form.takes_norm(x, norm):
            self._form.multiply_normed(x, norm, epsilon, out, self._splits, self.bias)
            return
        kernels.rms_norm(x, norm, epsilon, normed)
        self.write(normed, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= self._form.most_rows:
            self._multiply(x, out, add=True)
            return
        for first, last, tile in self._tiles(x, out):
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
        if len(x) >= GATED_ROWS and self.gating.value == HOPPER:
            kernels.rms_norm(x, norm, epsilon, normed)
            self._gate_many(normed, activation, out)
            return
        if len(x) > self._form.most_gated or (len(x) == 1 and self._form.vectors is not None):
            self.write_normed(x, norm, epsilon, normed, gate_up)
            kernels.gate(gate_up, activation, out)
            return
        if isinstance(self._form, _Tiles | _Fragments) and self._form.takes_norm(x, norm, gated=True):
            self._form.multiply_normed(x, norm, epsilon, out, self._splits, self.bias, activation)
            return
        kernels.rms_norm(x, norm, epsilon, normed)
        self._form.gate_up(self._in_order(normed), out, self._splits_for(normed, out), self.bias, activation)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        self._form.embed(tokens, slots, positions, out)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        if len(x) == 1 and self._form.vectors is not None:
            vector_product(x, self._form.vectors, out, bias=self.bias, accumulate=add)
        else:
            self._form.multiply(self._in_order(x), out, self._splits_for(x, out), self.bias, add)

    def _splits_for(self, x: torch.Tensor, out: torch.Tensor) -> SplitSums:
        return self._splits if len(x) <= OWN_SUMS_ROWS else self._workspace.splits_beside(x, out)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        if self._form.order is None:
            return x
        ordered = self._workspace.ordered(*x.shape)
        gather_columns(x, self._form.order, ordered)
        return ordered

    def _tiles(self, x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Rows from the first to before the last, expanded: as many at a time as there is room for, and alike."""
        room = self._workspace.expanded(self._columns, x, out)
        for first, last in _pieces(self._rows, len(room)):
            tile = room[: last - first]
            self._form.expand(first, last, tile)
            yield first, last, tile

    def _gate_many(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        # Imported here: there is no such thing for other GPUs, nor for Triton's interpreter.
        from holdfast.execution.triton_kernels.gated_hopper import gated_product_hopper

        inner, room = self._rows // 2, self._workspace.expanded(self._columns, x, out)
        for first, last in _pieces(inner, len(room) // 2):
            gates = last - first
            self._form.expand(first, last, room[:gates])
            self._form.expand(inner + first, inner + last, room[gates : 2 * gates])
            gated_product_hopper(x, room[: 2 * gates], activation, out[:, first:last])


def arrange_matrix(matrix: QuantizedMatrix | ScaledMatrix, dtype: torch.dtype, device: torch.device) -> None:
    """Puts it into the order that products read it in, as making one would."""
    _form(matrix, QuantizedWorkspace(dtype, device))


def _pieces(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """As few as can be and of equal size, in whole tiles of WHOLE_ROWS where `most` has one."""
    whole = WHOLE_ROWS if most >= WHOLE_ROWS else 1
    count = -(-rows // (most // whole * whole))
    size = -(-rows // count // whole) * whole
    for first in range(0, rows, size):
        yield first, min(first + size, rows)


def _form(
    matrix: QuantizedMatrix | ScaledMatrix, workspace: QuantizedWorkspace
) -> _Blocks | _Codes | _Fragments | _Tiles:
    if not isinstance(matrix, ScaledMatrix):
        against = workspace.against_fragments(matrix)
        return _Tiles(matrix, workspace.dtype) if against is None else _Blocks(matrix)
    if matrix.layout.codes == "int4":
        against = workspace.against_fragments(matrix)
        if against is None:
            return _Fragments(matrix, workspace)
    return _Codes(matrix)
