"""Products with a weight matrix on a GPU. Few rows: one pass over the matrix, norm and gate in the same kernel; many
rows: cuBLAS. Knows nothing of what the matrix is for.
"""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.errors import EngineError
from holdfast.execution.linear import DenseLinear, Linear, QuantizedLinear
from holdfast.execution.ops.interface import Activation
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels import products

SKINNY_ROWS = 8
"""Up to so many rows our own kernels are the faster ones (H200, bfloat16)."""


class GpuLinear(Protocol):
    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out = norm(x)·Wᵀ (+ bias); may use `normed` (like x)."""

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x·Wᵀ (+ bias)."""

    def gated(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, activation: Activation, normed: torch.Tensor,
        gate_up: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = activation(gate)·up of norm(x)·Wᵀ; may use `normed` and `gate_up`."""

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the matrix by the token ids at (slot, position)."""


def gpu_linear(linear: Linear) -> GpuLinear:
    if isinstance(linear, DenseLinear):
        return DenseGpuLinear(linear)
    if isinstance(linear, QuantizedLinear):
        from holdfast.execution.gpu.block_linear import BlockGpuLinear

        return BlockGpuLinear(linear)
    raise EngineError(f"a {type(linear).__name__} has no products on a GPU")


class DenseGpuLinear:
    def __init__(self, linear: DenseLinear) -> None:
        self.weight, self.bias = linear.weight, linear.bias
        self._turned = linear.weight.t()

    def write_normed(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor, out: torch.Tensor
    ) -> None:
        if len(x) <= SKINNY_ROWS:
            products.skinny_product(x, self.weight, out, norm_weight=norm, epsilon=epsilon, bias=self.bias)
            return
        kernels.add_rms_norm(x, norm, epsilon, normed)
        self._write(normed, out)

    def _write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self._turned, out=out)
        else:
            torch.addmm(self.bias, x, self._turned, out=out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if len(x) <= SKINNY_ROWS:
            products.skinny_product(x, self.weight, out, accumulate=True, bias=self.bias)
            return
        out.addmm_(x, self._turned)
        if self.bias is not None:
            out += self.bias

    def gated(
        self, x: torch.Tensor, norm: torch.Tensor, epsilon: float, activation: Activation, normed: torch.Tensor,
        gate_up: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        if len(x) <= SKINNY_ROWS and self.bias is None:
            products.skinny_gate_up(x, self.weight, out, norm_weight=norm, epsilon=epsilon, activation=activation)
            return
        self.write_normed(x, norm, epsilon, normed, gate_up)
        kernels.gate(gate_up, activation, out)

    def embed(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        kernels.embed(tokens, slots, positions, self.weight, out)
