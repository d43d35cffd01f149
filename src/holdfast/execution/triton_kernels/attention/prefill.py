"""Attention of rows with several tokens over paged keys, what came before them included: ragged, causal, tensor cores.

One program takes a tile: some tokens of one row, and of these all query heads that share one KV head, so that keys are
read once for all of them. Only tiles at the diagonal and at a window's edge are masked; what nobody sees is skipped.
Which tiles there are is said by the host (`tiles.prefill_tiles`). Writes no pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import PLAIN, as_codes, converts_in_hardware
from holdfast.execution.triton_kernels.attention.launch import (
    UNSEEN,
    as_multiplied,
    key_offsets,
    page_of,
    queries_multiplied,
    score_factors,
    softmax_step,
)
from holdfast.execution.triton_kernels.tiles import Tile, padded_width, prefill_tile


@triton.jit
def _sweep(
    query, best, total, gathered, positions, pages, table, begin, end, limit, page_stride, head_offset, window, inner,
    outer, BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Keys begin..end-1 in whole tiles. `limit`: the keys there are; the last tile may reach beyond it if MASKED."""
    tokens = begin + tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_PADDED)
    page = page_of(table, tokens, limit, BLOCK_TOKENS)
    for _ in range(begin, end, KEYS):
        offsets = key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS, WIDTH)
        places = pages + offsets[:, None] + dims[None, :]
        # One tile ahead, so that the keys never wait for the table.
        page = page_of(table, tokens + KEYS, limit, BLOCK_TOKENS)
        if MASKED:
            there = (tokens < limit)[:, None] & (dims < DIM)[None, :]
            keys = tl.load(places, mask=there, other=0)
            values = tl.load(places + BLOCK_TOKENS * WIDTH, mask=there, other=0)
        elif DIM != DIM_PADDED:
            keys = tl.load(places, mask=(dims < DIM)[None, :], other=0)
            values = tl.load(places + BLOCK_TOKENS * WIDTH, mask=(dims < DIM)[None, :], other=0)
        else:
            keys = tl.load(places)
            values = tl.load(places + BLOCK_TOKENS * WIDTH)
        keys = as_multiplied(keys, query.dtype, FORMAT, HARDWARE)
        values = as_multiplied(values, query.dtype, FORMAT, HARDWARE)
        seen = tokens[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        best, total, gathered = softmax_step(
            query, keys, values, seen, best, total, gathered, inner, outer, CAPPED, MASKED
        )
        tokens += KEYS
    return best, total, gathered


@triton.jit(do_not_specialize=["place", "places", "window", "table_stride"])
def _prefill(
    query, pages, tables, tile_rows, tile_starts, slots, starts, counts, firsts, out, inner, outer, value_scale,
    place, places, window, table_stride, query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = KV_HEADS * DIM
    tile, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    row, tile_start = tl.load(tile_rows + tile), tl.load(tile_starts + tile)
    start, first = tl.load(starts + row), tl.load(firsts + row)
    taken = tl.minimum(tl.load(counts + row) - tile_start, ROWS // RATIO)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride

    member, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    token, head = member // RATIO, kv_head * RATIO + member % RATIO
    real = (token < taken)[:, None] & (dims < DIM)[None, :]
    index = (first + tile_start + token).to(tl.int64)
    query_at = (index * query_token_stride + head * query_head_stride)[:, None] + dims[None, :]
    queries = queries_multiplied(tl.load(query + query_at, mask=real, other=0.0), FORMAT)

    #   lowest ─ masked ─ full_from ─ whole tiles, unmasked ─ full_to ─ masked ─ limit
    # Rows beyond the tokens taken look on like the last one; they are not written.
    lowest_position, limit = start + tile_start, start + tile_start + taken
    positions = tl.minimum(lowest_position + token, limit - 1)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(lowest_position - window + 1, 0)
    full_from = lowest
    if WINDOWED:
        full_from = lowest + tl.cdiv(tl.maximum(limit - window - lowest, 0), KEYS) * KEYS
    full_to = tl.maximum(lowest + (lowest_position + 1 - lowest) // KEYS * KEYS, full_from)

    page_stride = places * (2 * BLOCK_TOKENS * WIDTH)
    head_offset = place * (2 * BLOCK_TOKENS * WIDTH) + kv_head * DIM
    best = tl.full((ROWS,), UNSEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    if WINDOWED:
        best, total, gathered = _sweep(
            queries, best, total, gathered, positions, pages, table, lowest, tl.minimum(full_from, limit), limit,
            page_stride, head_offset, window, inner, outer, BLOCK_TOKENS, WIDTH, DIM, DIM_PADDED, KEYS, WINDOWED,
            CAPPED, True, FORMAT, HARDWARE,
        )  # fmt: skip
    best, total, gathered = _sweep(
        queries, best, total, gathered, positions, pages, table, full_from, full_to, limit, page_stride, head_offset,
        window, inner, outer, BLOCK_TOKENS, WIDTH, DIM, DIM_PADDED, KEYS, WINDOWED, CAPPED, False, FORMAT,
        HARDWARE,
    )  # fmt: skip
    best, total, gathered = _sweep(
        queries, best, total, gathered, positions, pages, table, full_to, limit, limit, page_stride, head_offset,
        window, inner, outer, BLOCK_TOKENS, WIDTH, DIM, DIM_PADDED, KEYS, WINDOWED, CAPPED, True, FORMAT,
        HARDWARE,
    )  # fmt: skip
    out_at = (index * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
    tl.store(out + out_at, (gathered * (value_scale / total)[:, None]).to(out.dtype.element_ty), mask=real)


def prefill_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    firsts: torch.Tensor,
    *,
    place: int,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    tile: Tile | None = None,
) -> None:
    """query and out [tokens, heads, head_dim], the last dimension contiguous; pages [blocks, places, 2, block_tokens,
    kv_heads, head_dim] contiguous, of the queries' type or float8, this step's keys and values already written.
    Of float8, keys are key_scale times what pages hold, values value_scale times.

    slots, starts, counts, firsts: int32 [rows]. tile_rows, tile_starts: int32, from `tiles.prefill_tiles`. window and
    softcap: 0 for none. Tokens of rows without tiles are left as they are. `tile`: other sizes than the table's; the
    tile list must have been made for them.
    """
    if not len(tile_rows):
        return
    heads, width = query.shape[1:]
    _, places, _, block_tokens, kv_heads, _ = pages.shape
    ratio = heads // kv_heads
    pages, kept = as_codes(pages)
    tile = tile or prefill_tile(ratio, width, query.element_size(), codes=kept != PLAIN.value)
    inner, outer = score_factors(scale * key_scale, softcap)
    _prefill[(len(tile_rows) * kv_heads,)](
        query, pages, tables, tile_rows, tile_starts, slots, starts, counts, firsts, out, inner, outer, value_scale,
        place, places, window, tables.stride(0), query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, RATIO=ratio, DIM=width, DIM_PADDED=padded_width(width), BLOCK_TOKENS=block_tokens,
        ROWS=tile.rows, KEYS=tile.keys, WINDOWED=window > 0, CAPPED=softcap > 0, FORMAT=kept,
        HARDWARE=kept and converts_in_hardware(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
