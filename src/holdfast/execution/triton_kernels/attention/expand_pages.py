"""float8 pages of the rows of a step as numbers of two bytes, page after page: for kernels that know no codes.

Every code fits both float16 and bfloat16 without rounding. Knows no scales: they go into the scores and the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import as_codes, converts_in_hardware, decode

_CHUNK = 4096


@triton.jit(do_not_specialize=["place", "places", "window", "table_stride"])
def _expand(
    pages, tables, slots, starts, counts, page_firsts, out, place, places, window, table_stride,
    BLOCK_TOKENS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + row)
    first = 0
    if WINDOWED:
        first = tl.maximum(start - window + 1, 0) // BLOCK_TOKENS
    if block < first or block >= tl.cdiv(start + tl.load(counts + row), BLOCK_TOKENS):
        return
    page = tl.load(tables + tl.load(slots + row).to(tl.int64) * table_stride + block)
    source = pages + (page.to(tl.int64) * places + place) * SIZE
    target = out + (tl.load(page_firsts + row) + block).to(tl.int64) * SIZE
    for at in range(0, SIZE, CHUNK):
        offsets = at + tl.arange(0, CHUNK)
        codes = tl.load(source + offsets, mask=offsets < SIZE, other=0)
        numbers = decode(codes, FORMAT, HARDWARE).to(out.dtype.element_ty)
        tl.store(target + offsets, numbers, mask=offsets < SIZE)


def expand_pages(
    pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    page_firsts: torch.Tensor,
    most_pages: int,
    *,
    place: int,
    window: int,
    out: torch.Tensor,
) -> None:
    """pages [blocks, places, 2, block_tokens, kv_heads, head_dim] of float8 to out [pages, 1, 2, block_tokens,
    kv_heads, head_dim]: those of row r, of which there are no more than `most_pages`, from page_firsts[r] on, but for
    those that have left the window. slots, starts, counts, page_firsts: int32 [rows]."""
    codes, kept = as_codes(pages)
    _, places, _, block_tokens, kv_heads, width = pages.shape
    _expand[(most_pages, len(slots))](
        codes, tables, slots, starts, counts, page_firsts, out, place, places, window, tables.stride(0),
        BLOCK_TOKENS=block_tokens, SIZE=2 * block_tokens * kv_heads * width, CHUNK=_CHUNK, FORMAT=kept,
        HARDWARE=converts_in_hardware(), WINDOWED=window > 0, num_warps=4,
    )  # fmt: skip
