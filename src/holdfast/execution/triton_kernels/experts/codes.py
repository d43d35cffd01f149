# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What the codes of scaled matrices stand for, in kernels with experts: before scales, in the type that is multiplied.

Codes lie as `footprint.scaled_layouts` draws them. Whole numbers, MXFP4 and FP8 are exact in every type; NF4's values
are rounded to it. Knows no products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.weights.scaled_matrix import MXFP4_VALUES, NF4_VALUES

_NF4: tl.constexpr = tl.constexpr(NF4_VALUES)
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


_FP8_TO_FP16: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, c, d, power;
mov.b32 power, 0x5C005C00;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 1;
shr.u32 d, b, 1;
and.b32 c, c, 0x3F803F80;
and.b32 d, d, 0x3F803F80;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.rn.f16x2 $0, a, power;
mul.rn.f16x2 $1, b, power;
}
""")
"""The sign goes to the front and the exponent is written as it is, 8 too small, which 2 ** 8 makes up for. Codes that
are no numbers, which neither weights nor rounded inputs have, become 480."""
_FP8_TO_BF16: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, c, d, power, nothing;
mov.b32 power, 0x7B807B80;
mov.b32 nothing, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07F007F0;
and.b32 d, d, 0x07F007F0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
fma.rn.bf16x2 $0, a, power, nothing;
fma.rn.bf16x2 $1, b, power, nothing;
}
""")
"""The same, 120 too small."""


def _lookup(values: tuple[float, ...], kind: torch.dtype, *, high: bool) -> tl.constexpr:
    """Assembly that looks four codes up in a table of sixteen numbers, which it keeps in registers, low bytes and high
    bytes apart: a byte permutation takes four bytes out of eight by the last three bits of each code, and the fourth
    bit says which half of the table counts."""
    numbers = torch.tensor(values, dtype=torch.float32).to(kind).view(torch.int16).tolist()
    words = [
        sum((number >> shift & 255) << 8 * place for place, number in enumerate(numbers[first : first + 4]))
        for shift in (0, 8)
        for first in (0, 4, 8, 12)
    ]
    names = ("l0", "l1", "l2", "l3", "h0", "h1", "h2", "h3")
    table = "\n".join(f"mov.b32 {name}, {word};" for name, word in zip(names, words, strict=True))
    code = "shr.u32 code, $2, 4;" if high else "mov.b32 code, $2;"
    return tl.constexpr(f"""
{{
.reg .b32 code, chosen, upper, low, other, l0, l1, l2, l3, h0, h1, h2, h3;
{table}
{code}
and.b32 code, code, 0x0F0F0F0F;
shl.b32 upper, code, 4;
prmt.b32 upper, upper, 0, 0xBA98;
shr.u32 chosen, code, 4;
or.b32 chosen, chosen, code;
prmt.b32 chosen, chosen, 0, 0x4420;
and.b32 chosen, chosen, 0x7777;
prmt.b32 low, l0, l1, chosen;
prmt.b32 other, l2, l3, chosen;
lop3.b32 low, upper, other, low, 0xCA;
prmt.b32 code, h0, h1, chosen;
prmt.b32 other, h2, h3, chosen;
lop3.b32 code, upper, other, code, 0xCA;
prmt.b32 $0, low, code, 0x5140;
prmt.b32 $1, low, code, 0x7362;
}}
""")


_NF4_BF16_LOW: tl.constexpr = _lookup(NF4_VALUES, torch.bfloat16, high=False)
_NF4_BF16_HIGH: tl.constexpr = _lookup(NF4_VALUES, torch.bfloat16, high=True)
_NF4_FP16_LOW: tl.constexpr = _lookup(NF4_VALUES, torch.float16, high=False)
_NF4_FP16_HIGH: tl.constexpr = _lookup(NF4_VALUES, torch.float16, high=True)
_MXFP4_BF16_LOW: tl.constexpr = _lookup(MXFP4_VALUES, torch.bfloat16, high=False)
_MXFP4_BF16_HIGH: tl.constexpr = _lookup(MXFP4_VALUES, torch.bfloat16, high=True)
_MXFP4_FP16_LOW: tl.constexpr = _lookup(MXFP4_VALUES, torch.float16, high=False)
_MXFP4_FP16_HIGH: tl.constexpr = _lookup(MXFP4_VALUES, torch.float16, high=True)


@triton.jit
def _bf16_from(codes, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _fp16_from(codes, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


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
def _mxfp4_value(code, kind: tl.constexpr):
    """A sign, two bits of exponent, one of mantissa; an exponent of 0 is that of 1, without the leading one."""
    code = code.to(tl.int32)
    size = code & 7
    whole = ((size >> 1) + 126) << 23 | (size & 1) << 22
    value = tl.where(size > 1, whole.to(tl.float32, bitcast=True), size.to(tl.float32) * 0.5)
    return tl.where(code > 7, -value, value).to(kind)


@triton.jit
def mxfp4_values(codes, kind: tl.constexpr, ASSEMBLED: tl.constexpr):
    """As `int4_values`."""
    if ASSEMBLED and kind == tl.bfloat16:
        return _bf16_from(codes, _MXFP4_BF16_LOW), _bf16_from(codes, _MXFP4_BF16_HIGH)
    elif ASSEMBLED and kind == tl.float16:
        return _fp16_from(codes, _MXFP4_FP16_LOW), _fp16_from(codes, _MXFP4_FP16_HIGH)
    else:
        return _mxfp4_value(codes & 15, kind), _mxfp4_value(codes >> 4, kind)


@triton.jit
def _nf4_value(code, kind: tl.constexpr):
    """One after the other: exact in float32."""
    value = tl.zeros(code.shape, tl.float32)
    for number in tl.static_range(16):
        value = tl.where(code == number, _NF4[number], value)
    return value.to(kind)


@triton.jit
def nf4_values(codes, kind: tl.constexpr, ASSEMBLED: tl.constexpr):
    """As `int4_values`."""
    if ASSEMBLED and kind == tl.bfloat16:
        return _bf16_from(codes, _NF4_BF16_LOW), _bf16_from(codes, _NF4_BF16_HIGH)
    elif ASSEMBLED and kind == tl.float16:
        return _fp16_from(codes, _NF4_FP16_LOW), _fp16_from(codes, _NF4_FP16_HIGH)
    else:
        return _nf4_value(codes & 15, kind), _nf4_value(codes >> 4, kind)


@triton.jit
def fp8_values(codes, kind: tl.constexpr, ASSEMBLED: tl.constexpr):
    """e4m3 by its bits (uint8), as below compute capability 8.9 nothing converts them."""
    if ASSEMBLED and kind == tl.bfloat16:
        return _bf16_from(codes, _FP8_TO_BF16)
    elif ASSEMBLED and kind == tl.float16:
        return _fp16_from(codes, _FP8_TO_FP16)
    else:
        wide = codes.to(tl.int32)
        bits = (wide & 128) << 24 | (wide & 127) << 20
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)


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
def wide_scales(stored, POWERS: tl.constexpr):
    """float32. POWERS: stored as bytes, 2 ** (byte - 127)."""
    if POWERS:
        stored = stored.to(tl.int32)
        return tl.where(stored == 0, 0x00400000, stored << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def load_scales(scales, zeros, at, ZEROS: tl.constexpr):
    """(scales, zero points) as they are stored; without zero points the scales twice."""
    scale = tl.load(scales + at)
    zero = scale
    if ZEROS:
        zero = tl.load(zeros + at)
    return scale, zero


@triton.jit
def step_scales(
    scales, zeros, at, first, byte, LENGTH: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FINE: tl.constexpr
):  # fmt: skip
    """The same of the columns from `first` on, of LENGTH, in groups of GROUP (0: all in one). FINE: as many as codes
    [lines, bytes], each 32 columns in 16 bytes with one of their own. Beyond the last column the last group's."""
    if FINE:
        found = tl.load(scales + at[:, None] + tl.minimum(first // 32 + byte // 16, LENGTH // 32 - 1)[None, :])
        return found, found
    elif GROUP > 0:
        return load_scales(scales, zeros, at + tl.minimum(first, LENGTH - 1) // GROUP, ZEROS)
    else:
        return load_scales(scales, zeros, at, ZEROS)


@triton.jit
def tile_scales(stored, kind: tl.constexpr, POWERS: tl.constexpr, FINE: tl.constexpr):
    """What `step_scales` loaded, as numbers that a tile of codes is multiplied by."""
    if FINE:
        return wide_scales(stored, POWERS).to(kind)
    else:
        return wide_scales(stored, POWERS)[:, None].to(kind)


@triton.jit
def scaled_factors(
    codes, zero, FORM: tl.constexpr, kind: tl.constexpr, ZEROS: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """What codes [lines, bytes] stand for: (of the first halves of pieces, of the second) where they have four bits,
    else the same twice. `zero` [lines]: of whole numbers, where ZEROS are stored."""
    if FORM == "int4":
        taken = tl.full((1, 1), 8.0, tl.float32)
        if ZEROS:
            taken = zero.to(tl.float32)[:, None]
        return int4_values(codes, taken, kind, ASSEMBLED)
    elif FORM == "nf4":
        return nf4_values(codes, kind, ASSEMBLED)
    elif FORM == "mxfp4":
        return mxfp4_values(codes, kind, ASSEMBLED)
    elif FORM == "fp8":
        values = fp8_values(codes, kind, ASSEMBLED)
        return values, values
    else:
        values = codes.to(kind)
        if ZEROS:
            values -= zero.to(kind)[:, None]
        return values, values
