"""This engine's stages on GPUs that differ, as it allocates them: where layers are cut, and of each stage the rank
whose GPU has the least room. Stages on equal GPUs are not counted one by one: the rank that holds most stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from holdfast.footprint.cpu import Limits
from holdfast.kvcache.groups import KVLayout
from holdfast.planner.fit.result import Rank, device_budget, needed_bytes
from holdfast.planner.fit.stage_cuts import Share, ends_for
from holdfast.planner.inputs.question import Device, Question
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import RankShares

SharesOf = Callable[[tuple[int, ...]], RankShares]
"""By where layers are cut; nowhere named: evenly."""
ShareOf = Callable[[Device, int | None, tuple[int, ...]], Share]
"""Of a device, a stage, and where layers are cut."""


@dataclass(frozen=True, slots=True)
class EngineStages:
    ranks: tuple[Rank, ...]
    page_bytes: tuple[int, ...]
    """Of each one's pool."""
    ends: tuple[int, ...]
    """Where layers are cut, 0 and their number included; empty: evenly."""

    def with_equal_pools(self) -> tuple[Rank, ...]:
        """Each with as many pages as the one that holds the fewest: a block is a page of every stage."""
        sized = list(zip(self.ranks, self.page_bytes, strict=True))
        pages = min(rank.room_bytes // page for rank, page in sized)
        return tuple(replace(rank, most_kv_bytes=pages * page) for rank, page in sized)


def engine_stages(
    question: Question,
    weights: EngineWeights,
    shares_of: SharesOf,
    share_of: ShareOf,
    types: tuple[str, str],
    limits: Limits,
) -> EngineStages:
    """`types`: what is computed in, and what KV is kept in."""
    devices, block = question.machine.stage_devices, question.settings.block_tokens
    budgets = [device_budget(device, question.utilization) for device in devices]
    ends = _ends(question, weights, shares_of(()), share_of(devices[0], None, ()), budgets, types, limits)
    shares, ranks, pages = shares_of(ends), list[Rank](), list[int]()
    for stage, (device, budget) in enumerate(zip(devices, budgets, strict=True)):
        terms, kv, loading = share_of(device, stage, ends)
        ranks.append(Rank(device=device, stage=stage, budget_bytes=budget, terms=terms, kv=kv, loading=loading))
        pages.append(shares.gpu_kv_layout(stage, block_tokens=block, kv_dtype=types[1]).page_bytes)
    return EngineStages(tuple(ranks), tuple(pages), ends)


def _ends(
    question: Question,
    weights: EngineWeights,
    even: RankShares,
    share: Share,
    budgets: Sequence[int],
    types: tuple[str, str],
    limits: Limits,
) -> tuple[int, ...]:
    """`even`, `share`: of stages that are cut evenly, what no cut changes among it."""
    terms, kv, loading = share
    sizes = {term.name: term.nbytes for term in terms}
    adapters = -(-sizes.get("adapters", 0) // min(stage.layers for stage in even.stages))
    kept = sum(size for name, size in sizes.items() if name not in ("weights", "adapters"))
    to_load = max(0, sum(term.nbytes for term in loading if term.name != "weights") - kept)
    layout = even.gpu_kv_layout(block_tokens=question.settings.block_tokens, kv_dtype=types[1])
    needed = needed_bytes(kv, *question.required, question.settings.max_model_len)
    least_blocks, set_bytes = -(-needed // layout.page_bytes), question.settings.kv_cache_memory_bytes
    useful = 1 + layout.blocks_side_by_side(limits.max_num_seqs, limits.max_model_len, limits.max_num_batched_tokens)
    if set_bytes is not None:
        useful = min(useful, set_bytes // layout.page_bytes)
    own, before, behind = even.gpu_layers(weights, dtype=types[0])
    sums, kinds = [0, *accumulate(size + adapters for size in own)], _kinds(layout, len(own))
    place_bytes = layout.page_bytes // layout.layers_per_page

    def held(stage: int, first: int, last: int, blocks: int) -> int:
        ends = (before if stage == 0 else 0) + (behind if stage == len(budgets) - 1 else 0)
        places = max(-(-(counts[last] - counts[first]) // groups) for counts, groups in kinds)
        # What loading takes lies where KV comes later.
        return sums[last] - sums[first] + ends + max((least_blocks + blocks) * places * place_bytes, to_load)

    rooms = [budget - kept for budget in budgets]
    at = [0, *(stage.last for stage in even.stages)]
    return tuple(ends_for(held, rooms, budgets, at, max(0, useful - least_blocks)))


def _kinds(layout: KVLayout, layers: int) -> list[tuple[list[int], int]]:
    """Of each kind of layers how many there are before each layer, and the groups that they are dealt out to, evenly:
    a stage's pages have as many places as the group with most of its layers."""
    found = []
    for window in dict.fromkeys(group.window for group in layout.groups):
        groups = [group for group in layout.groups if group.window == window]
        held = {layer for group in groups for layer in group.layers}
        found.append(([0, *accumulate(layer in held for layer in range(layers))], len(groups)))
    return found
