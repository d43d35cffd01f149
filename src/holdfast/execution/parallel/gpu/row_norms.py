"""Norms over the queries of all heads, and over all keys, on GPUs that each have some of the heads (OLMo 2): squares
are added up over ranks, in one exchange of 8 bytes a token, and every rank norms its own. Fit for graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.execution.parallel.layers.norms import first_counted_head
from holdfast.execution.triton_kernels.layer import norm_by_squares, row_squares
from holdfast.models import ModelSpec

if TYPE_CHECKING:
    from holdfast.execution.parallel.gpu.together import GpuCollectives


class GpuRowNorms:
    """`whole`: the model. `kv_heads`: of every rank, the first KV head that it has and the one behind its last: one
    that several have is counted once. `tokens`: most of a step."""

    def __init__(
        self,
        collectives: GpuCollectives,
        whole: ModelSpec,
        kv_heads: Sequence[tuple[int, int]],
        tokens: int,
        device: torch.device,
    ) -> None:
        self._collectives, self._tokens = collectives, tokens
        self._columns = whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim
        own = kv_heads[collectives.rank][0]
        self._first_key = (first_counted_head(collectives.rank, kv_heads) - own) * whole.head_dim
        self._squares = torch.empty(2 * tokens, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self._squares.nbytes

    def run(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        epsilon: float,
        *,
        alone: bool,
    ) -> None:
        """Both [tokens, own columns], in place. `alone`: others are not asked, and what comes of it means nothing."""
        squares = self._squares[: 2 * len(queries)].view(2, len(queries))
        for part, found in zip((queries, keys[:, self._first_key :]), squares, strict=True):
            row_squares(part, found)
        if not alone:
            self._collectives.all_reduce(squares)
        for part, found, weight, columns in zip((queries, keys), squares, weights, self._columns, strict=True):
            norm_by_squares(part, found, weight, columns, epsilon)
