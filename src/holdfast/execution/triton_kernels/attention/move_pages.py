"""Copies whole KV pages to others, on the device and without memory of its own: a pool becomes smaller when there is
none to be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from holdfast.records import BlockCopy

_BLOCK = 4096


@triton.jit(do_not_specialize=["size"])
def _copy(pages, places, size, BLOCK: tl.constexpr):
    pair = places + 2 * tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(pair).to(tl.int64) * size, tl.load(pair + 1).to(tl.int64) * size
    words = tl.load(pages + source + offsets, mask=offsets < size)
    tl.store(pages + target + offsets, words, mask=offsets < size)


def move_device_pages(pages: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """`pages` [block, ...], contiguous, of whole words of four bytes each. None of them is both read and written."""
    _move(pages, [(copy.source, copy.target) for copy in copies])


def load_mover(pages: torch.Tensor) -> None:
    """What the driver loads when it is first used, and may find no memory for then. Nothing is changed."""
    _move(pages, [(0, 0)])


def _move(pages: torch.Tensor, moves: list[tuple[int, int]]) -> None:
    words = pages.view(torch.uint8).view(torch.int32).view(len(pages), -1)
    size, places = words.shape[1], torch.tensor(moves, dtype=torch.int32).to(pages.device)
    _copy[(len(moves), triton.cdiv(size, _BLOCK))](words, places, size, BLOCK=_BLOCK)
