"""What one rank of several does with its part of the vocabulary, and how sampled tokens reach the others.

Rank 0 has all logits and samples: grammars, penalties and log-probabilities are its own business. The others learn the
tokens, which the next step of every rank begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import numpy.typing
import torch

from holdfast.execution.native import CompiledSums
from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives

Product = Callable[[torch.Tensor, torch.Tensor], None]
NOT_SAMPLED = -1


class RankShare:
    """`vocab`: of every rank, the first row of embedding and head that it has and the one behind its last. `rows`:
    whose logits are computed at a time. `kv_heads`: of every rank, likewise; for models that norm all heads as one."""

    def __init__(
        self,
        collectives: Collectives,
        vocab: Sequence[tuple[int, int]],
        rows: int,
        dtype: torch.dtype,
        kv_heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.collectives, self.kv_heads = collectives, kv_heads
        self._first, self._last = vocab[collectives.rank]
        self.widths = [last - first for first, last in vocab]
        self._logits = torch.empty((rows, self._last - self._first), dtype=dtype)

    @property
    def sums(self) -> CompiledSums | None:
        """For compiled layers to add up by themselves; None: these ranks cannot."""
        return self.collectives.sums if isinstance(self.collectives, SharedMemoryCollectives) else None

    @property
    def samples(self) -> bool:
        return self.collectives.rank == 0

    def embed(self, select: Product, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the embedding, each from the rank that has it; the sum with the others' zeros changes no bit."""
        elsewhere = (tokens < self._first) | (tokens >= self._last)
        select((tokens - self._first).clamp_(0, self._last - self._first - 1), out)
        out[elsewhere] = 0.0
        self.collectives.all_reduce(out)

    def logits(self, multiply: Product, hidden: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether `out` has them: of the first rank alone."""
        self.collectives.gather(self.part(multiply, hidden), self.widths, out if self.samples else None)
        return self.samples

    def part(self, multiply: Product, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's columns of them, until the next are computed."""
        part = self._logits[: len(hidden)]
        multiply(hidden, part)
        return part

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Of each of these, which are float32, the largest that any rank has."""
        own, size = torch.tensor([numbers], dtype=torch.float32), self.collectives.size
        gathered = own.new_empty((1, size * len(numbers))) if self.samples else None
        self.collectives.gather(own, [len(numbers)] * size, gathered)
        found = own if gathered is None else gathered.view(size, -1).amax(dim=0, keepdim=True)
        self.collectives.broadcast(found)
        return [float(number) for number in found[0]]

    def tell_tokens(self, token_ids: Sequence[int], late: Sequence[bool]) -> None:
        """Of rank 0: what each row has sampled, and which of them mean nothing."""
        sent = [NOT_SAMPLED if missed else max(token, 0) for token, missed in zip(token_ids, late, strict=True)]
        self.collectives.broadcast(torch.tensor(sent, dtype=torch.int64))

    def hear_tokens(self, rows: int) -> numpy.typing.NDArray[numpy.int64]:
        """Of the others: the same, NOT_SAMPLED where a row's token means nothing."""
        heard = torch.empty(rows, dtype=torch.int64)
        self.collectives.broadcast(heard)
        return heard.numpy()
