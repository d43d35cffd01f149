"""How numbers lie in a stored tensor: elements and bytes of one block. Decodes nothing.

Every GGUF and safetensors type is here, so that bytes can be counted; ENGINE_LAYOUTS are those the engine
computes with. Matrices that a quantizer spreads over several tensors are in quantized_tensors.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    block_elements: int
    """1 for plain numbers."""
    block_bytes: int
    whole_rows: bool = True
    """A row is a whole number of blocks; else only the tensor is, as with numbers smaller than a byte."""

    @property
    def quantized(self) -> bool:
        """A block has a scale of its own; numbers that are merely small have none."""
        return self.block_elements > 1 and self.whole_rows

    def bytes_for(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of a tensor of this shape; None when it is not whole blocks."""
        if self.whole_rows and shape and shape[-1] % self.block_elements:
            return None
        elements = prod(shape)
        if elements % self.block_elements:
            return None
        return elements // self.block_elements * self.block_bytes


# name: (elements of a block, bytes of a block, type number in GGUF or None)
_TABLE: dict[str, tuple[int, int, int | None]] = {
    "F64": (1, 8, 28),
    "F32": (1, 4, 0),
    "F16": (1, 2, 1),
    "BF16": (1, 2, 30),
    "F8_E4M3": (1, 1, None),
    "F8_E5M2": (1, 1, None),
    "F8_E8M0": (1, 1, None),
    "F8_E4M3FNUZ": (1, 1, None),
    "F8_E5M2FNUZ": (1, 1, None),
    "C64": (1, 8, None),
    "BOOL": (1, 1, None),
    "I8": (1, 1, 24),
    "I16": (1, 2, 25),
    "I32": (1, 4, 26),
    "I64": (1, 8, 27),
    "U8": (1, 1, None),
    "U16": (1, 2, None),
    "U32": (1, 4, None),
    "U64": (1, 8, None),
    "Q4_0": (32, 18, 2),
    "Q4_1": (32, 20, 3),
    "Q5_0": (32, 22, 6),
    "Q5_1": (32, 24, 7),
    "Q8_0": (32, 34, 8),
    "Q8_1": (32, 40, 9),
    "Q2_K": (256, 84, 10),
    "Q3_K": (256, 110, 11),
    "Q4_K": (256, 144, 12),
    "Q5_K": (256, 176, 13),
    "Q6_K": (256, 210, 14),
    "Q8_K": (256, 292, 15),
    "IQ2_XXS": (256, 66, 16),
    "IQ2_XS": (256, 74, 17),
    "IQ3_XXS": (256, 98, 18),
    "IQ1_S": (256, 50, 19),
    "IQ4_NL": (32, 18, 20),
    "IQ3_S": (256, 110, 21),
    "IQ2_S": (256, 82, 22),
    "IQ4_XS": (256, 136, 23),
    "IQ1_M": (256, 56, 29),
    "TQ1_0": (256, 54, 34),
    "TQ2_0": (256, 66, 35),
    "MXFP4": (32, 17, 39),
    "NVFP4": (64, 36, 40),
    "Q1_0": (128, 18, 41),
    "Q2_0": (64, 18, 42),
}

# Floats smaller than a byte, packed without gaps: name: (elements, bytes) of the least whole number of bytes.
_SMALL_FLOATS: dict[str, tuple[int, int]] = {"F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}

RETIRED_GGUF_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that old files carry and no reader supports any more."""

LAYOUTS: dict[str, Layout] = {
    **{name: Layout(name, elements, size) for name, (elements, size, _) in _TABLE.items()},
    **{name: Layout(name, elements, size, whole_rows=False) for name, (elements, size) in _SMALL_FLOATS.items()},
}
GGUF_LAYOUTS: dict[int, Layout] = {
    number: LAYOUTS[name] for name, (_, _, number) in _TABLE.items() if number is not None
}
SAFETENSORS_LAYOUTS = frozenset(name for name, layout in LAYOUTS.items() if not layout.quantized)
ENGINE_LAYOUTS = frozenset({
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
})  # fmt: skip


def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise CheckpointError(f"{name!r} is not a known tensor type", needed="one of " + ", ".join(LAYOUTS))
    return LAYOUTS[name]
