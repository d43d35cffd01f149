"""What one rank of several does on its GPU with its part of the vocabulary, how sampled tokens reach the others, and
what ranks tell each other of rows that they have a part of: on the device, so that steps are launched ahead of the host
and captured in graphs.

Rank 0 has all logits and samples; the others learn the tokens, which the next step of every rank begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.execution.triton_kernels.rounded.rounding import largest_of_parts
from holdfast.execution.triton_kernels.sampling.rank_tokens import own_rows, put_tokens
from holdfast.models.spec import ShardPiece

if TYPE_CHECKING:
    from holdfast.execution.gpu.layers.linear import GpuLinear
    from holdfast.execution.parallel.gpu.row_norms import GpuRowNorms
    from holdfast.execution.parallel.gpu.together import GpuCollectives


class GpuRankShare:
    """`vocab`: of every rank, the first row of embedding and head that it has and the one behind its last. `rows`:
    most whose logits are computed at a time; `tokens`: most of a step. `norms`: of a model that norms the queries of
    all heads together."""

    def __init__(
        self,
        collectives: GpuCollectives,
        vocab: Sequence[tuple[int, int]],
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        norms: GpuRowNorms | None = None,
    ) -> None:
        self.collectives, self._norms = collectives, norms
        self._first, last = vocab[collectives.rank]
        self._widths = [end - first for first, end in vocab]
        self._logits = torch.empty(rows * (last - self._first), dtype=dtype, device=device)
        self._ids = torch.empty((1, tokens), dtype=torch.int32, device=device)
        self._no_slot = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._places = torch.arange(tokens, dtype=torch.int32, device=device)
        self._largest = torch.empty(tokens * collectives.size, dtype=torch.float32, device=device)
        self.alone = False
        """While it is set nothing is asked of other ranks, and what layers compute means nothing: products are only
        launched, to load their code."""

    @property
    def samples(self) -> bool:
        return self.collectives.rank == 0

    @property
    def nbytes(self) -> int:
        norms = 0 if self._norms is None else self._norms.nbytes
        return self._logits.nbytes + 3 * self._no_slot.nbytes + self._largest.nbytes + norms

    def embed(
        self,
        embedding: GpuLinear,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Rows of the embedding, each from the rank that has it; the sum with the others' zeros changes no bit."""
        count = len(out)
        own_rows(tokens, slots, positions, self._first, self._ids[0, :count])
        embedding.embed(self._ids, self._no_slot[:count], self._places[:count], out)
        self.collectives.all_reduce(out)

    def largest_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows of which x [rows, columns] is this rank's part: the largest size of a number in each rank's part,
        [rows, ranks], until the next such call."""
        size = self.collectives.size
        found = self._largest[: len(x) * size].view(len(x), size)
        largest_of_parts(x, found, self.collectives.rank)
        if not self.alone:
            self.collectives.all_reduce(found)
        return found

    def whole_of_rows(self, x: torch.Tensor, piece: ShardPiece, out: torch.Tensor) -> None:
        """out [rows, all columns], contiguous, of which every rank has a part: x is this one's."""
        out.zero_()
        begin = 0
        for first, last in piece.ranges:
            out[:, first:last] = x[:, begin : begin + last - first]
            begin += last - first
        if not self.alone:  # Each number is one rank's alone: the sum has those of all, and not a bit is changed.
            self.collectives.all_reduce(out)

    def norm_heads_together(
        self, queries: torch.Tensor, keys: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], epsilon: float
    ) -> None:
        """In place, of a model that does so."""
        assert self._norms is not None, "this model norms no head together with others"
        self._norms.run(queries, keys, weights, epsilon, alone=self.alone)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Of each of these, which are float32, the largest that any rank has. Waits for them."""
        found = torch.zeros((self.collectives.size, len(numbers)), dtype=torch.float32, device=self._ids.device)
        found[self.collectives.rank] = torch.tensor(numbers, dtype=torch.float32)
        self.collectives.all_reduce(found)
        told = [float(number) for number in found.amax(0).tolist()]
        self.collectives.check()
        return told

    def own_logits(self, rows: int) -> torch.Tensor:
        """[rows, this rank's part of the vocabulary], in the buffer of the next such call."""
        width = self._widths[self.collectives.rank]
        return self._logits[: rows * width].view(rows, width)

    def gather_logits(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """All of them into `out` of the first rank; that of others has no columns."""
        self.collectives.gather(part, self._widths, out if self.samples else None)

    def spread_tokens(
        self, sampled: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, known: torch.Tensor
    ) -> None:
        """What the first rank has sampled, into the slots of all others."""
        self.collectives.broadcast(sampled)
        if not self.samples:
            put_tokens(sampled, slots, lengths, known)
