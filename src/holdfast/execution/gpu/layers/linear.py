"""Products with a weight matrix on a GPU. Few rows: one pass over the matrix, norm and gate in the same kernel; many
rows: cuBLAS. Quantized matrices are in quantized_linear.py. Knows nothing of what a matrix is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.layers.prefill_kernel import GATED_ROWS, HOPPER, choose_gated_product
from holdfast.execution.gpu.layers.quantized_linear import QuantizedGpuLinear, QuantizedWorkspace, arrange_matrix
from holdfast.execution.gpu.layers.rounded_linear import (
    LargestOfParts,
    RoundedGpuLinear,
    RoundedWorkspace,
    rounds_inputs,
)
from holdfast.execution.layers.linear import (
    DenseLinear,
    DividedLinear,
    GatheredLinear,
    Linear,
    QuantizedLinear,
    StackedLinear,
)
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.quantized import products
from holdfast.footprint.gpu import GATHERED_ROWS, LARGE_BYTES, SKINNY_ROWS
from holdfast.models.spec import ShardPiece

WholeRowsInto = Callable[[torch.Tensor, ShardPiece, torch.Tensor], None]
"""Of rows of which x is one rank's part, and which part: all of each into the last, [rows, all columns]."""


class Scratch:
    """What all products share, one after the other on one stream. `tokens`: the most of a step. `spare`: a buffer
    that products and attention write to, and whose content none needs that does not get it. `activation` of the
    model. `largest`, `whole_rows`: ask the other ranks for what they have of the same rows; None: there are none."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int = 0,
        spare: torch.Tensor | None = None,
        activation: Activation = "silu",
        largest: LargestOfParts | None = None,
        whole_rows: WholeRowsInto | None = None,
    ) -> None:
        self.largest = largest
        self.gathered = GatheredWorkspace(tokens, dtype, device, whole_rows)
        self.quantized = QuantizedWorkspace(dtype, device, spare, activation)
        self.rounded = RoundedWorkspace(tokens, dtype, device, activation)


class GpuLinear(Protocol):
    @property
    def kind(self) -> tuple[object, ...]:
        """How it is kept: those of a kind are multiplied by the same kernels."""

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x·Wᵀ (+ bias)."""

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out = norm(x)·Wᵀ (+ bias); may use `normed` (like x)."""

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x·Wᵀ (+ bias)."""

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
        """out = activation(gate)·up of norm(x)·Wᵀ; may use `normed` and `gate_up`."""

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the matrix by the token ids at (slot, position)."""


def gpu_linear(linear: Linear, scratch: Scratch) -> GpuLinear:
    if isinstance(linear, DenseLinear):
        return DenseGpuLinear(linear)
    if isinstance(linear, QuantizedLinear) and rounds_inputs(linear.matrix):
        return RoundedGpuLinear(linear, scratch.rounded)
    if isinstance(linear, QuantizedLinear):
        return QuantizedGpuLinear(linear, scratch.quantized)
    if isinstance(linear, StackedLinear):
        return StackedGpuLinear(linear, scratch)
    if isinstance(linear, DividedLinear) and isinstance(linear.base, QuantizedLinear):
        return _divided(linear, linear.base, scratch)
    if isinstance(linear, GatheredLinear):
        return GatheredGpuLinear(linear, gpu_linear(linear.base, scratch), scratch.gathered)
    raise EngineError(f"a {type(linear).__name__} has no products on a GPU")


def _divided(linear: DividedLinear, base: QuantizedLinear, scratch: Scratch) -> GpuLinear:
    """One rank's columns of a matrix whose inputs have one scale for all of a row. Sums are scaled where they are made,
    so that the bias is added there."""
    whole = QuantizedLinear(base.matrix, scratch.rounded.dtype, linear.bias)
    if not rounds_inputs(base.matrix):
        return QuantizedGpuLinear(whole, scratch.quantized)
    if scratch.largest is None:
        raise EngineError("a part of a row of inputs is rounded with the scale of all of it, which other ranks have")
    return DividedGpuLinear(whole, scratch.rounded, scratch.largest)


def arrange(linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
    """Puts what lies there into the order that products read it in, as `gpu_linear` would: before it leaves the GPU."""
    if isinstance(linear, StackedLinear):
        for part in linear.parts:
            arrange(part, dtype, device)
    elif isinstance(linear, QuantizedLinear) and not rounds_inputs(linear.matrix):
        arrange_matrix(linear.matrix, dtype, device)


class _Plain(ABC):
    """The forms in several kernels, which any way of storing a matrix has."""

    @abstractmethod
    def write(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        kernels.rms_norm(x, norm, epsilon, normed)
        self.write(normed, out)

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
        self.write_normed(x, norm, epsilon, normed, gate_up)
        kernels.gate(gate_up, activation, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        raise EngineError("matrices stored in several ways cannot be looked up by rows")


class DenseGpuLinear(_Plain):
    def __init__(self, linear: DenseLinear) -> None:
        self.weight, self.bias = linear.weight, linear.bias
        self._turned = linear.weight.t()
        self._skinny = SKINNY_ROWS if linear.weight.nbytes < LARGE_BYTES else 1
        weight = linear.weight
        self.gating = choose_gated_product((len(weight), weight.shape[1]), weight.dtype, weight.device, linear.bias)
        """Which kernel `gated` takes for many rows."""

    @property
    def kind(self) -> tuple[object, ...]:
        return self.weight.dtype, self.weight.shape, self.bias is None

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= self._skinny:
            products.skinny_product(x, self.weight, out, bias=self.bias)
        elif self.bias is None:
            torch.mm(x, self._turned, out=out)
        else:
            torch.addmm(self.bias, x, self._turned, out=out)

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        if len(x) > self._skinny:
            super().write_normed(x, norm, epsilon, normed, out)
            return
        products.skinny_product(x, self.weight, out, norm_weight=norm, epsilon=epsilon, bias=self.bias)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= self._skinny:
            products.skinny_product(x, self.weight, out, accumulate=True, bias=self.bias)
            return
        out.addmm_(x, self._turned)
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
            # Imported here: there is no such thing for other GPUs, nor for Triton's interpreter.
            from holdfast.execution.triton_kernels.gated_hopper import gated_product_hopper

            kernels.rms_norm(x, norm, epsilon, normed)
            gated_product_hopper(normed, self.weight, activation, out)
            return
        if len(x) > self._skinny:
            super().gated(x, norm, epsilon, activation, normed, gate_up, out)
            return
        products.skinny_gate_up(
            x, self.weight, out, norm_weight=norm, epsilon=epsilon, activation=activation, bias=self.bias
        )

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        kernels.embed(tokens, slots, positions, self.weight, out)


class DividedGpuLinear(_Plain):
    """Inputs are normed and gated before ranks ask one another for the largest of each row."""

    def __init__(self, linear: QuantizedLinear, workspace: RoundedWorkspace, largest: LargestOfParts) -> None:
        self._product = RoundedGpuLinear(linear, workspace, largest)

    @property
    def kind(self) -> tuple[object, ...]:
        return "divided", *self._product.kind

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product.write(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product.add(x, out)


class GatheredWorkspace:
    """Where rows of inputs of all ranks go, and of these the columns of one matrix in its order: of GATHERED_ROWS at a
    time. As large as the widest product needs, of those that were made; products are made before the first step."""

    def __init__(self, tokens: int, dtype: torch.dtype, device: torch.device, whole_rows: WholeRowsInto | None) -> None:
        self.rows, self._whole_rows = min(tokens, GATHERED_ROWS), whole_rows
        self._whole = torch.empty(0, dtype=dtype, device=device)
        self._own = torch.empty(0, dtype=dtype, device=device)

    def make_room(self, whole: int, own: int) -> None:
        if self._whole_rows is None:
            raise EngineError("columns in an order of their own take inputs that other ranks have, and there are none")
        if self.rows * whole > len(self._whole):
            self._whole = self._whole.new_empty(self.rows * whole)
        if self.rows * own > len(self._own):
            self._own = self._own.new_empty(self.rows * own)

    def inputs(self, x: torch.Tensor, piece: ShardPiece, order: torch.Tensor) -> torch.Tensor:
        """Of no more than `rows` of them. Until the next product."""
        assert self._whole_rows is not None, "there was room made"
        count, columns = len(x), piece.whole[-1]
        whole = self._whole[: count * columns].view(count, columns)
        self._whole_rows(x, piece, whole)
        own = self._own[: count * len(order)].view(count, len(order))
        return torch.index_select(whole, 1, order, out=own)


class GatheredGpuLinear(_Plain):
    """One rank's columns of a matrix whose columns have an order of their own: ranks gather the rows first, and `base`
    takes those that are its own."""

    def __init__(self, linear: GatheredLinear, base: GpuLinear, workspace: GatheredWorkspace) -> None:
        self._linear, self._base, self._workspace = linear, base, workspace
        workspace.make_room(linear.piece.whole[-1], linear.columns)

    @property
    def kind(self) -> tuple[object, ...]:
        return "gathered", *self._base.kind

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for inputs, target in self._tiles(x, out):
            self._base.write(inputs, target)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for inputs, target in self._tiles(x, out):
            self._base.add(inputs, target)

    def _tiles(self, x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        piece, order = self._linear.piece, self._linear.order
        for part, target in zip(x.split(self._workspace.rows), out.split(self._workspace.rows), strict=True):
            yield self._workspace.inputs(part, piece, order), target


class StackedGpuLinear(_Plain):
    """Matrices over the same input whose outputs stand side by side, each stored in its own way."""

    def __init__(self, linear: StackedLinear, scratch: Scratch) -> None:
        self._parts = [(part.rows, gpu_linear(part, scratch)) for part in linear.parts]

    @property
    def kind(self) -> tuple[object, ...]:
        return tuple(part.kind for _, part in self._parts)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for rows, part in self._parts:
            part.write(x, out[:, first : first + rows])
            first += rows

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for rows, part in self._parts:
            part.add(x, out[:, first : first + rows])
            first += rows
