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
    fetch_keys,
    key_offsets,
    page_of,
    queries_multiplied,
    shares,
    weigh,
)
from holdfast.execution.triton_kernels.attention.own_token import keep_own_token, norm_factor, turned
from holdfast.execution.triton_kernels.rounded.early import let_others_start, wait_for_others


@triton.jit(do_not_specialize=["place", "places", "window", "least", "table_stride"])
def attend_codes(
    query, pages, tables, slots, lengths, out, workspace, inner, outer, value_scale, place, places, window, least,
    table_stride, query_token_stride, query_head_stride, out_token_stride, out_head_stride, angles, query_norm,
    key_norm, epsilon, kept, by_key_scale, by_value_scale, center,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    FORMAT: tl.constexpr, CENTERED: tl.constexpr, HARDWARE: tl.constexpr, OWN: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`pages`: words; `kept`: the same as bytes. `value_scale`: what codes of values are multiplied with."""
    let_others_start(EARLY)
    WORDS: tl.constexpr = DIM // 2
    WIDTH: tl.constexpr = KV_HEADS * WORDS
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
    head_offset = place * (2 * BLOCK_TOKENS * WIDTH) + kv_head * WORDS
    tokens = begin + tl.arange(0, KEYS)
    page = page_of(table, tokens, end, BLOCK_TOKENS)
    # What kernels before this one wrote is read from here on: queries, and the last key and value.
    near = pages + key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS, WIDTH)
    fetch_keys(near, BLOCK_TOKENS * WIDTH, WORDS, EARLY)
    own_page = page_of(table, length - 1, length, BLOCK_TOKENS)
    wait_for_others(EARLY)

    member, words = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED // 2)
    real = (member < RATIO)[:, None] & (words < WORDS)[None, :]
    head = kv_head * RATIO + member
    heads_at = query + (row.to(tl.int64) * query_token_stride + head * query_head_stride)[:, None]
    even_dims = 2 * words[None, :]
    if OWN:
        line = angles + row * (2 * HALF)
        if split == used - 1:
            key = query + row.to(tl.int64) * query_token_stride + (KV_HEADS * RATIO + kv_head) * DIM
            key += tl.zeros((1, 1), tl.int32)
            own = kept + 2 * key_offsets(own_page, length - 1, page_stride, head_offset, BLOCK_TOKENS, WIDTH)
            keep_own_token(
                key, key + KV_HEADS * DIM, own, 2 * BLOCK_TOKENS * WIDTH, own_page >= 0, line, key_norm,
                center + kv_head * DIM, epsilon, by_key_scale, by_value_scale,
                DIM, DIM_PADDED, HALF, NORM, FORMAT, CENTERED,
            )  # fmt: skip
        tl.debug_barrier()  # The last key is read by all threads.
        factor = norm_factor(heads_at, (member < RATIO)[:, None], epsilon, DIM, DIM_PADDED, NORM)
        even_queries = turned(heads_at, even_dims, real, line, query_norm, factor, HALF, NORM)
        odd_queries = turned(heads_at, even_dims + 1, real, line, query_norm, factor, HALF, NORM)
    else:
        even_queries = tl.load(heads_at + even_dims, mask=real, other=0.0)
        odd_queries = tl.load(heads_at + even_dims + 1, mask=real, other=0.0)
    even_queries = queries_multiplied(even_queries, FORMAT)
    odd_queries = queries_multiplied(odd_queries, FORMAT)
    kind = even_queries.dtype

    best = tl.full((ROWS,), UNSEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    even = tl.zeros((ROWS, DIM_PADDED // 2), tl.float32)
    odd = tl.zeros((ROWS, DIM_PADDED // 2), tl.float32)
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
