"""What each rank of this engine holds where several compute one model: its weights and its KV, and what ranks share.

Takes divisions from shards.py and bytes from `footprint`; chooses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from holdfast.checkpoints.checkpoint import piece_of
from holdfast.footprint import cpu, gpu
from holdfast.footprint.cpu import Limits
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec
from holdfast.models.shards import Shard, shard_spec
from holdfast.observability.decisions import Decision
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.shards import divide
from holdfast.planner.sizing.terms import Term
from holdfast.units import MIB, counted, format_bytes

MOST_SLOT_BYTES = 4 * MIB
"""That a rank shows the others at a time; what is larger goes in pieces."""
EXCHANGE = "exchange"
"""The term of the memory that ranks share."""


@dataclass(frozen=True, slots=True)
class RankShares:
    spec: ModelSpec = field(repr=False)
    """Of the whole model."""
    weights: tuple[EngineWeights, ...] = field(repr=False)
    """Of each rank; of one alone all of them."""
    shards: tuple[Shard, ...] = ()
    """Empty: one rank has all."""

    @property
    def count(self) -> int:
        return len(self.weights)

    @property
    def followers(self) -> int:
        return self.count - 1

    @property
    def kv_spec(self) -> ModelSpec:
        """With the KV heads of all ranks together, those that several have counted for each."""
        heads = sum(shard.kv_head_count for shard in self.shards)
        return replace(self.spec, kv_heads=heads) if self.shards else self.spec

    def decisions(self, rank_weights: Sequence[int]) -> list[Decision]:
        """A row for each rank, where there are several. `rank_weights`: bytes of each one's weights."""
        rows = [
            f"rank {shard.rank} has {format_bytes(nbytes)} of weights and {counted(shard.head_count, 'head')} over"
            f" {counted(shard.kv_head_count, 'KV head')}"
            for shard, nbytes in zip(self.shards, rank_weights, strict=True)
        ]
        return [Decision("tensor_parallel_size", str(self.count), "; ".join(rows), "set")] if rows else []

    def rank_weights(self, *, dtype: str) -> tuple[int, ...]:
        """Bytes of each rank's, as they lie on a GPU."""
        return tuple(one.nbytes(dtype=dtype) for one in self.weights)

    def gpu_slot_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what one rank shows the others on GPUs."""
        vocab = max(shard.vocab_rows for shard in self.shards)
        return gpu.exchange_slot_bytes(self.spec.hidden_size, limits.max_num_batched_tokens, vocab, dtype=dtype)

    def gpu_terms(self, limits: Limits, *, dtype: str) -> tuple[Term, ...]:
        """Of a rank on its GPU, beside what one alone would have."""
        beside = gpu.beside_ranks_bytes(self.spec, limits, self.shards[0].vocab_rows, dtype=dtype)
        return (Term(EXCHANGE, gpu.exchange_memory_bytes(self.gpu_slot_bytes(limits, dtype=dtype)) + beside),)

    def step_bytes(self, limits: Limits, *, dtype: str) -> int:
        return sum(
            _step_bytes(one.spec, limits, dtype=dtype, vocab=shard.vocab_rows)
            for one, shard in zip(self.weights, self.shards, strict=False)
        )

    def slot_bytes(self, limits: Limits, *, dtype: str) -> int:
        """Of what one rank shows the others; 0: there are none."""
        rows = min(limits.max_num_batched_tokens, cpu.MLP_TILE) * self.spec.hidden_size
        vocab = max((shard.vocab_rows for shard in self.shards), default=0)
        logits = cpu.head_rows(self.spec.vocab_size, limits.max_num_seqs) * vocab
        largest = min(max(rows, logits) * cpu.ELEMENT_BYTES[dtype], MOST_SLOT_BYTES)
        return -(-largest // cpu.SLOT_PAGE_BYTES) * cpu.SLOT_PAGE_BYTES if self.shards else 0

    def exchange(self, limits: Limits, *, dtype: str) -> Mapping[str, int]:
        """The term of what ranks share, where there are several."""
        if not self.shards:
            return {}
        slots = 2 * self.count * self.slot_bytes(limits, dtype=dtype)
        return {EXCHANGE: slots + cpu.MAIL_BYTES + cpu.SLOT_PAGE_BYTES}


def _step_bytes(spec: ModelSpec, limits: Limits, *, dtype: str, vocab: int) -> int:
    """Of one rank, beside its activations: its sums before they are added up, and its part of the logits. `vocab`: rows
    of the vocabulary that it has."""
    apart = 0 if cpu.sums_apart(spec) else min(limits.max_num_batched_tokens, cpu.MLP_TILE) * spec.hidden_size
    return (apart + cpu.head_rows(spec.vocab_size, limits.max_num_seqs) * vocab) * cpu.ELEMENT_BYTES[dtype]


@lru_cache(maxsize=64)
def rank_shares(weights: Same[EngineWeights], size: int) -> RankShares:
    """Raises ConfigurationError for a size that cannot be."""
    whole = weights.held
    if size == 1:
        return RankShares(whole.spec, (whole,))
    shards = divide(whole.spec, whole.stored, size)
    return RankShares(whole.spec, tuple(_share(whole, shard) for shard in shards), shards)


def _share(whole: EngineWeights, shard: Shard) -> EngineWeights:
    spec = shard_spec(whole.spec, shard)
    if whole.stored is None:
        return replace(whole, spec=spec)
    stored = whole.stored
    pieces = {tensor.name: piece_of(stored[tensor.name], tensor) for tensor in spec.tensors if tensor.name in stored}
    return replace(whole, spec=spec, stored=pieces)
