"""What the bytes of a quantized GGUF block mean, a kind a row: where its codes and scales lie, what a code stands for.

    element = (code - offset, or table[code]) · scale of its group - minimum of its group

A block has 32 elements with one scale, or 256 with a small scale (and minimum) for each group of 16 or 32, which count
units of the block's float16 scale (and minimum). Decodes with torch on any device; keeps nothing, knows no matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What IQ4's sixteen codes stand for."""

Codes = Callable[[torch.Tensor], torch.Tensor]
SmallScales = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class BlockKind:
    elements: int
    """Of a block."""
    nbytes: int
    """Of a block."""
    bits: int
    """Of a code."""
    scale_at: int
    """Byte of the float16 scale."""
    codes: Codes
    """Bytes [n, nbytes] to codes, uint8 [n, elements]; int8 where a code has eight bits."""
    offset: int = 0
    """Subtracted from a code before it is scaled."""
    table: tuple[int, ...] | None = None
    """What the codes stand for, where they are no numbers themselves."""
    minimum_at: int | None = None
    """Byte of the float16 minimum."""
    adds_minimum: bool = True
    """Else it is subtracted: so it is where minimums are small scales too."""
    group: int = 32
    """Elements that share a scale."""
    small_at: tuple[int, int] | None = None
    """First and last byte (exclusive) of the small scales."""
    small: SmallScales | None = None
    """Bytes of them [n, k] to whole numbers [n, groups], of scales and of minimums where there are any."""


def spread(stored: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """[n, k] bytes of several codes each to [n, 8·k/bits] codes: the lowest bits of `width` bytes, then their next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=stored.device).view(-1, 1)
    parts = stored.reshape(len(stored), -1, 1, width) >> shifts
    return (parts & (1 << bits) - 1).view(len(stored), -1)


def _nibbles(first: int, width: int = 16) -> Codes:
    return lambda blocks: spread(blocks[:, first:], width, 4)


def _five_bits(high: int, low: int) -> Codes:
    return lambda blocks: spread(blocks[:, low:], 16, 4) | spread(blocks[:, high : high + 4], 1, 1) << 4


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    return spread(blocks[:, 16:80], 32, 2)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    return spread(blocks[:, 32:96], 32, 2) | spread(blocks[:, :32], 32, 1) << 2


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return spread(blocks[:, 48:], 32, 4) | spread(blocks[:, 16:48], 32, 1) << 4


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    return spread(blocks[:, :128], 64, 4) | spread(blocks[:, 128:192], 32, 2) << 4


def _small_q2_k(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return stored & 15, stored >> 4


def _small_q3_k(stored: torch.Tensor) -> tuple[torch.Tensor, None]:
    low, high = spread(stored[:, :8], 8, 4), spread(stored[:, 8:], 4, 2)
    return (low | high << 4).to(torch.int8) - 32, None


def _small_q4_k(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Six bits each: those of the last four groups are in two pieces."""
    scales, minimums, rest = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    return (
        torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), 1),
        torch.cat((minimums & 63, rest >> 4 | minimums >> 2 & 48), 1),
    )


def _small_q6_k(stored: torch.Tensor) -> tuple[torch.Tensor, None]:
    return stored.view(torch.int8), None


def _small_iq4_xs(stored: torch.Tensor) -> tuple[torch.Tensor, None]:
    low, high = spread(stored[:, 2:], 1, 4), spread(stored[:, :2], 1, 2)
    return (low | high << 4).to(torch.int8) - 32, None


KINDS = {
    "Q8_0": BlockKind(32, 34, 8, 0, lambda blocks: blocks[:, 2:].view(torch.int8)),
    "Q4_0": BlockKind(32, 18, 4, 0, _nibbles(2), offset=8),
    "Q4_1": BlockKind(32, 20, 4, 0, _nibbles(4), minimum_at=2),
    "Q5_0": BlockKind(32, 22, 5, 0, _five_bits(2, 6), offset=16),
    "Q5_1": BlockKind(32, 24, 5, 0, _five_bits(4, 8), minimum_at=2),
    "IQ4_NL": BlockKind(32, 18, 4, 0, _nibbles(2), table=IQ4_VALUES),
    "Q2_K": BlockKind(
        256, 84, 2, 80, _q2_k, minimum_at=82, adds_minimum=False, group=16, small_at=(0, 16), small=_small_q2_k
    ),
    "Q3_K": BlockKind(256, 110, 3, 108, _q3_k, offset=4, group=16, small_at=(96, 108), small=_small_q3_k),
    "Q4_K": BlockKind(
        256, 144, 4, 0, _nibbles(16, 32), minimum_at=2, adds_minimum=False, small_at=(4, 16), small=_small_q4_k
    ),
    "Q5_K": BlockKind(256, 176, 5, 0, _q5_k, minimum_at=2, adds_minimum=False, small_at=(4, 16), small=_small_q4_k),
    "Q6_K": BlockKind(256, 210, 6, 208, _q6_k, offset=32, group=16, small_at=(192, 208), small=_small_q6_k),
    "IQ4_XS": BlockKind(256, 136, 4, 0, _nibbles(8), table=IQ4_VALUES, small_at=(2, 8), small=_small_iq4_xs),
}


def group_scales(
    kind: BlockKind, scales: torch.Tensor, minimums: torch.Tensor | None, small: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and minimums of the groups in float32 [n, groups], minimums to be added; from float16 [n, 1] of the
    blocks and the bytes [n, k] of their small scales. Every product is exact."""
    wide, wide_minimums = scales.float(), None if minimums is None else minimums.float()
    if kind.small is None or small is None:
        return wide, wide_minimums
    units, minimum_units = kind.small(small)
    if wide_minimums is not None and minimum_units is not None:
        wide_minimums = -(wide_minimums * minimum_units)
    return wide * units, wide_minimums


def fill_elements(
    kind: BlockKind, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Elements into `out`, contiguous float32 [n, groups, group], from codes [n, groups, group]. One rounding an
    operation, as the reference does it."""
    if kind.table is not None:
        out.copy_(torch.tensor(kind.table, dtype=torch.float32, device=codes.device)[codes.int()])
    else:
        out.copy_(codes)
    if kind.offset:
        out -= kind.offset
    out *= scales.unsqueeze(-1)
    if minimums is not None:
        out += minimums.unsqueeze(-1)
