"""Where a plan cuts layers into stages whose GPUs differ: what each stage has room for, and what layers and KV take of
it. This engine's own stages are in engine_stages.py, the cutting itself in sizing/stages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from holdfast.planner.fit.result import device_budget, needed_bytes
from holdfast.planner.inputs.question import Device, Question
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.planner.sizing.sharded_weights import stage_layers
from holdfast.planner.sizing.stages import HeldBytes, cut_for_rooms
from holdfast.planner.sizing.terms import Term

ALIKE_SHARE = 0.01
"""Of the largest budget: GPUs that differ by no more are alike, whatever a neighbour holds of one just now."""
Share = tuple[tuple[Term, ...], KVCost, tuple[Term, ...]]
"""What a rank of a stage holds on devices of one kind: its terms, what sequences cost, and the peak of loading."""
ShareOf = Callable[[Device, int, range], Share]
"""Of a device, a stage, and the layers that it would have."""


def ends_for(
    held: HeldBytes, rooms: Sequence[int], budgets: Sequence[int], even: Sequence[int], useful: int
) -> list[int]:
    """Where layers are cut, 0 and their number included; empty: evenly, as at `even`, whose steps take alike. That is
    so where every stage holds all KV that is of use, or budgets are alike and each holds what must fit: a pipeline is
    not made slower for nothing."""

    def holds(kv: int) -> bool:
        stages = enumerate(zip(pairwise(even), rooms, strict=True))
        return all(held(stage, *part, kv) <= room for stage, (part, room) in stages)

    alike = max(budgets) - min(budgets) <= ALIKE_SHARE * max(budgets)
    if holds(useful) or (alike and holds(0)):
        return []
    return cut_for_rooms(held, rooms, even[-1], useful)


def planned_ends(
    question: Question, tensor_parallel: int, share: ShareOf, layer_weights: Sequence[int], sequences: int
) -> list[int]:
    """Of a plan whose stages have GPUs of their own; empty: evenly. `layer_weights`: of a rank that has this layer
    alone, with what is beside it at an end of the model. `sequences`: at once."""
    stages, layers = question.settings.pipeline_parallel, len(layer_weights)
    chosen = [_tightest(question, tensor_parallel, stage) for stage in range(stages)]
    budgets = [device_budget(device, question.utilization) for device in chosen]
    if len(set(budgets)) == 1 or layers < stages:
        return []
    most = layers - stages + 1
    rooms, each, beside = list[int](), list[int](), list[KVCost]()
    for stage, (device, budget) in enumerate(zip(chosen, budgets, strict=True)):
        # What a layer adds besides weights and KV (graphs, adapters) is as much for one as for another.
        first = layers - 1 if stage == stages - 1 else stage
        few, kv, _ = share(device, stage, range(first, first + 1))
        many, _, _ = share(device, stage, range(stage, stage + most))
        each.append(max(0, -(-(_others(many) - _others(few)) // max(1, most - 1))))
        rooms.append(budget - _others(few) + each[-1])
        beside.append(kv)
    weights = [0, *accumulate(layer_weights)]
    costs = [share(chosen[0], 0, range(layer, layer + 1))[1] for layer in range(layers)]
    # A draft model's, beside the last layer's own.
    draft = replace(beside[-1], growing_bytes=beside[-1].growing_bytes - costs[-1].growing_bytes, windows=())

    @cache
    def kv_sums(blocks: int) -> list[int]:
        known = {cost: _demand(question, cost, blocks) for cost in set(costs)}
        sums = [0, *accumulate(known[cost] for cost in costs)]
        sums[-1] += _demand(question, replace(draft, fixed_bytes=0), blocks) if draft.growing_bytes else 0
        return sums

    def held(stage: int, first: int, last: int, blocks: int) -> int:
        kv = kv_sums(blocks)
        return weights[last] - weights[first] + kv[last] - kv[first] + (last - first) * each[stage]

    even = [0, *(one.stop for one in stage_layers(layers, stages))]
    longest = question.settings.max_model_len or question.model.spec.max_position
    return ends_for(held, rooms, budgets, even, sequences * longest // costs[0].block_tokens)


def _tightest(question: Question, tensor_parallel: int, stage: int) -> Device:
    """Of the GPUs that share a stage's layers."""
    of_stage = question.machine.devices[stage * tensor_parallel : (stage + 1) * tensor_parallel]
    return min(of_stage, key=lambda device: device_budget(device, question.utilization))


def _others(terms: Sequence[Term]) -> int:
    return sum(term.nbytes for term in terms if term.name != "weights")


def _demand(question: Question, cost: KVCost, blocks: int) -> int:
    """What must fit, and so many blocks of tokens, in sequences that are as long as may be."""
    asked = question.settings.max_model_len
    longest, tokens = asked or question.model.spec.max_position, blocks * cost.block_tokens
    sequences, rest = divmod(tokens, longest)
    grown = cost.needed_bytes(sequences, longest) + (cost.needed_bytes(1, rest) if rest else 0)
    return max(needed_bytes(cost, *question.required, asked), grown)
