# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Codes and scales of `footprint.scaled_layouts` read inside kernels.

What a code stands for, less its zero point, is exact in every type that inputs have (of eight bits it is 255 at most,
and bfloat16 holds whole numbers to 256), but for NF4's table, which is rounded to it. FP8 is decoded by integers: GPUs
before sm_89 have no conversion. ASSEMBLY: two elements at a time by PTX, for 16-bit types; the plain form says the same
and is what the interpreter runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.execution.triton_kernels.quantized.kquant_codes import as_float
from holdfast.execution.weights.scaled_matrix import NF4_VALUES

NF4 = tl.constexpr(NF4_VALUES)
SPREAD_BFLOAT16 = tl.constexpr("""
{
.reg .b32 first, second;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
lop3.b32 $0, first, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 $2, first, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, second, 0x000f000f, 0x43004300, 0xea;
}
""")
"""Four bytes: their low halves plus 128, then their high halves plus 128. A code in the last bits of 128.0 adds
itself."""
SPREAD_FLOAT16 = tl.constexpr("""
{
.reg .b32 first, second;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
lop3.b32 $0, first, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, second, 0x000f000f, 0x64006400, 0xea;
shr.u32 first, first, 4;
shr.u32 second, second, 4;
lop3.b32 $2, first, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, second, 0x000f000f, 0x64006400, 0xea;
}
""")
"""The same plus 1024."""


@triton.jit
def spread_halves(packed, kind: tl.constexpr):
    """(low halves, high halves) of bytes in `kind`, raised by 128 in bfloat16 and by 1024 in float16."""
    if kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            SPREAD_BFLOAT16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            SPREAD_FLOAT16, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )  # fmt: skip
    return low, high


@triton.jit
def _nf4(code, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """A tree of choices: a lookup in memory would not stay in registers."""
    if COUNT == 1:
        return tl.full(code.shape, NF4[FIRST], tl.float32)
    else:
        HALF: tl.constexpr = COUNT // 2
        return tl.where((code & HALF) != 0, _nf4(code, FIRST + HALF, HALF), _nf4(code, FIRST, HALF))


@triton.jit
def _four_bits(code, CODES: tl.constexpr):
    """float32"""
    if CODES == "int4":
        return as_float(code, 0)
    elif CODES == "nf4":
        return _nf4(code, 0, 16)
    else:
        # Twice what three bits stand for: 0, 1, 2, 3, 4, 6, 8, 12. The fourth is the sign.
        value = as_float((0xC8643210 - (1 << 32) >> ((code & 7) * 4)) & 15, 0) * 0.5
        return tl.where((code & 8) != 0, -value, value)


@triton.jit
def four_bit_values(packed, zero, kind: tl.constexpr, CODES: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(values of the low halves of bytes, of the high ones) in `kind`; int4's less `zero`, in float32."""
    if ASSEMBLY and CODES == "int4":
        RAISED: tl.constexpr = 128.0 if kind == tl.bfloat16 else 1024.0
        low, high = spread_halves(packed, kind)
        taken = (zero + RAISED).to(kind)
        return low - taken, high - taken
    else:
        wide = packed.to(tl.int32)
        low, high = _four_bits(wide & 15, CODES), _four_bits(wide >> 4, CODES)
        if CODES == "int4":
            low, high = low - zero, high - zero
        return low.to(kind), high.to(kind)


@triton.jit
def eight_bit_values(codes, kind: tl.constexpr, CODES: tl.constexpr):
    """`codes`: bytes, whatever they stand for."""
    wide = codes.to(tl.int32) & 255
    if CODES == "int8":
        return as_float(wide ^ 128, 128).to(kind)
    else:
        # Four bits of exponent, three of mantissa: in place in a float, but for the exponent's origin. Codes without
        # an exponent are eighths of 2^-6; the one with all bits set is no number.
        bits = (wide & 127) << 20
        normal = (bits + (120 << 23)).to(tl.float32, bitcast=True)
        small = (bits + (121 << 23)).to(tl.float32, bitcast=True) - 0.015625
        value = tl.where((wide & 120) == 0, small, normal)
        value = tl.where((wide & 127) == 127, float("nan"), value)
        return tl.where((wide & 128) != 0, -value, value).to(kind)


@triton.jit
def scale_values(stored):
    """float32; of bytes 2 ** (byte - 127)."""
    if stored.dtype == tl.uint8:
        power = stored.to(tl.int32)
        return tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)
