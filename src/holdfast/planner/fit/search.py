"""Finds the limits and GPUs with which a model fits. Pure: the same question gives the same plan.

    context or traffic set        the highest limits that fit, on the fewest GPUs
    neither set                   the GPUs and limits with the longest context (default_limits.py)
    pipeline size not set         1, and more where nothing else fits, or a machine has too few GPUs for a layer

GPUs that differ are taken largest first; those that cannot hold one model together are planned apart
(device_groups.py). Monotonic: more memory never turns a fit into a misfit, shortens the context or raises the missing
bytes; only where it makes the GPUs of stages equal, whose layers are then cut evenly. Remedies are in
advice/remedies.py, the report in report/answer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from holdfast.config.engine import DEFAULT_UTILIZATION
from holdfast.footprint.identity_key import Same
from holdfast.planner.fit import devices as choices
from holdfast.planner.fit.count import cannot_hold_weights, check, count_plan, sizes
from holdfast.planner.fit.cpu import count_cpu_plan
from holdfast.planner.fit.device_groups import apart, best, value
from holdfast.planner.fit.devices import largest_first
from holdfast.planner.fit.result import Plan, Rank, describe_budget, describe_devices, device_budget
from holdfast.planner.inputs.question import USEFUL_TOKENS, Question
from holdfast.planner.sizing import default_limits as limits_left_open
from holdfast.planner.sizing.default_limits import LimitPreset, choose, ladder, length_decision

__all__ = [
    "DEFAULT_UTILIZATION",
    "USEFUL_TOKENS",
    "Plan",
    "Question",
    "Rank",
    "describe_budget",
    "describe_devices",
    "device_budget",
    "fit",
]

Counted = Callable[[int, int], Plan]
"""(tensor parallel size, rung index) -> Plan."""
MOST_OF_A_STAGE = 8
"""GPUs that share each layer of a stage: as many as most machines have, with links that are fast enough for it."""
FEW_STAGES = 8
"""So many are tried whatever the number of GPUs, and beyond it those that take all of them."""


def fit(question: Question) -> Plan:
    """On GPUs that can hold a model together; where there are several kinds, on those that hold most."""
    kinds = apart(question, fit)
    return _whole(question) if kinds[0] is question else best([_whole(one) for one in kinds])


def _whole(question: Question) -> Plan:
    """On all GPUs of a kind, or without those that would make the numbers of the others wider."""
    found, narrow = _staged(question), choices.without_wider(question)
    if narrow is None:
        return found
    other = _staged(narrow)
    if value(found) >= value(other):
        return found
    return replace(other, decisions=(*other.decisions, choices.wider_left_out(other)))


def _staged(question: Question) -> Plan:
    if not question.settings.stages_open:
        as_set = _fit(question)
        said = list(as_set.decisions)
        sizes_end = 1 + max((at for at, one in enumerate(said) if one.field == "tensor_parallel_size"), default=-1)
        said[sizes_end:sizes_end] = choices.set_stages(as_set)
        return replace(as_set, decisions=tuple(said))
    found = _fit(_in_stages(question, 1))
    if found.fits:
        return _on_whole_machines(question, found) if _beyond_a_machine(found) else found
    if cannot_hold_weights(question):
        return found
    devices = len(question.machine.devices)
    more = range(2, min(devices, len(question.model.spec.layers)) + 1)
    divided = (stages for stages in more if stages <= FEW_STAGES or devices % stages == 0)
    tried = (_fit(_in_stages(question, stages), most=MOST_OF_A_STAGE) for stages in divided)
    able = (one for one in tried if one.fits)
    better = next(able, None) if question.stated else max(able, key=_worth, default=None)
    return found if better is None else replace(better, decisions=(*better.decisions, choices.stages(better)))


def _beyond_a_machine(found: Plan) -> bool:
    """Each layer over more GPUs than most machines have, which were not found in one."""
    devices = [rank.device for rank in found.ranks]
    return found.tensor_parallel > MOST_OF_A_STAGE and all(one.kind == "gpu" and not one.measured for one in devices)


def _on_whole_machines(question: Question, found: Plan) -> Plan:
    """In the fewest stages of as many GPUs as most machines have that leave as long a context, or as it was found."""
    most = min(len(question.machine.devices) // MOST_OF_A_STAGE, len(question.model.spec.layers))
    tried = (
        _fit(_in_stages(question, stages), most=MOST_OF_A_STAGE, least=MOST_OF_A_STAGE) for stages in range(2, most + 1)
    )
    as_long = (one for one in tried if one.fits and one.limits.max_model_len >= found.limits.max_model_len)
    staged = next(as_long, None)
    return found if staged is None else choices.of_whole_machines(staged, found)


def _worth(found: Plan) -> tuple[int, ...]:
    """Of stages, where nothing is stated: the longest context, then the highest limits, on the fewest GPUs."""
    limits = found.limits
    return limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens, -len(found.ranks)


def _in_stages(question: Question, stages: int) -> Question:
    return replace(question, settings=replace(question.settings, pipeline_parallel=stages, stages_open=False))


def _fit(question: Question, most: int | None = None, least: int = 1) -> Plan:
    """`most`: GPUs that share a layer; None: as many as there are. `least`: so many where the model is split so."""
    question = _with_ranks(question)
    settings, machine = question.settings, question.machine
    if settings.tensor_parallel is None:
        there = max(1, len(machine.devices) // settings.pipeline_parallel)
        able = sizes(Same(question.model.spec), there if most is None else min(there, most))
        able = tuple(size for size in able if size >= least) or able
    else:
        able = (settings.tensor_parallel,)
    for size in able:
        check(question, size)
    rungs, ours = _rungs(question), question.runs_on_cpu
    length = settings.max_model_len or question.model.spec.max_position
    arranged = cache(lambda size: largest_first(question, size, rungs[-1].limits(length)))

    @cache
    def at(size: int, rung: int) -> Plan:
        if not ours:
            return count_plan(arranged(size), size, rungs[rung].limits(length))
        return count_cpu_plan(question, rungs[rung].limits(min(length, rungs[rung].worth_tokens)), lowered=rung > 0)

    if question.stated:
        size, rung = _highest_that_fits(able, len(rungs), at)
    else:
        size, rung = _longest(question, able, rungs, at)
    if ours:
        unset = replace(question, settings=replace(settings, max_model_len=None), traffic=None)
        most_held = count_cpu_plan(unset, rungs[-1].limits(question.model.spec.max_position))
    else:
        most_held = at(size, len(rungs) - 1)
    return _said(arranged(size), rungs, rung, at(size, rung), most_held.longest_tokens)


def _with_ranks(question: Question) -> Question:
    """On a CPU a layer is split over processes, which share one device, as `serve` does it."""
    settings = question.settings
    size, stages = settings.tensor_parallel or 1, settings.pipeline_parallel
    if not question.runs_on_cpu or (size == 1 and stages == 1):
        return question
    ranks = replace(settings, tensor_parallel=1, pipeline_parallel=1, ranks=size, stages=stages)
    return replace(question, settings=ranks)


def _rungs(question: Question) -> tuple[LimitPreset, ...]:
    settings, traffic = question.settings, question.traffic
    return ladder(
        question.machine.kind,
        sequences=settings.max_num_seqs or (traffic.concurrency if traffic else None),
        step_tokens=settings.max_num_batched_tokens,
        least_tokens=question.required[1],
        streamed=settings.offloads,
    )


def _highest_that_fits(able: tuple[int, ...], rungs: int, at: Counted) -> tuple[int, int]:
    """Limits are lowered only where all GPUs together do not have them. Where nothing fits: what holds most."""
    last = rungs - 1
    enough = [size for size in able if at(size, last).fits]
    for rung in range(rungs):
        for size in enough:
            if at(size, rung).fits:
                return size, rung
    return max(able, key=lambda size: (at(size, last).longest_tokens, -at(size, last).short_bytes, -size)), last


def _longest(question: Question, able: tuple[int, ...], rungs: tuple[LimitPreset, ...], at: Counted) -> tuple[int, int]:
    """The fewest GPUs that hold the model's whole context with the defaults, else those that hold most of it."""
    allowed, last = question.model.spec.max_position, len(rungs) - 1
    for size in able:
        if at(size, last).longest_tokens == allowed == at(size, 0).longest_tokens:
            return size, 0

    def held(size: int, rung: int) -> int:
        return min(at(size, rung).longest_tokens, rungs[rung].worth_tokens)

    chosen = {size: choose(rungs, partial(held, size), question.useful_tokens) for size in able}

    def value(size: int) -> tuple[int, ...]:
        rung = chosen[size]
        most = at(size, last)
        return most.longest_tokens, held(size, rung), -rung, -at(size, rung).short_bytes, -size

    best = max(able, key=value)
    return best, chosen[best]


def _said(question: Question, rungs: tuple[LimitPreset, ...], rung: int, found: Plan, longest: int) -> Plan:
    """With the context that these limits are worth, and every choice with its reason."""
    settings, traffic = question.settings, question.traffic
    served = _served(question, rungs[rung], rung, found, longest)
    limits = limits_left_open.decisions(
        rungs,
        rung,
        settings,
        traffic=traffic is not None,
        fits=found.fits,
        context=served if found.fits else found.required_tokens,
    )
    decisions = [*question.decisions, *limits, *found.decisions]
    loading, ours = [*choices.loading(found)], found.own is not None
    if not ours:
        if len(question.machine.devices) > 1 or found.tensor_parallel > 1:
            decisions.append(choices.parallel_size(found))
        decisions += [*choices.left_out(found), *loading, *choices.encoder(found)]
        decisions += [
            *choices.engine(found),
            *choices.number_types(found),
            *choices.weights(found),
            *choices.products(found),
        ]
    ranked = settings.ranks > 1 and question.machine.kind == "gpu"  # Of its ranks a server says it.
    said = ranked or any(one.field == "enable_expert_parallel" for one in decisions)
    if settings.expert_parallel and not said:
        decisions.append(choices.whole_experts(found))
    if settings.max_model_len is None:
        most, streamed = question.model.spec.max_position, settings.offloads and not ours
        chosen = length_decision(served, most, longest, fits=found.fits, streamed=streamed)
        if ours and traffic is not None and served < longest:
            chosen = replace(chosen, reason=f"memory holds {longest:,}; a shorter context leaves room for the traffic")
        decisions.append(chosen)
    decisions += loading if ours else ()
    return replace(
        found,
        limits=replace(found.limits, max_model_len=served),
        longest_tokens=longest,
        decisions=tuple(decisions),
    )


def _served(question: Question, taken: LimitPreset, rung: int, found: Plan, longest: int) -> int:
    """Lowered for traffic, limits leave it as long a context as its own KV would hold: with the next higher ones, which
    take more memory, it may be no longer."""
    if question.settings.max_model_len is not None:
        return question.settings.max_model_len
    if found.own is not None:  # Chosen with its pool.
        return found.limits.max_model_len if found.fits else longest
    if question.traffic is None or not found.fits:
        return min(found.longest_tokens, taken.worth_tokens)
    if rung == 0:
        return found.longest_tokens
    most = question.model.spec.max_position
    return min(rank.kv.longest(found.needed_bytes(rank), most) for rank in found.ranks)
