"""Norms over the queries of all heads, and over all keys, where each rank has some of the heads (OLMo 2): squares are
added up over ranks, and every rank norms its own. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.execution.ops.reference import NORMED_TOKENS
from holdfast.execution.parallel.collectives import Collectives


def first_counted_head(rank: int, kv_heads: Sequence[tuple[int, int]]) -> int:
    """Of the KV heads of this rank, the first that no rank before it has; the one behind its last: they all are."""
    first, end = kv_heads[rank]
    return max([first, *(min(last, end) for _, last in kv_heads[:rank])])


class RowNorms:
    """`kv_heads`: of every rank, the first KV head that it has and the one behind its last: one that several have is
    counted once."""

    def __init__(self, collectives: Collectives, kv_heads: Sequence[tuple[int, int]], head_dim: int) -> None:
        self._collectives, own = collectives, kv_heads[collectives.rank][0]
        self._first_key = (first_counted_head(collectives.rank, kv_heads) - own) * head_dim

    def run(
        self, queries: torch.Tensor, keys: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], epsilon: float
    ) -> None:
        """Both [tokens, own columns], in place."""
        parts = (queries, keys[:, self._first_key :])
        # With the numbers of columns behind the last token, so that sums become means.
        sums = torch.zeros((2, len(queries) + 1), dtype=torch.float32, device=queries.device)
        for total, part in zip(sums, parts, strict=True):
            total[-1] = part.shape[1]
            for tile, found in zip(part.split(NORMED_TOKENS), total[:-1].split(NORMED_TOKENS), strict=True):
                found.copy_(tile.float().square().sum(1))
        self._collectives.all_reduce(sums)
        scales = torch.rsqrt(sums[:, :-1] / sums[:, -1:] + epsilon).unsqueeze(2)
        for rows, scale, weight in zip((queries, keys), scales, weights, strict=True):
            for tile, by in zip(rows.split(NORMED_TOKENS), scale.split(NORMED_TOKENS), strict=True):
                tile.copy_((tile.float() * by).to(weight.dtype) * weight)
