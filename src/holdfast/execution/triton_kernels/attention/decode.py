"""Attention of rows with one token over paged keys, at the speed of memory. Safe in a CUDA graph.

One program takes a share of one row's keys for all query heads of one KV head; a second kernel joins the shares. The
grid depends on the padded number of rows alone; shares are worked out on the device from the lengths:

    first seen ─► its page ─ share 0 ─┬─ share 1 ─┬─ ... ─┬─ the last: what is left ─► length
                             each: whole tiles of keys, at least `least` of them; programs beyond the last exit at once

A row of a single share is written by its program, and joining passes it by. Writes no pages. Kernels are launched
early: slots, lengths and tables, which no kernel of a step writes, are read while the one before still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.decode_codes import attend_codes
from holdfast.execution.triton_kernels.attention.kv_codes import PLAIN, converts_in_hardware, format_of
from holdfast.execution.triton_kernels.attention.launch import (
    UNSEEN,
    fetch_keys,
    key_offsets,
    page_of,
    score_factors,
    shares,
    softmax_step,
)
from holdfast.execution.triton_kernels.attention.own_token import OwnTokens, keep_own_token, norm_factor, turned
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others
from holdfast.execution.triton_kernels.tiles import (
    Tile,
    decode_share_tokens,
    decode_tile,
    padded_width,
)
from holdfast.footprint.gpu import decode_splits


@triton.jit(do_not_specialize=["place", "places", "window", "least", "table_stride"])
def _attend(
    query, pages, tables, slots, lengths, out, workspace, inner, outer, place, places, window, least, table_stride,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, angles, query_norm, key_norm, epsilon,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    OWN: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = KV_HEADS * DIM
    let_others_start(EARLY)
    # Heads first: programs that run together read neighbouring memory.
    kv_head, row, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + row)
    first, begin, share, used = shares(length, window, splits, least, BLOCK_TOKENS, KEYS, WINDOWED)
    if split >= used:
        wait_for_others(EARLY)
        return
    begin += split * share
    end = tl.minimum(begin + share, length)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    page_stride = places * (2 * BLOCK_TOKENS * WIDTH)
    head_offset = place * (2 * BLOCK_TOKENS * WIDTH) + kv_head * DIM
    tokens = begin + tl.arange(0, KEYS)
    page = page_of(table, tokens, end, BLOCK_TOKENS)
    # What kernels before this one wrote is read from here on: queries, and the last key and value.
    near = pages + key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS, WIDTH)
    fetch_keys(near, BLOCK_TOKENS * WIDTH, DIM, EARLY)
    own_page = page_of(table, length - 1, length, BLOCK_TOKENS)
    wait_for_others(EARLY)

    member, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    real = (member < RATIO)[:, None] & (dims < DIM)[None, :]
    head = kv_head * RATIO + member
    heads_at = query + (row.to(tl.int64) * query_token_stride + head * query_head_stride)[:, None]
    if OWN:
        line = angles + row * (2 * HALF)
        if split == used - 1:
            key = query + row.to(tl.int64) * query_token_stride + (KV_HEADS * RATIO + kv_head) * DIM
            key += tl.zeros((1, 1), tl.int32)
            own = pages + key_offsets(own_page, length - 1, page_stride, head_offset, BLOCK_TOKENS, WIDTH)
            keep_own_token(
                key, key + WIDTH, own, BLOCK_TOKENS * WIDTH, own_page >= 0, line, key_norm, line, epsilon, 1.0, 1.0,
                DIM, DIM_PADDED, HALF, NORM, PLAIN, False,
            )  # fmt: skip
        tl.debug_barrier()  # The last key is read by all threads.
        factor = norm_factor(heads_at, (member < RATIO)[:, None], epsilon, DIM, DIM_PADDED, NORM)
        queries = turned(heads_at, dims[None, :], real, line, query_norm, factor, HALF, NORM)
    else:
        queries = tl.load(heads_at + dims[None, :], mask=real, other=0.0)

    best = tl.full((ROWS,), UNSEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    for _ in range(begin, end, KEYS):
        places_at = pages + key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS, WIDTH)[:, None]
        places_at += dims[None, :]
        # One tile ahead, so that the keys never wait for the table.
        page = page_of(table, tokens + KEYS, end, BLOCK_TOKENS)
        seen = tokens < end
        if WINDOWED:
            seen = seen & (tokens >= first)
        there = seen[:, None] & (dims < DIM)[None, :]
        keys = tl.load(places_at, mask=there, other=0.0)
        values = tl.load(places_at + BLOCK_TOKENS * WIDTH, mask=there, other=0.0)
        best, total, gathered = softmax_step(
            queries, keys, values, seen[None, :], best, total, gathered, inner, outer, CAPPED, True
        )
        tokens += KEYS

    # A share may hold keys that left the window only: it adds nothing, with the weight 0 of its logarithm.
    gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
    if used == 1:
        out_at = (row.to(tl.int64) * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + out_at, gathered.to(out.dtype.element_ty), mask=real)
    else:
        part = (row * (KV_HEADS * RATIO) + head) * splits + split
        tl.store(workspace + part[:, None] * DIM + dims[None, :], gathered, mask=real)
        logarithms = workspace + tl.num_programs(1) * splits * (KV_HEADS * RATIO * DIM)
        tl.store(logarithms + part, best + tl.log2(total), mask=member < RATIO)


@triton.jit(do_not_specialize=["window", "splits", "least"])
def _join(
    lengths, out, workspace, window, splits, least, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_others_start(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    _, _, _, used = shares(tl.load(lengths + row), window, splits, least, BLOCK_TOKENS, KEYS, WINDOWED)
    wait_for_others(EARLY)
    if used <= 1:
        return
    split, dims = tl.arange(0, SPLITS_PADDED), tl.arange(0, DIM_PADDED)
    part = (row * HEADS + head) * splits + split
    logarithms = workspace + tl.num_programs(1) * splits * (HEADS * DIM)
    logarithm = tl.load(logarithms + part, mask=split < used, other=UNSEEN)
    weight = tl.exp2(logarithm - tl.max(logarithm, 0))
    there = (split < used)[:, None] & (dims < DIM)[None, :]
    gathered = tl.load(workspace + part[:, None] * DIM + dims[None, :], mask=there, other=0.0)
    joined = tl.sum(gathered * weight[:, None], 0) / tl.sum(weight, 0)
    out_at = row.to(tl.int64) * out_token_stride + head * out_head_stride + dims
    tl.store(out + out_at, joined.to(out.dtype.element_ty), mask=dims < DIM)


def _turns(own: OwnTokens, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    query_norm, key_norm = (query if norm is None else norm for norm in (own.query_norm, own.key_norm))
    return own.angles, query_norm, key_norm, own.epsilon


def decode_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    place: int,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
    workspace: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    own: OwnTokens | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """query and out [rows, heads, head_dim], the last dimension contiguous; pages [blocks, places, 2, block_tokens,
    kv_heads, head_dim] contiguous, of the queries' type or float8, this step's keys and values already written.
    Of float8, keys are key_scale times what pages hold, values value_scale times. `own`: queries are not turned yet,
    and keys and values, which follow them in each row, not written; both is done on the way.

    slots, lengths: int32 [rows]; a length counts the row's own token, and rows of length 0 are not written. window and
    softcap: 0 for none. workspace: float32, `decode_workspace_bytes` or more. `tile`, `splits`: other sizes than the
    table's.
    """
    rows, heads, width = query.shape
    _, places, _, block_tokens, kv_heads, _ = pages.shape
    ratio, padded, early = heads // kv_heads, padded_width(width), starts_early()
    kept = format_of(pages.dtype)
    codes = kept != PLAIN.value
    tile = tile or decode_tile(ratio, width, query.element_size(), codes=codes)
    splits = splits or decode_splits(rows, kv_heads, codes=codes)
    least = max(1, decode_share_tokens(rows, kv_heads, codes=codes) // tile.keys)
    inner, outer = score_factors(scale * key_scale, softcap)
    strides = (tables.stride(0), query.stride(0), query.stride(1), out.stride(0), out.stride(1))
    turns = (query, query, query, 0.0) if own is None else _turns(own, query)
    sizes = {
        "KV_HEADS": kv_heads, "RATIO": ratio, "ROWS": tile.rows, "DIM": width, "DIM_PADDED": padded,
        "BLOCK_TOKENS": block_tokens, "KEYS": tile.keys, "WINDOWED": window > 0, "CAPPED": softcap > 0,
        "OWN": own is not None, "HALF": 0 if own is None else own.angles.shape[-1] // 2,
        "NORM": own is not None and own.query_norm is not None, "EARLY": early,
        "num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": early,
    }  # fmt: skip
    if not codes:
        _attend[(kv_heads, rows, splits)](
            query, pages, tables, slots, lengths, out, workspace, inner, outer, place, places, window, least, *strides,
            *turns, **sizes,
        )  # fmt: skip
    else:
        attend_codes[(kv_heads, rows, splits)](
            query, pages.view(torch.uint8).view(torch.uint16), tables, slots, lengths, out, workspace, inner, outer,
            value_scale, place, places, window, least, *strides, *turns, pages.view(torch.uint8), 1.0 / key_scale,
            1.0 / value_scale, query if own is None or own.center is None else own.center, FORMAT=kept,
            CENTERED=own is not None and own.center is not None, HARDWARE=converts_in_hardware(), **sizes,
        )  # fmt: skip
    if splits > 1:
        _join[(heads, rows)](
            lengths, out, workspace, window, splits, least, out.stride(0), out.stride(1),
            HEADS=heads, DIM=width, DIM_PADDED=padded, BLOCK_TOKENS=block_tokens, KEYS=tile.keys,
            SPLITS_PADDED=triton.next_power_of_2(splits), WINDOWED=window > 0, EARLY=early, launch_pdl=early,
        )  # fmt: skip
