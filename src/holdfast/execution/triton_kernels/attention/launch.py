"""What both attention kernels share on the device: where keys lie, and one step of the running softmax.

Scores are kept in units of log2, so that weights are plain powers of two. Knows neither batches nor grids.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

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
def softmax_step(
    query, keys, values, seen, best, total, gathered, inner, outer, CAPPED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Adds one tile of keys and values to (best, total, gathered)."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
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
    total = total * faded + tl.sum(weights, 1)
    gathered = tl.dot(weights.to(values.dtype), values, gathered * faded[:, None], input_precision="ieee")
    return higher, total, gathered
