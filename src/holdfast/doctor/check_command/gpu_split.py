"""How a command divides a GPU where that is no share of the whole of it: SGLang's static share, vLLM's pool in bytes.

    sglang   free at start x share = weights, draft and KV together;  steps and graphs get the rest
    vllm     --kv-cache-memory-bytes = KV;  weights and steps beside it, whatever the utilization is

Counted with the planner's own terms, on the rank that has least. Knows no words for people: unplanned.py says them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.doctor.command.parse import ServerCommand
from holdfast.errors import HoldfastError
from holdfast.units import MIB, parse_bytes

if TYPE_CHECKING:
    from holdfast.planner.fit.search import Plan, Question

SHARE, POOL = "--mem-fraction-static", "--kv-cache-memory-bytes"
_CONTEXT = ("context", "driver")
DRAFT = "draft"
"""The planner's term for the weights of a draft model."""
_BLOCK_TOKENS = 16
_OWN_LIMITS = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""Below so many GiB: SGLang's tokens of a chunk, and the largest batch of its graphs with fewer than 4 ranks, or more
(0.5.9's)."""
_OWN_LIMITS_ABOVE = (16_384, 512, 512)
_MANY_RANKS = 4
_WHOLE_PROMPT_TOKENS = 16_384
"""Of a step where chunks are switched off: --max-prefill-tokens, left alone."""
_CHUNK_MIB, _GRAPH_MIB, _CONSTANT_MIB, _LARGE_MIB, _LARGE_GIB = 1.5, 2, 512, 10 * 1024, 60
_DRAFT_MIB = {"STANDALONE": 6 * 1024, "NGRAM": 0}
_EAGLE_MIB = 2 * 1024
_LEAST_LEFT = 0.5
"""Of what SGLang leaves by itself: with less, graphs and long prompts were seen to run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Of the rank that has least."""

    flag: str
    free_bytes: int
    """When the server starts, without its context."""
    weights_bytes: int
    """And what lies with them."""
    draft_bytes: int
    beside_bytes: int
    """Steps, graphs and buffers, as they are counted; since that is for another engine, for SGLang at the least half of
    what it would leave them."""
    counted_bytes: int
    """The same as a plan counts it."""
    context_bytes: int
    needed_bytes: int
    """KV of one sequence of the context."""
    pool_bytes: int
    """KV as the command sets it aside; negative: not even the weights fit."""
    share: float | None = None
    own_share: float | None = None
    """What SGLang works out where none is set; it leaves room for a draft outside of it."""

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.draft_bytes

    @property
    def room_bytes(self) -> int:
        """For KV, beside all the rest."""
        return self.free_bytes - self.held_bytes - self.beside_bytes

    @property
    def left_bytes(self) -> int:
        """Outside of weights and KV."""
        return self.free_bytes - self.held_bytes - self.pool_bytes

    @property
    def least_share(self) -> float:
        """In hundredths, that holds one sequence."""
        return math.ceil((self.held_bytes + self.needed_bytes) / self.free_bytes * 100) / 100

    @property
    def most_share(self) -> float:
        """That leaves steps and graphs what they take."""
        return math.floor((self.free_bytes - self.beside_bytes) / self.free_bytes * 100) / 100

    @property
    def settable(self) -> bool:
        """Whether any value of the flag would do."""
        if self.share is None:
            return self.needed_bytes <= self.room_bytes
        return self.least_share <= self.most_share

    def with_share(self, share: float) -> Split:
        held = self.weights_bytes if share == self.own_share else self.held_bytes
        return replace(self, share=share, pool_bytes=int(share * self.free_bytes) - held)


def split_of(command: ServerCommand, question: Question) -> Split | None:
    """None: it is divided by a share of the whole, as a plan divides it."""
    from holdfast.planner.engines.commands import HELD_BEFORE_KV
    from holdfast.planner.fit.search import fit

    if question.machine.kind != "gpu":
        return None
    pool = _pool(command)
    share = _share(command, question) if command.engine == "sglang" else None
    if pool is None and share is None:
        return None
    found = fit(divided(question, None))
    rank = min(found.ranks, key=lambda one: one.room_bytes)
    context = sum(term.nbytes for term in rank.terms if term.name in _CONTEXT)
    weights = sum(term.nbytes for term in rank.terms if term.name in HELD_BEFORE_KV)
    draft = sum(term.nbytes for term in rank.terms if term.name == DRAFT)
    counted = sum(term.nbytes for term in rank.terms) + rank.null_bytes - weights - draft - context
    split = Split(
        flag=POOL if share is None else SHARE,
        free_bytes=max(1, rank.budget_bytes - context),
        weights_bytes=weights,
        draft_bytes=draft,
        beside_bytes=counted,
        counted_bytes=counted,
        context_bytes=context,
        needed_bytes=found.needed_bytes(rank),
        pool_bytes=pool or 0,
    )
    if share is None:
        return split
    beside = max(counted, int(_left_mib(command, question) * MIB * _LEAST_LEFT))
    return replace(split, beside_bytes=beside, own_share=_own_share(command, question)).with_share(share)


def divided(question: Question, split: Split | None) -> Question:
    """With what the split leaves for a plan to divide; None: all that is free."""
    devices = []
    for device in question.machine.devices:
        budget = device.free_bytes if device.budget_bytes is None else min(device.budget_bytes, device.free_bytes)
        if split is not None:
            pool = max(0, min(split.pool_bytes, split.room_bytes))
            budget = min(budget, split.context_bytes + split.held_bytes + split.counted_bytes + pool)
        devices.append(replace(device, budget_bytes=budget))
    return replace(question, machine=replace(question.machine, devices=tuple(devices)))


def longest_tokens(found: Plan, split: Split) -> int:
    """Of a context that its pool holds, in whole blocks."""
    most = found.question.model.spec.max_position
    held = min(rank.kv.longest(max(0, split.pool_bytes), most) for rank in found.ranks)
    return held // _BLOCK_TOKENS * _BLOCK_TOKENS


def sglang_limits(command: ServerCommand, question: Question) -> Question:
    """With those that SGLang takes where none are set."""
    if question.machine.kind != "gpu":
        return question
    settings = question.settings
    chunk, graphs = _own_limits(command, question)
    sequences = settings.max_num_seqs or graphs
    step = max(settings.max_num_batched_tokens or chunk, sequences)
    set_so: dict[str, Any] = {"max_num_seqs": sequences, "max_num_batched_tokens": step}
    set_so["graphs"] = not command.has("disable-cuda-graph")
    return replace(question, settings=replace(settings, **set_so))


def _pool(command: ServerCommand) -> int | None:
    written = command.value(POOL) if command.engine == "vllm" else None
    try:
        return None if written is None else parse_bytes(written)
    except HoldfastError:
        return None


def _share(command: ServerCommand, question: Question) -> float | None:
    written = command.value(SHARE)
    try:
        share = _own_share(command, question) if written is None else float(written)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def _own_limits(command: ServerCommand, question: Question) -> tuple[int, int]:
    """Tokens of a step, and the largest batch of its graphs."""
    total_gib = _total_mib(question) / 1024
    row = next((limits for below, *limits in _OWN_LIMITS if total_gib < below), list(_OWN_LIMITS_ABOVE))
    ranks = question.settings.tensor_parallel or 1
    chunk, graphs = row[0], row[1 if ranks < _MANY_RANKS else 2]
    if command.value("chunked-prefill-size") == "-1":
        chunk = _WHOLE_PROMPT_TOKENS
    written = command.value("cuda-graph-max-bs") or ""
    return chunk, int(written) if written.isdecimal() and 0 < int(written) <= _WHOLE_PROMPT_TOKENS else graphs


def _left_mib(command: ServerCommand, question: Question) -> float:
    """That SGLang leaves steps and graphs: so much a token of a chunk and a sequence of its graphs."""
    settings = question.settings
    chunk, graphs = _own_limits(command, question)
    ranks = (settings.tensor_parallel or 1) * settings.pipeline_parallel
    left = _CONSTANT_MIB + max(settings.max_num_batched_tokens or chunk, 2048) * _CHUNK_MIB + graphs * _GRAPH_MIB
    left += ranks / 8 * 1024
    return max(left, _LARGE_MIB) if _total_mib(question) > _LARGE_GIB * 1024 else left


def _own_share(command: ServerCommand, question: Question) -> float:
    total, method = _total_mib(question), command.value("speculative-algorithm")
    left = _left_mib(command, question) + (0 if method is None else _DRAFT_MIB.get(method.upper(), _EAGLE_MIB))
    return max(0.01, round((total - left) / total, 3))


def _total_mib(question: Question) -> float:
    return min(device.total_bytes for device in question.machine.devices) / MIB
