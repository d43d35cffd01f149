"""How a matrix of a quantized checkpoint lies in memory: small codes, and scales that groups of them share.

    element = (value of its code - zero point of its group) · scale of its group

AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes and MXFP4 all become this when they are loaded, so that one family of
kernels reads them all. Declared here once, counted by the planner, allocated by execution. No torch.

    codes    int4, nf4, mxfp4   uint8 [rows, columns / 32, 16]: elements i and i + 16 of 32 in the halves of a byte
             int8, fp8          int8 or float8_e4m3fn [rows, columns]
    scales   [rows / group_rows, columns / group]
    zeros    as many as scales. int4: uint8, codes are 0 to 15 and less this; without zeros, less 8. int8: int8
    order    int32 [columns]: which input each column takes (GPTQ's act-order puts columns of a group side by side);
             of experts, whose rows lie one below the other, [experts, columns]; of one rank's columns among all inputs
    inputs   float32 [1]: what inputs are divided by before they are rounded, where the checkpoint has it

GGUF's blocks have layouts of their own (`layouts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Codes = Literal["int4", "int8", "fp8", "nf4", "mxfp4"]
ScaleType = Literal["float32", "float16", "bfloat16", "uint8"]
Inputs = Literal["plain", "fp8", "int8"]

PIECE = 32
"""Columns whose four-bit codes lie together."""
_TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "int32": 4}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a matrix; `dtype` as torch calls it."""

    name: Literal["codes", "scales", "zeros", "order", "inputs"]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _TYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLayout:
    codes: Codes
    scales: ScaleType = "float32"
    """uint8: MXFP4's powers of two, 2 ** (scale - 127)."""
    group: int = 0
    """Columns that share a scale; 0: all of a row."""
    group_rows: int = 1
    """Rows that share one: 128 in square blocks of FP8. A scale for a whole matrix is kept as one for every row."""
    zeros: bool = False
    ordered: bool = False
    inputs: Inputs = "plain"
    """What inputs are rounded to before they are multiplied, each row with a scale of its own unless one is stored."""
    static_inputs: bool = False
    input_group: int = 0
    """Columns of an input that share a scale: 128 with square blocks of FP8; 0: all of a row."""
    input_bound: float = 0.0
    """No input counts for more when the scale of a row is chosen, larger ones are cut off (fbgemm); 0: no bound."""
    input_powers: bool = False
    """Scales of inputs are powers of two, the next above (DeepSeek's ue8m0)."""
    divided_inputs: bool = False
    """Of one rank's columns: inputs come divided by the scale of the whole row, which ranks find together; what is
    stored to divide them by (`static_inputs`) is 1."""
    gathered_inputs: bool = False
    """Of one rank's columns in an order of their own, whose groups are of inputs that lie anywhere: ranks gather the
    whole row, and `order` says which of it each column takes."""

    @property
    def four_bits(self) -> bool:
        return self.codes in ("int4", "nf4", "mxfp4")

    def planes(self, rows: int, columns: int, experts: int = 0) -> tuple[Plane, ...]:
        """Of one matrix, or of those of so many experts, which have `rows` together."""
        scales = (-(-rows // self.group_rows), -(-columns // (self.group or columns)))
        found = [
            Plane("codes", (rows, columns // PIECE, PIECE // 2), "uint8")
            if self.four_bits
            else Plane("codes", (rows, columns), "int8" if self.codes == "int8" else "float8_e4m3fn"),
            Plane("scales", scales, self.scales),
        ]
        if self.zeros:
            found.append(Plane("zeros", scales, "int8" if self.codes == "int8" else "uint8"))
        if self.ordered:
            found.append(Plane("order", (experts, columns) if experts else (columns,), "int32"))
        if self.static_inputs:
            found.append(Plane("inputs", (1,), "float32"))
        return tuple(found)

    def compiles(self, columns: int) -> bool:
        """Whether compiled products (CPU) read a matrix with rows of so many elements where it lies: in pieces of 32
        columns that share a scale, in whole groups. Not where inputs are rounded to what weights are not in, nor in
        groups that columns in an order of their own would tear apart, nor with zero points of what are no integers."""
        groups = [size for size in (self.group, self.input_group) if size]
        pieces = columns % PIECE == 0 and all(size % PIECE == 0 and columns % size == 0 for size in groups)
        natural = self.inputs == "plain" or (self.inputs == "fp8") == (self.codes in ("fp8", "nf4"))
        zeros = not self.zeros or (self.codes in ("int4", "int8") and self.group_rows == 1)
        return pieces and natural and zeros and not (self.ordered and self.input_group)

    @property
    def whole_numbers(self) -> bool:
        """Whether compiled products (CPU) multiply codes as bytes on every machine that has such instructions: eight
        bits less a zero point do not fit one, nor do rows of a bundle whose scales begin at any row."""
        codes = self.codes in ("int4", "mxfp4") or (self.codes == "int8" and not self.zeros)
        return codes and (self.group_rows == 1 or self.group_rows % 16 == 0)

    def stacks(self, rows: Sequence[int]) -> bool:
        """Whether matrices of so many rows, all in this layout, can be one: not where each takes its inputs in an order
        of its own, nor where a square block would reach over two."""
        return not self.ordered and all(count % self.group_rows == 0 for count in rows[:-1])

    @property
    def shared_bytes(self) -> int:
        """Of what a stack has once, and not for each of its matrices."""
        return _TYPE_BYTES["float32"] if self.static_inputs else 0

    def saved_bytes(self, rows: int, columns: int, experts: int = 0) -> int:
        """Of zero points that lie two to a byte where a layer waits that does not stay on its GPU."""
        zeros = [plane.nbytes for plane in self.planes(rows, columns, experts) if plane.name == "zeros"]
        return sum(zeros) // 2 if self.codes == "int4" and sum(zeros) % 2 == 0 else 0

    def bytes_for(self, rows: int, columns: int, experts: int = 0) -> int:
        return sum(plane.nbytes for plane in self.planes(rows, columns, experts))

    def __str__(self) -> str:
        reach = f" g{self.group}" if self.group and self.group_rows == 1 else ""
        if self.group_rows > 1:
            reach = f" {self.group_rows}x{self.group}"
        return f"{self.codes}{reach}"
