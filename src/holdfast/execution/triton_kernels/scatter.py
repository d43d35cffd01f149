"""Writes numbers to places of a vector. Nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _scatter(target, places, values, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(places + index, mask=inside, other=0)
    tl.store(target + place, tl.load(values + index, mask=inside, other=0), mask=inside)


def scatter_words(target: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """target[places] = values; all int32, places distinct."""
    count = len(places)
    _scatter[((count + _BLOCK - 1) // _BLOCK,)](target, places, values, count, BLOCK=_BLOCK)
