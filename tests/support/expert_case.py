"""Products of experts in codes with scales, and what they are held against."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.experts import launch
from holdfast.execution.triton_kernels.experts.planes import ScaledPlanes
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator("cpu").manual_seed(seed)


class Shape(NamedTuple):
    tokens: int
    experts: int
    per_token: int
    columns: int
    outputs: int


class ExpertCase:
    """A matrix of all experts in random codes, tokens that chose among them, and what float64 makes of both."""

    def __init__(self, layout: ScaledLayout, shape: Shape, *, gated: bool, crowded: bool = False) -> None:
        self.layout, self.shape, self.gated = layout, shape, gated
        self.source = seeded(layout, shape, gated)
        self.matrix = self._matrix(shape.experts * shape.outputs * (2 if gated else 1))
        self.weights = torch.empty(self.matrix.rows, shape.columns, dtype=torch.float32, device=DEVICE)
        self.matrix.dequantize(0, self.matrix.rows, self.weights)
        self.weights = self.weights.double().view(shape.experts, -1, shape.columns)
        logits = torch.randn(shape.tokens, shape.experts, generator=self.source)
        if crowded:  # All take the same experts, and nobody the others.
            logits[:, : shape.per_token] += 100
        self.lines = launch.ExpertAssignments.allocate(shape.tokens, shape.experts, shape.per_token, DEVICE)
        launch.route(logits.to(DEVICE), self.lines, normalized=True)
        self.chosen = logits.topk(shape.per_token, -1).indices
        found = torch.full((self.pairs,), -1)
        for expert, count in enumerate(self.lines.counts.tolist()):
            found[self.lines.pairs[expert, :count].long().cpu()] = expert
        self.experts = found.to(DEVICE)

    @property
    def pairs(self) -> int:
        return self.shape.tokens * self.shape.per_token

    @property
    def planes(self) -> ScaledPlanes:
        return ScaledPlanes(self.layout, self.matrix.codes, self.matrix.scales, self.matrix.zeros)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.source).to(DEVICE)

    def integers(self, low: int, high: int, sizes: torch.Size | tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, sizes, generator=self.source)

    def _matrix(self, rows: int) -> ScaledMatrix:
        layout, columns = self.layout, self.shape.columns
        matrix = ScaledMatrix(layout, rows, columns, DEVICE)
        if layout.codes == "fp8":
            codes = self.integers(0, 254, (rows, columns)).to(torch.uint8)
            codes += codes >= 127  # 127 and 255 are no numbers.
            matrix.codes.view(torch.uint8).copy_(codes)
        elif layout.codes == "int8":
            matrix.codes.copy_(self.integers(-128, 128, (rows, columns)))
        else:
            matrix.fill_codes(0, self.integers(0, 16, (rows, columns)).to(torch.uint8).to(DEVICE))
        if layout.scales == "uint8":
            matrix.scales.copy_(self.integers(118, 124, matrix.scales.shape))
        else:
            wide = {"int4": 8, "nf4": 1, "int8": 100, "fp8": 200}[layout.codes]
            matrix.scales.copy_((torch.rand(matrix.scales.shape, generator=self.source) + 0.5) / wide)
        if matrix.zeros is not None:
            least, beyond = (-128, 128) if layout.codes == "int8" else (0, 16)
            matrix.zeros.copy_(self.integers(least, beyond, matrix.zeros.shape))
        return matrix

    def check(self, found: torch.Tensor, x: torch.Tensor, by_token: bool, unit: float) -> None:
        """`x`: the numbers that were multiplied, float64; `unit`: what a factor may be off by."""
        rows = x.repeat_interleave(self.shape.per_token, 0) if by_token else x
        wanted = rows.new_empty(self.pairs, self.weights.shape[1])
        off = torch.empty_like(wanted)
        for expert in self.experts.unique().tolist():
            mine, weights = self.experts == expert, self.weights[expert]
            wanted[mine], off[mine] = rows[mine] @ weights.T, rows[mine].abs() @ weights.abs().T * unit
        rounding = UNIT[found.dtype]
        if self.gated:
            (gate, up), (gate_off, up_off) = wanted.chunk(2, -1), off.chunk(2, -1)
            gate_off, up_off = gate_off + gate.abs() * rounding, up_off + up.abs() * rounding
            wanted = activate(gate, "silu") * up
            off = 1.2 * ((gate.abs() + 1) * up_off + (up.abs() + 1) * gate_off) + gate_off * up_off
        error = (found.double() - wanted).abs()
        tolerance = off + 2 * rounding * (wanted.abs() + off) + 1e-6
        assert torch.isfinite(error).all()
        assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"
