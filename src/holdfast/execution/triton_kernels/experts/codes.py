# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What the codes of scaled matrices stand for, in kernels with experts: before scales, in the type that is multiplied.

Codes lie as `footprint.scaled_layouts` draws them. Whole numbers, MXFP4 and FP8 are exact in every type; NF4's values
are rounded to it. Knows no products.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BF16_LOW: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, one;
mov.b32 one, 0x3F803F80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, $3;
fma.rn.bf16x2 $1, b, one, $4;
}
""")
"""128 + code has the code in its last bits; what is added takes 128 and the zero point off again. Four codes at once:
conversions of whole numbers run at a fraction of the speed."""
_BF16_HIGH: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, one;
mov.b32 one, 0x3F803F80;
shr.u32 a, $2, 4;
prmt.b32 b, a, 0, 0x4342;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, $3;
fma.rn.bf16x2 $1, b, one, $4;
}
""")
_FP16_LOW: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
add.rn.f16x2 $0, a, $3;
add.rn.f16x2 $1, b, $4;
}
""")
"""The same from 1024 on."""
_FP16_HIGH: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b;
shr.u32 a, $2, 4;
prmt.b32 b, a, 0, 0x4342;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
add.rn.f16x2 $0, a, $3;
add.rn.f16x2 $1, b, $4;
}
""")


@triton.jit
def _to_bf16(codes, zero, CODE: tl.constexpr):
    added = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), codes.shape)
    return tl.inline_asm_elementwise(CODE, "=r,=r,r,r,r", [codes, added], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _to_fp16(codes, zero, CODE: tl.constexpr):
    added = tl.broadcast_to((-1024.0 - zero).to(tl.float16), codes.shape)
    return tl.inline_asm_elementwise(CODE, "=r,=r,r,r,r", [codes, added], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def int4_values(codes, zero, kind: tl.constexpr, ASSEMBLED: tl.constexpr):
    """(low, high): codes in the halves of each byte, less zero (whole numbers in float32, which broadcast to `codes`).
    A piece of assembly for each: the compiler moves either to where it is multiplied, but not one with two results."""
    if ASSEMBLED and kind == tl.bfloat16:
        return _to_bf16(codes, zero, _BF16_LOW), _to_bf16(codes, zero, _BF16_HIGH)
    elif ASSEMBLED and kind == tl.float16:
        return _to_fp16(codes, zero, _FP16_LOW), _to_fp16(codes, zero, _FP16_HIGH)
    else:
        return ((codes & 15).to(tl.float32) - zero).to(kind), ((codes >> 4).to(tl.float32) - zero).to(kind)


@triton.jit
def mxfp4_value(code, kind: tl.constexpr):
    """A sign, two bits of exponent, one of mantissa; an exponent of 0 is that of 1, without the leading one."""
    code = code.to(tl.int32)
    size = code & 7
    whole = ((size >> 1) + 126) << 23 | (size & 1) << 22
    value = tl.where(size > 1, whole.to(tl.float32, bitcast=True), size.to(tl.float32) * 0.5)
    return tl.where(code > 7, -value, value).to(kind)


@triton.jit
def nf4_value(code, kind: tl.constexpr):
    """By the four bits of a code, one after the other: a lookup in memory would take longer."""
    one, two, four = (code & 1) != 0, (code & 2) != 0, (code & 4) != 0
    lowest = tl.where(
        two, tl.where(one, -0.39491748809814453, -0.5250730514526367), tl.where(one, -0.6961928009986877, -1.0)
    )
    low = tl.where(
        two, tl.where(one, 0.0, -0.09105003625154495), tl.where(one, -0.18477343022823334, -0.28444138169288635)
    )
    high = tl.where(
        two, tl.where(one, 0.33791524171829224, 0.24611230194568634),
        tl.where(one, 0.16093020141124725, 0.07958029955625534),
    )  # fmt: skip
    highest = tl.where(
        two, tl.where(one, 1.0, 0.7229568362236023), tl.where(one, 0.5626170039176941, 0.44070982933044434)
    )
    negative, positive = tl.where(four, low, lowest), tl.where(four, highest, high)
    return tl.where((code & 8) != 0, positive, negative).to(tl.float32).to(kind)


@triton.jit
def fp8_value(code, kind: tl.constexpr):
    """e4m3 by its bits (uint8), as below compute capability 8.9 nothing converts them. 127 and 255 are no numbers."""
    code = code.to(tl.int32)
    size = code & 127
    # The exponent is written as it is, 120 too small.
    value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where(size == 127, float("nan"), value)
    return tl.where(code > 127, -value, value).to(kind)


@triton.jit
def fp8_code(value):
    """e4m3's bits (uint8) of float32 numbers that are no larger than 448: to the nearest, halves to even."""
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes count steps of 2**-9; adding 1.5 * 2**23 rounds to whole numbers.
    steps = (tl.abs(value) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    size = tl.where(tl.abs(value) < 0.015625, steps, normal)
    return tl.where(value < 0, size | 128, size).to(tl.uint8)


@triton.jit
def scales_of(scales, at, POWERS: tl.constexpr):
    """float32. POWERS: stored as bytes, 2 ** (byte - 127)."""
    found = tl.load(scales + at)
    if POWERS:
        found = found.to(tl.int32)
        return tl.where(found == 0, 0x00400000, found << 23).to(tl.float32, bitcast=True)
    else:
        return found.to(tl.float32)


@triton.jit
def scaled_factors(
    codes, zeros, zero_at, FORM: tl.constexpr, kind: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """What codes [lines, bytes] stand for: (of the first halves of pieces, of the second) where they have four bits,
    else the same twice."""
    if FORM == "int4":
        zero = tl.full((1, 1), 8.0, tl.float32)
        if ZEROS:
            zero = tl.load(zeros + zero_at).to(tl.float32)[:, None]
        return int4_values(codes, zero, kind, ASSEMBLED)
    elif FORM == "nf4":
        return nf4_value(codes & 15, kind), nf4_value(codes >> 4, kind)
    elif FORM == "mxfp4":
        return mxfp4_value(codes & 15, kind), mxfp4_value(codes >> 4, kind)
    elif FORM == "fp8":
        values = fp8_value(codes, kind)
        return values, values
    else:
        values = codes.to(kind)
        return values, values
