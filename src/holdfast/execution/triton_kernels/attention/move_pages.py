"""Copies whole KV pages to others, on the device and without memory of its own: a pool becomes smaller when there is
none to be had."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(do_not_specialize=["size"])
def _copy(pages, sources, targets, size, BLOCK: tl.constexpr):
    move, offsets = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(sources + move).to(tl.int64) * size, tl.load(targets + move).to(tl.int64) * size
    words = tl.load(pages + source + offsets, mask=offsets < size)
    tl.store(pages + target + offsets, words, mask=offsets < size)


def move_device_pages(pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`pages` [block, ...], contiguous, of whole words of four bytes each. `sources`, `targets` [move] int32, on the
    device as well: none is in both, but for one that is moved to itself."""
    words = pages.view(torch.uint8).view(torch.int32).view(len(pages), -1)
    _copy[(len(sources), triton.cdiv(words.shape[1], _BLOCK))](words, sources, targets, words.shape[1], BLOCK=_BLOCK)
