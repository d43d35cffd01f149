"""The plan that a server starts with: dtypes, limits, pages and named byte terms, with the reasons. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.footprint.cpu import Limits
from holdfast.hardware import Memory
from holdfast.kvcache.groups import KVLayout
from holdfast.observability.decisions import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    index: int
    """In the driver's order."""
    uuid: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    dtype: str
    kv_dtype: str
    expand_weights: bool
    compiled: bool
    """Products with what is kept as stored are computed by compiled kernels, in float32."""
    compiled_attention: bool
    layout: KVLayout
    limits: Limits
    blocks: int
    """Pages of the pool, the null page included."""
    most_blocks: int
    """The pool may grow to so many where terms took less than was planned: more would be of no use, or were not asked
    for. As many as `blocks` where the pool is not simply what is left of the budget."""
    memory: Memory
    """As it was measured."""
    budget_bytes: int
    terms: Mapping[str, int]
    """Planned bytes by name."""
    loading_bytes: int
    """At the peak of loading; the terms of a step and the pool come after it."""
    decisions: tuple[Decision, ...]
    length_is_set: bool = False
    """By the user: it may not be shortened."""
    short: bool = False
    """Less was given than the model allows or than is usual, for want of memory."""
    gpu: GpuChoice | None = None
    """None: it runs on the CPU."""
    budget_is_set: bool = False
    """By the user, in bytes, and no share of what is free."""
    prompt_tokens_beside: int | None = None
    """In a step in which answers go on as well; None: as many as a step has."""

    @property
    def reserve_bytes(self) -> int:
        """Free at start and not to be used: what a share of it leaves. Nothing of a GPU, and nothing beside a budget in
        bytes: that is ours while it is free, whatever becomes of the rest."""
        if self.gpu is not None or self.budget_is_set:
            return 0
        return max(0, self.memory.available_bytes - self.budget_bytes)
