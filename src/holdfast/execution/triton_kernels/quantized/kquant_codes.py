# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Codes and scales of GGUF's denser blocks read inside kernels: five-bit ones, K-quants and IQ4.

Planes lie as `execution.weights.gguf_blocks` keeps them, in pieces of 32 elements whatever the kind. A lane has two
elements, i and i + 16; they share a scale unless groups are of 16. Everything that is returned is float32 and exact.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class KquantForm(NamedTuple):
    """What of a kind a kernel has to know when it is compiled."""

    bits: int
    offset: int = 0
    table: bool = False
    pieces: int = 8
    """Of a block."""
    small: int = 0
    """Bytes of small scales in a block."""
    minimum: bool = False


FORMS = {
    "Q5_0": KquantForm(5, offset=16, pieces=1),
    "Q5_1": KquantForm(5, pieces=1, minimum=True),
    "IQ4_NL": KquantForm(4, table=True, pieces=1),
    "Q2_K": KquantForm(2, small=16, minimum=True),
    "Q3_K": KquantForm(3, offset=4, small=12),
    "Q4_K": KquantForm(4, small=12, minimum=True),
    "Q5_K": KquantForm(5, small=12, minimum=True),
    "Q6_K": KquantForm(6, offset=32, small=16),
    "IQ4_XS": KquantForm(4, table=True, small=6),
}
BLOCK_FORMS = FORMS | {
    "Q4_0": KquantForm(4, offset=8, pieces=1),
    "Q4_1": KquantForm(4, pieces=1, minimum=True),
    "Q8_0": KquantForm(8, pieces=1),
}
"""Those of the less dense kinds too, whose blocks are of 32."""


@triton.jit
def as_float(code, OFFSET: tl.constexpr):
    """2^23 + code is written into the bits of a float, and 2^23 + OFFSET taken off again: cheaper than a conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def iq4_value(code):
    """Bytes of four words, each value raised by 128: a lookup in memory would take longer."""
    lower = tl.where(code < 4, 0x3F2D1801, 0x766A5D4F)
    upper = tl.where(code < 12, 0xA6998D81 - (1 << 32), 0xF1D9C5B5 - (1 << 32))
    word = tl.where(code < 8, lower, upper)
    return as_float((word >> (code % 4 * 8)) & 255, 128)


@triton.jit
def load_codes(
    quants, high, place, lane, inside, BITS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """What the two elements of each lane stand for before they are scaled; `place` counts pieces of the matrix."""
    NIBBLES: tl.constexpr = BITS >= 4
    WORDS: tl.constexpr = BITS - 4 if NIBBLES else BITS
    SHIFT: tl.constexpr = 4 if NIBBLES else 0
    first = tl.zeros_like(place * 16 + lane).to(tl.int32)
    second = first
    if NIBBLES:
        both = tl.load(quants + (place * 16 + lane), mask=inside, other=0).to(tl.int32)
        first, second = both & 15, both >> 4
    words = high if NIBBLES else quants
    for bit in tl.static_range(WORDS):
        word = tl.load(words + (place * WORDS + bit), mask=inside, other=0)
        first = first | (((word >> lane) & 1) << (SHIFT + bit))
        second = second | (((word >> (lane + 16)) & 1) << (SHIFT + bit))
    if TABLE:
        return iq4_value(first), iq4_value(second)
    else:
        return as_float(first, OFFSET), as_float(second, OFFSET)


@triton.jit
def _byte(small, at, inside):
    return tl.load(small + at, mask=inside, other=0).to(tl.int32)


@triton.jit
def _six_bits_q4_k(small, at, piece, inside):
    """(scale, minimum) of a piece: those of the last four are in two places."""
    scale = _byte(small, at + piece % 4, inside)
    minimum = _byte(small, at + 4 + piece % 4, inside)
    rest = _byte(small, at + 8 + piece % 4, inside)
    last = piece >= 4
    units = tl.where(last, (rest & 15) | ((scale >> 6) << 4), scale & 63)
    minimum_units = tl.where(last, (rest >> 4) | ((minimum >> 6) << 4), minimum & 63)
    return units, minimum_units


@triton.jit
def _six_bits_q3_k(small, at, group, inside):
    low = _byte(small, at + group % 8, inside) >> (group // 8 * 4)
    upper = _byte(small, at + 8 + group % 4, inside) >> (group // 4 * 2)
    return ((low & 15) | ((upper & 3) << 4)) - 32


@triton.jit
def _small_scales(small, at, piece, inside, KIND: tl.constexpr):
    """Whole numbers: (scale of the first 16 elements, of the others, minimum of the first, of the others)."""
    if KIND == "Q4_K" or KIND == "Q5_K":
        units, lows = _six_bits_q4_k(small, at, piece, inside)
        return units, units, lows, lows
    elif KIND == "Q2_K":
        first, second = _byte(small, at + 2 * piece, inside), _byte(small, at + 2 * piece + 1, inside)
        return first & 15, second & 15, first >> 4, second >> 4
    elif KIND == "Q3_K":
        first = _six_bits_q3_k(small, at, 2 * piece, inside)
        second = _six_bits_q3_k(small, at, 2 * piece + 1, inside)
        return first, second, first, first
    elif KIND == "Q6_K":
        first, second = _byte(small, at + 2 * piece, inside), _byte(small, at + 2 * piece + 1, inside)
        # Signed bytes.
        first, second = (first ^ 128) - 128, (second ^ 128) - 128
        return first, second, first, first
    else:
        low = _byte(small, at + 2 + piece // 2, inside) >> (piece % 2 * 4)
        upper = _byte(small, at + piece // 4, inside) >> (piece % 4 * 2)
        units = ((low & 15) | ((upper & 3) << 4)) - 32
        return units, units, units, units


@triton.jit
def load_scales(
    scales, minimums, small, place, inside,
    KIND: tl.constexpr, PIECES: tl.constexpr, SMALL: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """(scale of the first 16 elements of a piece, of the others, what is added to the first, to the others)."""
    block = place // PIECES
    scale = tl.load(scales + block, mask=inside, other=0.0).to(tl.float32)
    if SMALL == 0:
        added = scale
        if MINIMUM:
            added = tl.load(minimums + block, mask=inside, other=0.0).to(tl.float32)
        return scale, scale, added, added
    else:
        first, second, low, second_low = _small_scales(
            small, block * SMALL, (place % PIECES).to(tl.int32), inside, KIND
        )  # fmt: skip
        added = scale
        if MINIMUM:
            added = -tl.load(minimums + block, mask=inside, other=0.0).to(tl.float32)
        return (
            scale * first.to(tl.float32), scale * second.to(tl.float32),
            added * low.to(tl.float32), added * second_low.to(tl.float32),
        )  # fmt: skip
