"""How numbers lie in a stored tensor: elements and bytes of one block. Decodes nothing.

Every GGUF type is here, so that bytes can be counted; ENGINE_LAYOUTS are those the engine computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    block_elements: int
    """A row is a whole number of blocks; 1 for plain numbers."""
    block_bytes: int

    @property
    def quantized(self) -> bool:
        return self.block_elements > 1

    def bytes_for(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of a tensor of this shape; None when its rows are not whole blocks."""
        if shape and shape[-1] % self.block_elements:
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
}

LAYOUTS: dict[str, Layout] = {name: Layout(name, elements, size) for name, (elements, size, _) in _TABLE.items()}
GGUF_LAYOUTS: dict[int, Layout] = {
    number: LAYOUTS[name] for name, (_, _, number) in _TABLE.items() if number is not None
}
SAFETENSORS_LAYOUTS = frozenset(name for name, layout in LAYOUTS.items() if not layout.quantized)
ENGINE_LAYOUTS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"})


def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise CheckpointError(f"{name!r} is not a known way to store numbers", needed="one of " + ", ".join(LAYOUTS))
    return LAYOUTS[name]
