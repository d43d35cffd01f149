"""What both attention kernels share on the device: where keys lie, and one step of the running softmax.

Scores are kept in units of log2, so that weights are plain powers of two. Knows neither batches nor grids.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import PLAIN, decode
from holdfast.execution.triton_kernels.rounded.early import fetch_to_cache

UNSEEN = tl.constexpr(-1.0e30)
"""The score of a key that a query does not see. Finite: a tile of nothing else must not make NaN; what it adds is
multiplied by exp2(UNSEEN - ...) = 0 when the first key that is seen comes."""

LOG2_E = math.log2(math.e)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer): scores in log2 are inner · qk; where they are capped, outer · tanh(inner · qk · ln 2 / 2)."""
    if not softcap:
        return scale * LOG2_E, 0.0
    return 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E


@triton.jit
def page_of(table, tokens, limit, BLOCK_TOKENS: tl.constexpr):
    """Page of each token; those from `limit` on have none (0, and are never read)."""
    return tl.load(table + tokens // BLOCK_TOKENS, mask=tokens < limit, other=0)


@triton.jit
def key_offsets(page, tokens, page_stride, head_offset, BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Elements before each token's key; its value lies BLOCK_TOKENS · WIDTH further. Pools pass 2^31 elements."""
    return page.to(tl.int64) * page_stride + (head_offset + tokens % BLOCK_TOKENS * WIDTH)


@triton.jit
def fetch_keys(keys, to_values, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """The keys at these pointers, WIDTH elements each, and their values on their way to the second level cache."""
    BYTES: tl.constexpr = WIDTH * (keys.dtype.element_ty.primitive_bitwidth // 8)
    if BYTES % 16 == 0:
        fetch_to_cache(keys, BYTES, EARLY)
        fetch_to_cache(keys + to_values, BYTES, EARLY)


@triton.jit
def queries_multiplied(queries, FORMAT: tl.constexpr):
    """Queries in the type that they meet keys in: float16 over float8 pages, where theirs is bfloat16."""
    if FORMAT != PLAIN and queries.dtype == tl.bfloat16:
        # More bits than bfloat16 has, but a smaller range.
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return queries


@triton.jit
def as_multiplied(stored, KIND: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """Keys or values of a page in the type they are multiplied in."""
    if FORMAT != PLAIN:
        stored = decode(stored, FORMAT, HARDWARE).to(KIND)
    return stored


@triton.jit
def shares(
    length, window, splits, least, BLOCK_TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """How one row of decode is cut: (first key seen, where share 0 begins, tokens of a share, shares that have any)."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    begin = first // BLOCK_TOKENS * BLOCK_TOKENS
    tiles = tl.cdiv(length - begin, KEYS)
    share = tl.maximum(tl.cdiv(tiles, splits), least)
    return first, begin, share * KEYS, tl.cdiv(tiles, share)


@triton.jit
def weigh(scores, seen, best, total, inner, outer, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Products of one tile's keys with the queries become weights: (best, total, weights, what fades older sums)."""
    if CAPPED:
        scores = outer * (1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0))
        if MASKED:
            scores = tl.where(seen, scores, UNSEEN)
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
    else:
        if MASKED:
            scores = tl.where(seen, scores, UNSEEN)
        # The factor after the maximum, so that scaling and subtracting are one instruction.
        higher = tl.maximum(best, tl.max(scores, 1) * inner)
        weights = tl.exp2(scores * inner - higher[:, None])
    if MASKED:
        # Where a tile is all unseen, the fused difference of two huge numbers is anything, infinity included.
        weights = tl.where(seen, weights, 0.0)
    faded = tl.exp2(best - higher)
    return higher, total * faded + tl.sum(weights, 1), weights, faded


@triton.jit
def softmax_step(
    query, keys, values, seen, best, total, gathered, inner, outer, CAPPED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Adds one tile of keys and values to (best, total, gathered)."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    best, total, weights, faded = weigh(scores, seen, best, total, inner, outer, CAPPED, MASKED)
    gathered = tl.dot(weights.to(values.dtype), values, gathered * faded[:, None], input_precision="ieee")
    return best, total, gathered
