"""What to do when it does not fit: one table of candidate changes, cheapest first, and the search through it.

    layers as the plan places them, where their number was set - configuration (utilization, context, sequences, idle
    GPUs) - FP8 KV - a quantized variant: one that is published, one that is made while loading, a file that has to be
    made; with FP8 KV where neither is enough, below four bits where nothing yet is - tiers in RAM that this engine
    serves with - more GPUs, the fewest first - other tiers - a bigger GPU or more RAM - a file to be made that this
    engine cannot read - what serves only part of the traffic - a smaller model, last

    requests longer than the model can read: shorter ones - a model of the same kin that reads them

What does not fit when planned is not offered. Here are the table and the rows that only change settings; rows with
other weights are in quantized_remedies.py, with other machines and models in hardware_remedies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.planner.advice.hardware_remedies import (
    bigger_gpu,
    left_to_the_plan,
    longer_model,
    more_gpus,
    more_ram,
    smaller_model,
    tiers,
    tiers_here,
)
from holdfast.planner.advice.quantized_remedies import (
    EIGHT_BITS_MADE,
    FEWER_BITS,
    FOUR_BITS_MADE,
    SMALLER_KV,
    cut_files,
    cut_ready,
    cut_with_kv,
    files_to_be_made,
    kv_dtype,
    made_eight_bits,
    made_four_bits,
    published,
    smaller_kv,
)
from holdfast.planner.advice.remedy import (
    MODEST,
    USUAL_UTILIZATION,
    Change,
    Kind,
    Remedy,
    also,
    attempts,
    describe_split,
    is_absolute,
    other_splits,
    too_long,
    without_hand,
)
from holdfast.planner.advice.search import first_that_fits
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.fit.search import Plan, fit
from holdfast.planner.inputs.question import MOST_UTILIZATION
from holdfast.planner.models.model_sources import holdfast_source
from holdfast.units import counted

UTILIZATIONS = (0.85, USUAL_UTILIZATION, 0.92, MOST_UTILIZATION)
STEP_TOKENS = {128: 8192, 64: 4096, 32: 2048, 16: 1024, 8: 512, 4: 256, 2: 256, 1: 256}
"""By sequences at once."""
VARIANTS_SHOWN = 3
MUCH_LONGER = 1.25
"""Times the context of any change alone: for less nobody changes several settings."""

Groups = Iterable[Iterable[Change]]


def _utilization(found: Plan, offered: Sequence[Remedy]) -> Groups:
    shares = [] if is_absolute(found.question) else [share for share in UTILIZATIONS if share > found.utilization]
    yield [
        Change(
            found.question,
            {"gpu_memory_utilization": share},
            f"use {share:g} of the memory instead of {found.utilization:g}",
        )
        for share in shares
    ]


def _context(found: Plan, offered: Sequence[Remedy]) -> Groups:
    text = "a context of {context}, the longest that fits"
    yield [Change(found.question, {"max_model_len": None}, text, longest=True)]


def _sequences(found: Plan, offered: Sequence[Remedy]) -> Groups:
    """No more than the traffic has at once; fewer, so that others wait; without traffic, smaller logits and
    activations."""
    question, limits = found.question, found.limits
    traffic, asked = question.traffic, question.settings.max_num_seqs
    if traffic is None:
        most_step = limits.max_num_batched_tokens
        steps = {count: min(step, most_step) for count, step in STEP_TOKENS.items()}
        yield [
            Change(
                question,
                {"max_num_seqs": count, "max_num_batched_tokens": step},
                f"{counted(count, 'sequence')} and {step:,} tokens per step: smaller activations and logits",
            )
            for count, step in steps.items()
            if count < limits.max_num_seqs
        ]
        return
    most = traffic.concurrency
    if asked is not None and asked > most:
        text = f"{counted(most, 'sequence')}, as in the traffic, instead of {asked:,}"
        yield [Change(question, {"max_num_seqs": most}, text)]
    held = int(found.concurrency(traffic.length))
    yield [
        Change(
            question,
            {"max_num_seqs": count, "concurrency": count},
            f"{counted(count, 'sequence')} at once instead of {most}; the rest is queued",
        )
        for count in (held, held - 1, held - 2, *(size for size in STEP_TOKENS if size < held))
        if 1 <= count < most
    ]


def _idle_gpus(found: Plan, offered: Sequence[Remedy]) -> Groups:
    """GPUs that are there and not used, or used in another way: a split that was not requested."""
    devices, stages = len(found.question.machine.devices), found.question.settings.pipeline_parallel
    yield (
        Change(
            question,
            {**split, **more},
            f"use {split['tensor_parallel_size'] * split.get('pipeline_parallel_size', stages)} of the {devices}"
            f" available GPUs, {describe_split(split)}{also(more)}",
        )
        for question, split in other_splits(found.question)
        for more in attempts(question)
    )


def _together(found: Plan, offered: Sequence[Remedy]) -> Groups:
    """Several changes at once: where nothing alone is enough, or where they give a much longer context."""
    if offered:
        yield from _longer_together(found, offered)
        return
    traffic, absolute = found.question.traffic, is_absolute(found.question)
    share = found.utilization if absolute else max(found.utilization, MOST_UTILIZATION)
    changes: list[Change] = []
    for count in (16, 4, 1):
        if traffic is not None and count >= traffic.concurrency:
            continue
        settings: dict[str, object] = {} if absolute else {"gpu_memory_utilization": share}
        settings |= {
            "max_model_len": None,
            "max_num_seqs": count,
            "max_num_batched_tokens": min(2048, found.limits.max_num_batched_tokens),
            **({} if traffic is None else {"concurrency": count}),
        }
        text = ("" if absolute else f"utilization {share:g}, ") + f"{{context}}, {counted(count, 'sequence')}, together"
        changes += [Change(found.question, settings, text, longest=cut) for cut in (False, True)]
    yield changes


def _longer_together(found: Plan, offered: Sequence[Remedy]) -> Groups:
    """Where the context is left to us."""
    question = found.question
    if question.traffic is not None or question.settings.max_model_len is not None or question.machine.kind != "gpu":
        return
    changes: dict[str, object] = {}
    if not is_absolute(question) and found.utilization < MOST_UTILIZATION:
        changes["gpu_memory_utilization"] = MOST_UTILIZATION
    if question.settings.max_num_seqs is None and question.settings.max_num_batched_tokens is None:
        changes |= MODEST
    memory = f"utilization {MOST_UTILIZATION:g}, " if "gpu_memory_utilization" in changes else ""
    sequences = f", {counted(MODEST['max_num_seqs'], 'sequence')}" if "max_num_seqs" in changes else ""
    for kv in dict.fromkeys((None, smaller_kv(found))):
        kv_change, text = ({}, "") if kv is None else ({"kv_cache_dtype": kv}, f"KV in {kv}, ")
        yield [
            Change(
                question,
                {**changes, **kv_change, "max_model_len": None},
                f"{memory}{text}{{context}}{sequences}, together",
                longest=True,
                least_tokens=MUCH_LONGER * max(way.fit.limits.max_model_len for way in offered),
            )
        ]


def _shorter_requests(found: Plan, offered: Sequence[Remedy]) -> Groups:
    """Prompts cut to what the outputs leave of the model's context, and fewer at once where memory requires it."""
    traffic, most = found.question.traffic, found.question.model.spec.max_position
    assert traffic is not None
    output = traffic.output_tokens if traffic.output_tokens < most else most // 2
    shorter = replace(traffic, prompt_tokens=most - output, output_tokens=output, length_tokens=None)
    question, stated = replace(found.question, traffic=shorter), traffic.source == "stated"
    held = int(fit(question).concurrency(most))
    changes = []
    for count in (traffic.concurrency, held, held - 1):
        fewer = count < traffic.concurrency
        settings: dict[str, object] = {"prompt": most - output, "output": output}
        settings |= {"concurrency": count} if fewer or not stated else {}
        settings |= {"max_num_seqs": count} if fewer else {}
        text = f"prompts of at most {counted(most - output, 'token')} with outputs of {output:,}: the model's"
        text += f" context length is {most:,}" + (f", {count} at once" if fewer else "")
        if 1 <= count <= traffic.concurrency:
            changes.append(Change(question, settings, text, note=None if stated else "instead of --traffic"))
    yield changes


@dataclass(frozen=True, slots=True)
class RemedyRow:
    """One kind of remedy."""

    kind: Kind
    price: str | None
    """For people; None: it costs nothing."""
    groups: Callable[[Plan, Sequence[Remedy]], Groups]
    """The candidates, of a plan that does not fit and of the remedies offered before: of each group the first that fits
    is offered. A row that does not apply has none. What is not reached is not planned."""
    most: int | None = None
    """Shown; those that serve all that was requested first."""
    by_hand: bool = False
    """With as many layers or experts in RAM as were set by hand. Other weights and machines are planned without: the
    number was meant for these."""


SLOWER = "slower: part of the weights is read over the link in every step"

BY_HAND = (RemedyRow("tiers", SLOWER, left_to_the_plan, by_hand=True),)
"""Where it was set what waits in RAM: before everything else, and no reason to leave anything out."""
TABLE = (
    RemedyRow("utilization", "less memory is left for other processes on that GPU", _utilization, by_hand=True),
    RemedyRow("context", "longer requests are refused", _context, by_hand=True),
    RemedyRow("sequences", "more requests wait in the queue", _sequences, by_hand=True),
    RemedyRow("idle_gpus", None, _idle_gpus),
    RemedyRow("configuration", "several limits are lower", _together, by_hand=True),
    RemedyRow("kv_cache_dtype", SMALLER_KV, kv_dtype, by_hand=True),
    RemedyRow("quantization", FEWER_BITS, published, VARIANTS_SHOWN),
    RemedyRow("quantization", EIGHT_BITS_MADE, made_eight_bits),
    RemedyRow("quantization", FOUR_BITS_MADE, made_four_bits),
    RemedyRow("quantization", FEWER_BITS, cut_ready, VARIANTS_SHOWN),
    RemedyRow("quantization", "weights and KV in fewer bits: some quality", cut_with_kv),
    RemedyRow("quantization", FEWER_BITS, files_to_be_made, VARIANTS_SHOWN),
    RemedyRow("quantization", FEWER_BITS, cut_files, VARIANTS_SHOWN),
    RemedyRow("tiers", SLOWER, tiers_here),
    RemedyRow("more_gpus", "more hardware", more_gpus),
    RemedyRow("tiers", SLOWER, tiers),
    RemedyRow("bigger_gpu", "other hardware", bigger_gpu),
    RemedyRow("more_ram", "more RAM is used", more_ram),
)  # fmt: skip
LAST = (RemedyRow("smaller_model", "a different model", smaller_model),)
BEYOND_THE_MODEL = (
    RemedyRow("shorter_requests", None, _shorter_requests),
    RemedyRow("longer_model", None, longer_model),
)
"""Where requests are longer than the model can read."""


def ways_out(found: Plan) -> tuple[Remedy, ...]:
    """Nothing where it fits."""
    if too_long(found.question):
        return tuple(_search(found, BEYOND_THE_MODEL))
    if found.fits:
        return ()
    first = _search(found, BY_HAND)
    placed = [way.fit.question.model for way in first]
    ways = [way for way in _search(found, TABLE) if way.kind != "tiers" or way.fit.question.model not in placed]
    if found.question.engine is None:
        ways.sort(key=_is_unread)
    if found.question.traffic is not None:
        # Traffic that is stated is to be served: what lets some of it wait comes after what does not.
        ways.sort(key=lambda way: not way.meets_request)
    return (*first, *ways, *_search(found, LAST))


def _is_unread(way: Remedy) -> bool:
    """A file that nobody has yet, and that this engine could not read on GPUs it runs on: after what can be had."""
    ours = lacks_engine("holdfast", [rank.device.gpu for rank in way.fit.ranks]) is None
    return ours and not way.available and bool(holdfast_source(way.fit.question.model).lacks)


def _search(found: Plan, rows: Iterable[RemedyRow]) -> list[Remedy]:
    offered: list[Remedy] = []
    left, undone = _without_hand(found)
    for row in rows:
        if left is not found and left.fits and not row.by_hand:
            continue
        before = len(offered)
        for group in row.groups(found if row.by_hand else left, offered):
            best = first_that_fits(group, Change.plan)
            if best is not None:
                change = best[0] if row.by_hand else replace(best[0], settings={**undone, **best[0].settings})
                offered.append(change.remedy(row.kind, row.price, found.question, best[1]))
        offered[before:] = sorted(offered[before:], key=_within_a_row)[: row.most]
    return offered


def _within_a_row(way: Remedy) -> tuple[bool, int]:
    """What serves all that was requested first; of more GPUs the fewest, which cost least."""
    return not way.meets_request, len(way.fit.ranks) if way.kind == "more_gpus" else 0


def _without_hand(found: Plan) -> tuple[Plan, dict[str, object]]:
    """Planned without layers or experts in RAM that were set by hand, and the flags for that."""
    if not found.question.settings.offloads:
        return found, {}
    question, undone = without_hand(found.question)
    return (found, {}) if question is found.question else (fit(question), undone)
