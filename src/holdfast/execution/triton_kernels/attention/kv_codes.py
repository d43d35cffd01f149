# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Keys and values in one byte an element, on the device: float32 to float8 codes, and codes back to float16.

Both formats fit float16 without rounding, so attention over codes multiplies in float16, whatever the queries' type of
two bytes. Codes are made by integer arithmetic on every GPU, since few are made; they are read by the hardware's
conversion where there is one, and by integers below compute capability 8.9 and in the interpreter. Knows no scales.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

PLAIN, E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How pages keep an element: as torch has it, or as a code of one of the two formats."""

_FORMATS = {torch.float8_e4m3fn: E4M3.value, torch.float8_e5m2: E5M2.value}
_LEAST_CAPABILITY = (8, 9)


def format_of(stored: torch.dtype) -> int:
    return int(_FORMATS.get(stored, PLAIN.value))


def as_codes(pages: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Pages as kernels take them, and their format. Triton refuses pointers to float8 where the GPU has no units."""
    kept = format_of(pages.dtype)
    return pages if kept == PLAIN.value else pages.view(torch.uint8), kept


def converts_in_hardware() -> bool:
    """Whether the GPU that kernels are launched on reads e4m3 codes by an instruction."""
    return not triton.knobs.runtime.interpret and _capability(torch.cuda.current_device()) >= _LEAST_CAPABILITY


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """Codes (uint8) nearest to float32 numbers, halves to even; beyond the largest finite one: that. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below the smallest normal number: a sum whose last bit is worth one code rounds as the format does.
    if FORMAT == E4M3:
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    else:
        normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
        small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.minimum(tl.where(size < 0x38800000, small, normal), 0x7B)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(codes, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """float16 numbers of codes (uint8); exact."""
    if FORMAT == E5M2:
        result = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif HARDWARE:
        result = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        size = wide & 0x7F
        # Three bits of mantissa behind an exponent that is 8 less than float16's.
        shifted = (((wide & 0x80) << 8) | (size << 7)).to(tl.float16, bitcast=True)
        result = tl.where(size == 0x7F, float("nan"), shifted * 256.0).to(tl.float16)
    return result


@triton.jit
def decode_pairs(words, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """float16 numbers of two codes a word (uint16): those of the low bytes, and those of the high ones. Exact."""
    if FORMAT == E5M2:
        low = (words << 8).to(tl.float16, bitcast=True)
        high = (words & 0xFF00).to(tl.float16, bitcast=True)
    elif HARDWARE:
        # Two words in a register: their low bytes side by side, and their high bytes, for an instruction each.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lows, highs;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lows, highs}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = decode((words & 0xFF).to(tl.uint8), FORMAT, False)
        high = decode((words >> 8).to(tl.uint8), FORMAT, False)
    return low, high
