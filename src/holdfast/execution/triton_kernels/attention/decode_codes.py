# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""`_attend` of decode.py over float8 pages: the same shares, the same sums, half the bytes.

Conversion must cost few instructions, or it takes longer than the bytes that were saved. Codes are read as words of
two: even dimensions in the low bytes, odd ones in the high bytes, each a product of its own. Words are as wide as the
numbers they become, so that they reach the tensor cores without being taken apart byte by byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import decode_pairs
from holdfast.execution.triton_kernels.attention.launch import (
    UNSEEN,
    key_offsets,
    page_of,
    queries_multiplied,
    shares,
    weigh,
)


@triton.jit(do_not_specialize=["place", "places", "window", "least", "table_stride"])
def attend_codes(
    query, pages, tables, slots, lengths, out, workspace, inner, outer, value_scale, place, places, window, least,
    table_stride, query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """`pages`: words. `value_scale`: what codes of values are multiplied with."""
    WORDS: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = KV_HEADS * WORDS
    kv_head, row, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + row)
    first, begin, share, used = shares(length, window, splits, least, BLOCK_TOKENS, KEYS, WINDOWED)
    if split >= used:
        return
    begin += split * share
    end = tl.minimum(begin + share, length)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride

    member, words = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED // 2)
    real = (member < RATIO)[:, None] & (words < WORDS)[None, :]
    head = kv_head * RATIO + member
    query_at = query + (row.to(tl.int64) * query_token_stride + head * query_head_stride)[:, None] + 2 * words[None, :]
    even_queries = queries_multiplied(tl.load(query_at, mask=real, other=0.0), FORMAT)
    odd_queries = queries_multiplied(tl.load(query_at + 1, mask=real, other=0.0), FORMAT)
    kind = even_queries.dtype

    page_stride = places * (2 * BLOCK_TOKENS * WIDTH)
    head_offset = place * (2 * BLOCK_TOKENS * WIDTH) + kv_head * WORDS
    best = tl.full((ROWS,), UNSEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    even = tl.zeros((ROWS, DIM_PADDED // 2), tl.float32)
    odd = tl.zeros((ROWS, DIM_PADDED // 2), tl.float32)
    tokens = begin + tl.arange(0, KEYS)
    page = page_of(table, tokens, end, BLOCK_TOKENS)
    for _ in range(begin, end, KEYS):
        places_at = pages + key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS, WIDTH)[:, None]
        places_at += words[None, :]
        # One tile ahead, so that the keys never wait for the table.
        page = page_of(table, tokens + KEYS, end, BLOCK_TOKENS)
        seen = tokens < end
        if WINDOWED:
            seen = seen & (tokens >= first)
        there = seen[:, None] & (words < WORDS)[None, :]
        even_keys, odd_keys = decode_pairs(tl.load(places_at, mask=there, other=0), FORMAT, HARDWARE)
        values = tl.load(places_at + BLOCK_TOKENS * WIDTH, mask=there, other=0)
        even_values, odd_values = decode_pairs(values, FORMAT, HARDWARE)
        scores = tl.dot(even_queries, tl.trans(even_keys.to(kind)), input_precision="ieee")
        scores = tl.dot(odd_queries, tl.trans(odd_keys.to(kind)), scores, input_precision="ieee")
        best, total, weights, faded = weigh(scores, seen[None, :], best, total, inner, outer, CAPPED, True)
        weights = weights.to(kind)
        even = tl.dot(weights, even_values.to(kind), even * faded[:, None], input_precision="ieee")
        odd = tl.dot(weights, odd_values.to(kind), odd * faded[:, None], input_precision="ieee")
        tokens += KEYS

    # A share may hold keys that left the window only: it adds nothing, with the weight 0 of its logarithm.
    factor = (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    even, odd = even * factor, odd * factor
    if used == 1:
        out_at = out + (row.to(tl.int64) * out_token_stride + head * out_head_stride)[:, None] + 2 * words[None, :]
        tl.store(out_at, even.to(out.dtype.element_ty), mask=real)
        tl.store(out_at + 1, odd.to(out.dtype.element_ty), mask=real)
    else:
        part = (row * (KV_HEADS * RATIO) + head) * splits + split
        part_at = workspace + part[:, None] * DIM + 2 * words[None, :]
        tl.store(part_at, even, mask=real)
        tl.store(part_at + 1, odd, mask=real)
        logarithms = workspace + tl.num_programs(1) * splits * (KV_HEADS * RATIO * DIM)
        tl.store(logarithms + part, best + tl.log2(total), mask=member < RATIO)
