"""A matrix of small codes and scales in memory, as `footprint.scaled_layouts` draws it: filled by rows while loading,
dequantized by rows, or given to compiled products. Knows no files."""

from __future__ import annotations

from dataclasses import replace

import torch

from holdfast.errors import CheckpointError, EngineError
from holdfast.execution.memory import MakeTensor, exact_tensor
from holdfast.execution.native import ScaledBlockMatrix
from holdfast.footprint.scaled_layouts import PIECE, ScaledLayout

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What NF4's sixteen codes stand for."""
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1: a sign, two bits of exponent, one of mantissa."""
INT4_ZERO = 8
"""What is taken from int4's codes where no zero points are stored."""


class ScaledMatrix:
    """[rows, columns], or those of `experts` one below the other. `order` and `inputs` are None where the layout has
    none."""

    def __init__(
        self,
        layout: ScaledLayout,
        rows: int,
        columns: int,
        device: torch.device,
        make: MakeTensor = exact_tensor,
        experts: int = 0,
    ) -> None:
        whole = PIECE if layout.four_bits else 1
        if columns % whole or (layout.group and columns % layout.group):
            raise CheckpointError(
                f"a matrix in {layout} has rows of {columns} elements",
                needed=f"a multiple of {max(whole, layout.group)}",
                found=str(columns),
            )
        self.layout, self.rows, self.columns = layout, rows, columns
        self.in_fragments = False
        """Rearranged for tensor cores (gpu/cuda/fragments.py): read by kernels of their own, and not here any more."""
        planes = layout.planes(rows, columns, experts)
        made = {plane.name: make(plane.shape, getattr(torch, plane.dtype), device) for plane in planes}
        self.codes, self.scales = made["codes"], made["scales"]
        self.zeros, self.order, self.inputs = made.get("zeros"), made.get("order"), made.get("inputs")
        if self.inputs is not None:
            self.inputs.zero_()

    def compiled(self, bias: torch.Tensor | None = None) -> ScaledBlockMatrix:
        """The same planes as compiled products read them: this matrix is not to be used any more."""
        return ScaledBlockMatrix(self.layout, self.codes, self.scales, self.zeros, self.order, self.inputs, bias)

    def compiled_parts(self, count: int) -> list[ScaledBlockMatrix]:
        """Those of `count` experts, likewise. They share the scale of their inputs."""
        codes, scales = self.codes.chunk(count), self.scales.chunk(count)
        zeros = [None] * count if self.zeros is None else self.zeros.chunk(count)
        orders = [None] * count if self.order is None else self.order.unbind()
        return [
            ScaledBlockMatrix(self.layout, *planes, self.inputs)
            for planes in zip(codes, scales, zeros, orders, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order, self.inputs)
        return sum(part.nbytes for part in parts if part is not None)

    def fill_codes(self, first: int, codes: torch.Tensor) -> None:
        """[rows, columns] of the layout's code type, or uint8 with a four-bit code each, to rows first, first+1, ..."""
        target = self.codes[first : first + len(codes)]
        if not self.layout.four_bits:
            target.copy_(codes)
            return
        pieces = codes.view(len(codes), -1, PIECE)
        target.copy_(pieces[..., : PIECE // 2] | pieces[..., PIECE // 2 :] << 4)

    def fill_order(self, first: int, order: torch.Tensor) -> None:
        """Of the columns of the matrix that begins at row `first`."""
        assert self.order is not None, "a layout that has an order"
        expert = first * len(self.order) // self.rows if self.order.dim() == 2 else ...
        self.order[expert] = order

    def take_order(self) -> torch.Tensor:
        """Out of the matrix, which from now on takes its inputs as its columns lie: who has the order puts them so."""
        order = self.order
        assert order is not None, "a layout that has an order"
        self.order, self.layout = None, replace(self.layout, ordered=False, gathered_inputs=False)
        return order

    def reorder_rows(self, first: int, rows: torch.Tensor) -> None:
        """Rows first, first+1, ... become those of these indices among them; each has scales of its own."""
        assert self.layout.group_rows == 1, "rows that share scales stay together"
        for plane in (self.codes, self.scales, self.zeros):
            if plane is not None:
                part = plane[first : first + len(rows)]
                part.copy_(_chosen(part, rows))

    def dequantize(self, first: int, last: int, out: torch.Tensor) -> None:
        """Rows first..last-1 into `out` [last-first, columns]; columns in the order of the inputs."""
        rows = torch.arange(first, last, device=self.codes.device)
        self._dequantize(self.codes[first:last], rows, out)

    def dequantize_some(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The rows of these indices into `out` [len(rows), columns]."""
        self._dequantize(_chosen(self.codes, rows), rows, out)

    def _dequantize(self, codes: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        if self.in_fragments:
            raise EngineError("a matrix rearranged for tensor cores is expanded by the kernels that multiply with it")
        # The arithmetic is float32; a narrower target is rounded once, at the end.
        layout, at = self.layout, rows // self.layout.group_rows
        scales = self.scales.index_select(0, at)
        groups = scales.shape[1]
        wide = self._values(codes).view(len(rows), groups, -1)
        if self.zeros is not None:
            wide -= self.zeros.index_select(0, at).unsqueeze(-1).float()
        elif layout.codes == "int4":
            wide -= INT4_ZERO
        powers = torch.exp2(scales.float() - 127) if layout.scales == "uint8" else scales.float()
        wide *= powers.unsqueeze(-1)
        found = wide.view(len(rows), self.columns)
        if self.order is None:
            out.copy_(found)
        elif self.order.dim() == 1:
            out[:, self.order.long()] = found.to(out.dtype)
        else:
            own = self.order.index_select(0, rows * len(self.order) // self.rows)
            out.scatter_(1, own.long(), found.to(out.dtype))

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.layout.codes == "fp8":
            return fp8_values(codes)
        if not self.layout.four_bits:
            return codes.float()
        nibbles = torch.cat((codes & 15, codes >> 4), -1)
        if self.layout.codes == "int4":
            return nibbles.float()
        table = NF4_VALUES if self.layout.codes == "nf4" else MXFP4_VALUES
        values = torch.tensor(table, dtype=torch.float32, device=codes.device)
        return values.index_select(0, nibbles.view(-1).int())


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 of E4M3's codes that are numbers: their bits are float16's, but for an exponent less by 8. On a CPU
    torch's own conversion took seven times as long."""
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.uint8).to(torch.int16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16).float().mul_(256)


def _chosen(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if codes.dtype == torch.float8_e4m3fn:  # index_select has no kernel for it on every device.
        return codes.view(torch.uint8).index_select(0, rows).view(codes.dtype)
    return codes.index_select(0, rows)
