"""Products on a GPU whose inputs are rounded to one byte like their matrix: FP8, and INT8 (W8A8).

    one row     of FP8: one kernel, that norms and rounds, multiplies, and gates or adds (`cuda.row_product`)
    few rows    a kernel that rounds, with the norm or the gate before it, and one that multiplies, scales and adds
    more        the same with torch's product, and scales or sums onto a stream in a kernel of their own

How inputs are rounded is told in `triton_kernels.rounded.rounding`. Knows nothing of what a matrix is for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.module import kernel_decision
from holdfast.execution.gpu.cuda.row_product import RowProducts
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.rounded.products import rounded_product, scale_sums
from holdfast.execution.triton_kernels.rounded.rounding import round_rows
from holdfast.execution.triton_kernels.rounded.tiles import SCALED_OUTPUTS, SCALED_ROWS, SKINNY_ROWS
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.rounded import GROUP, MOST_PARTS, PART_BYTES, rounding_of
from holdfast.observability.decisions import Decision

HOPPER = (9, 0)
BLOCK_SCALES_CUDA = (12, 9)
"""The release whose cuBLAS has products with scales for blocks."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Hopper's where there is no GPU: the interpreter knows all types."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


def rounds_inputs(matrix: QuantizedMatrix | ScaledMatrix) -> bool:
    """Whether products with it round their inputs on the GPU that it lies on."""
    if not isinstance(matrix, ScaledMatrix):
        return False
    return rounding_of(matrix.layout, capability_of(matrix.codes.device)).inputs != "plain"


class RoundedWorkspace:
    """What all such products share, one after the other on one stream: rounded inputs, scales, sums. As large as the
    widest product needs, of those that were made; products are made before the first step."""

    def __init__(self, tokens: int, dtype: torch.dtype, device: torch.device, activation: Activation = "silu") -> None:
        self._tokens, self.dtype, self._device = tokens, dtype, device
        self._codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._scales = torch.empty(0, dtype=torch.float32, device=device)
        self._sums = torch.empty(0, dtype=dtype, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        """The scale of products that are scaled afterwards."""
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.arrivals = torch.empty(0, dtype=torch.int32, device=device)
        self.rows = RowProducts(kernels.activation_code(activation))
        self._against_library: list[str | None] = []

    def library_takes(self, matrix: ScaledMatrix) -> bool:
        """Whether products of more rows are cuBLAS's; for `decisions` too."""
        against = against_library(matrix)
        if matrix.layout.inputs == "fp8":
            self._against_library.append(against)
        return against is None

    @property
    def decisions(self) -> list[Decision]:
        """On matrices of FP8, where there are any."""
        found, reason = self._against_library, f"of more than {SKINNY_ROWS} rows; few are multiplied by kernels of ours"
        return [kernel_decision("fp8_products", found, "cublas", reason)] if found else []

    def make_room(self, columns: int) -> None:
        """For products with inputs of so many columns."""
        if not self._tokens:
            raise EngineError("a product with rounded inputs has no room for them", needed="the tokens of a step")
        if self._tokens * columns > len(self._codes):
            self._codes = self._codes.new_empty(self._tokens * columns)
            self._scales = self._scales.new_empty(self._tokens * -(-columns // GROUP))
        if not len(self.parts):
            self.parts = self.parts.new_empty(MOST_PARTS * PART_BYTES // 4)
            self.arrivals = torch.zeros(MOST_PARTS, dtype=torch.int32, device=self._device)

    @property
    def nbytes(self) -> int:
        kept = (self._codes, self._scales, self._sums, self.one, self.parts, self.arrivals)
        return sum(part.nbytes for part in kept)

    def inputs(self, rows: int, columns: int, kind: torch.dtype, *, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows, columns] and scales [rows, 1] or [rows, columns / 128], the latter with rows side by side."""
        codes = self._codes[: rows * columns].view(kind).view(rows, columns)
        groups = columns // GROUP if grouped else 1
        return codes, self._scales[: rows * groups].view(groups, rows).t()

    def sums(self, rows: int, outputs: int) -> torch.Tensor:
        """Made when it is first asked for, in the first step that is tried: few products add."""
        if self._tokens * outputs > len(self._sums):
            self._sums = self._sums.new_empty(self._tokens * outputs)
        return self._sums[: rows * outputs].view(rows, outputs)


LargestOfParts = Callable[[torch.Tensor], torch.Tensor]
"""Of one rank's part [rows, columns] of rows, the largest sizes that each rank has in its part of them: float32 [rows,
ranks], the same on all ranks."""


class RoundedGpuLinear:
    """`largest`: where it has one rank's columns of a matrix whose inputs have one scale for all of a row, which ranks
    find together before they round. Its products are those of few rows and more, for one row too: the kernel for one
    rounds by what it has itself."""

    def __init__(
        self, linear: QuantizedLinear, workspace: RoundedWorkspace, largest: LargestOfParts | None = None
    ) -> None:
        matrix = linear.matrix
        if not isinstance(matrix, ScaledMatrix):
            raise EngineError(f"a matrix in {matrix.layout} has no products with rounded inputs")
        _check(matrix)
        self._matrix, self.bias, self._workspace = matrix, linear.bias, workspace
        self._codes, self._scales, self._largest = matrix.codes, matrix.scales, largest
        self._static = matrix.inputs if largest is None else None
        self._turned, self._scales_turned = matrix.codes.t(), matrix.scales.t()
        self._grouped = matrix.layout.group == GROUP
        self._library = workspace.library_takes(matrix)
        self._row = workspace.rows.make(matrix, workspace.dtype) if largest is None else None
        workspace.make_room(matrix.columns)

    @property
    def kind(self) -> tuple[object, ...]:
        return self._matrix.layout, self._codes.shape, self.bias is None

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._row is not None and self._row.takes(x):
            self._row.product(x, out, bias=self.bias)
            return
        self._multiply(*self._rounded(x), out, accumulate=False)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._row is not None and self._row.takes(x):
            self._row.product(x, out, bias=self.bias, accumulate=True)
            return
        self._multiply(*self._rounded(x), out, accumulate=True)

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        if self._row is not None and self._row.takes(x, norm=norm):
            self._row.product(x, out, bias=self.bias, norm=norm, epsilon=epsilon)
            return
        self._multiply(*self._rounded(x, norm=norm, epsilon=epsilon), out, accumulate=False)

    def gates_row(self, x: torch.Tensor, norm: torch.Tensor) -> bool:
        """Whether `gated` is one kernel."""
        return self._row is not None and self._row.takes(x, norm=norm, gated=True)

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
        if self._row is not None and self._row.takes(x, norm=norm, gated=True):
            code = kernels.activation_code(activation)
            self._row.product(x, out, bias=self.bias, gate=code, norm=norm, epsilon=epsilon)
            return
        self.write_normed(x, norm, epsilon, normed, gate_up)
        kernels.gate(gate_up, activation, out)

    def add_gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """out += (activation(gate)·up)·Wᵀ, where what is between is only ever written as codes."""
        self._multiply(*self._rounded(gate_up, activation=activation), out, accumulate=True)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        raise EngineError(f"a matrix in {self._matrix.layout} with rounded inputs cannot be looked up by rows")

    def _rounded(
        self,
        x: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self._workspace.inputs(len(x), self._matrix.columns, self._codes.dtype, grouped=self._grouped)
        parts = None if self._largest is None else self._largest(x)
        round_rows(
            x, codes, scales, norm=norm, epsilon=epsilon, activation=activation, static=self._static, parts=parts,
            grouped=self._grouped, bound=self._matrix.layout.input_bound, powers=self._matrix.layout.input_powers,
        )  # fmt: skip
        return codes, scales

    def _multiply(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        rows, room = len(codes), self._workspace
        if self._library and rows > SKINNY_ROWS and not (self._grouped and rows % 4) and out.dtype != torch.float32:
            self._multiply_by_library(codes, scales, out, accumulate)
        else:
            rounded_product(
                codes, scales, self._codes, self._scales, out, room.parts, room.arrivals, grouped=self._grouped,
                bias=self.bias, accumulate=accumulate,
            )  # fmt: skip

    def _multiply_by_library(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, accumulate: bool
    ) -> None:
        """cuBLAS's product cannot add to what is there. With scales of rows it was slower for few rows and outputs: 128
        rows of 4096 x 14336 took an H200 44 us, and 24 without them, the kernel that scales included."""
        rows = len(codes)
        target = self._workspace.sums(rows, self._matrix.rows) if accumulate else out
        few = rows < SCALED_ROWS and self._matrix.rows < SCALED_OUTPUTS
        apart = few and not self._grouped and out.dtype == torch.bfloat16  # float16 could not hold them unscaled.
        torch._scaled_mm(
            codes,
            self._turned,
            self._workspace.one if apart else scales,
            self._workspace.one if apart else self._scales_turned,
            bias=None if apart else self.bias,
            out_dtype=out.dtype,
            use_fast_accum=not self._grouped,
            out=target,
        )
        if apart:
            scale_sums(target, scales, self._scales, out, bias=self.bias, accumulate=accumulate)
        elif accumulate:
            out += target


def against_library(matrix: ScaledMatrix) -> str | None:
    """Why torch's products do not take this matrix; None: they do. They are of float8_e4m3fn on Hopper, for which
    cuBLAS has scales of rows and blocks."""
    device, layout, shape = matrix.codes.device, matrix.layout, f"{matrix.rows} x {matrix.columns}"
    if device.type != "cuda" or layout.inputs != "fp8":
        return "cuBLAS multiplies FP8 on a GPU"
    if (found := capability_of(device)) != HOPPER:
        return f"cuBLAS scales rows and blocks for compute capability 9.0; this GPU has {found[0]}.{found[1]}"
    if matrix.rows % 16 or matrix.columns % 16:
        return f"cuBLAS takes rows and columns by 16; these are {shape}"
    if layout.group and matrix.columns % (4 * GROUP):
        return f"cuBLAS takes columns in blocks by {4 * GROUP}; these are {shape}"
    if layout.group and _cuda_version() < BLOCK_SCALES_CUDA:
        return f"cuBLAS scales blocks from CUDA 12.9 on; torch was built with {torch.version.cuda}"
    return None


def _cuda_version() -> tuple[int, ...]:
    """That torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def _check(matrix: ScaledMatrix) -> None:
    """By name what there is no kernel for."""
    layout = matrix.layout
    inputs, shape = layout.inputs, (layout.group_rows, layout.group)
    if layout.codes != inputs:
        found, needed = f"{layout.codes} with inputs in {inputs}", "a matrix of the type that its inputs are rounded to"
    elif layout.zeros:
        found, needed = "zero points", "codes around zero"
    elif layout.ordered:
        found, needed = "columns in an order of their own", "columns in the order of the inputs"
    elif layout.scales != "float32":
        found, needed = f"scales in {layout.scales}", "scales in float32"
    elif shape != (1, 0) and not (inputs == "fp8" and shape == (GROUP, GROUP)):
        found, needed = (
            f"scales for {layout.group_rows} x {layout.group}",
            "a scale a row, or blocks of 128 x 128 of FP8",
        )
    elif layout.input_group != layout.group:
        found = f"inputs scaled by {layout.input_group or 'row'}, and a matrix by {layout.group or 'row'}"
        needed = "both by row, or both by 128 columns"
    else:
        return
    raise EngineError(f"a matrix in {layout} has no products with rounded inputs on a GPU", needed=needed, found=found)
