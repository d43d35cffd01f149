"""What to do when it does not fit: the ways out in their order, each planned before it is offered.

    configuration (utilization, context, sequences, GPUs that stand idle) - FP8 KV - a quantized variant, with FP8 KV
    where neither is enough, below four bits where nothing yet is - more GPUs - tiers - a bigger GPU or more RAM - what
    serves only part of the traffic - a smaller model, last

    requests longer than the model can read: shorter ones - a model of the same kin that reads them

What does not fit when planned is not here. Here are the order and the ways that only change settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.planner.advice.hardware_remedies import (
    bigger_gpu,
    longer_model,
    more_gpus,
    more_ram,
    smaller_model,
    tiered,
)
from holdfast.planner.advice.remedy import (
    MODEST_SEQUENCES,
    MODEST_STEP_TOKENS,
    MOST_UTILIZATION,
    USUAL_UTILIZATION,
    Remedy,
    attempts,
    first_that_fits,
    longest,
    meets,
    model_setting,
    other_splits,
    planned,
    said,
    split_said,
    too_long,
    with_settings,
)
from holdfast.planner.compat.gpu_kernels import lacks_engine, lacks_method
from holdfast.planner.fit.count import least_bytes
from holdfast.planner.fit.search import Fit, Question, fit
from holdfast.planner.inputs.question import KV_ELEMENT_BYTES
from holdfast.planner.models.model_sources import MADE_WHILE_LOADING
from holdfast.planner.models.variants import (
    GGUF_TYPES,
    HOLDFAST_GGUF_TYPES,
    TWO_BIT_GGUF_TYPES,
    Variant,
    derived_variants,
    is_plain,
    lower_variants,
    published_variants,
)
from holdfast.units import counted, format_bytes

UTILIZATIONS = (0.85, USUAL_UTILIZATION, 0.92, MOST_UTILIZATION)
SEQUENCES, STEP_TOKENS = (128, 64, 32, 16, 8, 4, 2, 1), (8192, 4096, 2048, 1024, 512, 256, 256, 256)
VARIANTS_SHOWN = 3
MUCH_LONGER = 1.25
"""Times the context of any change alone: for less nobody changes several settings."""


def ways_out(found: Fit) -> tuple[Remedy, ...]:
    """Nothing where it fits."""
    if too_long(found.question):
        return _marked(found, [*_shorter_requests(found), *longer_model(found)])
    if found.fits:
        return ()
    ways = [*_utilization(found), *_context(found), *_sequences(found), *_idle_gpus(found)]
    ways += _longer_together(found, ways) if ways else _together(found)
    others = variants(found)
    ways += _kv_dtype(found)
    enough = any(meets(found.question, way.fit) for way in ways)
    ways += _quantized(found, others, lower=not enough)
    ways += [*more_gpus(found, others), *tiered(found, others), *bigger_gpu(found, others), *more_ram(found)]
    if found.question.traffic is not None:
        # Traffic that is stated is to be served: what lets some of it wait comes after what does not.
        ways.sort(key=lambda way: not meets(found.question, way.fit))
    return _marked(found, [*ways, *smaller_model(found)])


def _marked(found: Fit, ways: Sequence[Remedy]) -> tuple[Remedy, ...]:
    return tuple(replace(way, meets_request=meets(found.question, way.fit)) for way in ways)


def _utilization(found: Fit) -> Iterator[Remedy]:
    if any(rank.device.budget_bytes is not None for rank in found.ranks):
        return
    for share in UTILIZATIONS:
        if share > found.utilization:
            better = planned(with_settings(found.question, utilization=share))
            if better is not None:
                yield Remedy(
                    kind="utilization",
                    change=f"use {share:g} of the memory instead of {found.utilization:g}",
                    settings={"gpu_memory_utilization": share},
                    fit=better,
                )
                return


def _context(found: Fit) -> Iterator[Remedy]:
    shorter = longest(found.question)
    if shorter is not None:
        yield Remedy(
            kind="context",
            change=f"a context of {counted(shorter.limits.max_model_len, 'token')}, the longest that fits",
            settings={"max_model_len": shorter.limits.max_model_len},
            fit=shorter,
        )


def _sequences(found: Fit) -> Iterator[Remedy]:
    """Fewer at once: of the traffic, so that others wait; without any, for smaller logits and activations."""
    traffic = found.question.traffic
    yield from _no_more_than_the_traffic(found)
    if traffic is not None:
        held = int(found.concurrency(traffic.length))
        for count in (held, held - 1, held - 2, *(size for size in SEQUENCES if size < held)):
            if not 1 <= count < traffic.concurrency:
                continue
            question = replace(
                with_settings(found.question, max_num_seqs=count), traffic=replace(traffic, concurrency=count)
            )
            fewer = planned(question)
            if fewer is not None:
                yield Remedy(
                    kind="sequences",
                    change=f"{counted(count, 'sequence')} at once instead of {traffic.concurrency}; the rest is queued",
                    settings={"max_num_seqs": count, "concurrency": count},
                    fit=fewer,
                )
                return
    for count, step in zip(SEQUENCES, STEP_TOKENS, strict=False):
        if count >= found.limits.max_num_seqs or traffic is not None:
            continue
        steps = min(step, found.limits.max_num_batched_tokens)
        fewer = planned(with_settings(found.question, max_num_seqs=count, max_num_batched_tokens=steps))
        if fewer is not None:
            yield Remedy(
                kind="sequences",
                change=f"{counted(count, 'sequence')} and {steps:,} tokens per step: smaller activations and logits",
                settings={"max_num_seqs": count, "max_num_batched_tokens": steps},
                fit=fewer,
            )
            return


def _no_more_than_the_traffic(found: Fit) -> Iterator[Remedy]:
    """Where more sequences were set than the traffic has at once: their logits and tables are for nobody."""
    traffic, asked = found.question.traffic, found.question.settings.max_num_seqs
    if traffic is None or asked is None or asked <= traffic.concurrency:
        return
    fewer = planned(with_settings(found.question, max_num_seqs=traffic.concurrency))
    if fewer is not None:
        yield Remedy(
            kind="sequences",
            change=f"{counted(traffic.concurrency, 'sequence')}, as in the traffic, instead of {asked:,}",
            settings={"max_num_seqs": traffic.concurrency},
            fit=fewer,
        )


def _together(found: Fit) -> Iterator[Remedy]:
    """All of it at once, where nothing alone is enough."""
    traffic = found.question.traffic
    absolute = any(rank.device.budget_bytes is not None for rank in found.ranks)
    share = found.utilization if absolute else max(found.utilization, MOST_UTILIZATION)
    for count in (16, 4, 1):
        if traffic is not None and count >= traffic.concurrency:
            continue
        changed = with_settings(
            found.question,
            utilization=share,
            max_num_seqs=count,
            max_num_batched_tokens=min(2048, found.limits.max_num_batched_tokens),
        )
        if traffic is not None:
            changed = replace(changed, traffic=replace(traffic, concurrency=count))
        better = planned(changed) or longest(changed)
        if better is None:
            continue
        limits = better.limits
        settings: dict[str, object] = {} if absolute else {"gpu_memory_utilization": share}
        settings |= {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": count,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
        }
        if traffic is not None:
            settings["concurrency"] = count
        memory = "" if absolute else f"utilization {share:g}, "
        yield Remedy(
            kind="configuration",
            change=f"{memory}{counted(limits.max_model_len, 'token')}, {counted(count, 'sequence')}, together",
            settings=settings,
            fit=better,
        )
        return


def _longer_together(found: Fit, alone: Sequence[Remedy]) -> Iterator[Remedy]:
    """Several changes at once, where the context is left to us and together they give much more of it."""
    question = found.question
    if question.traffic is not None or question.settings.max_model_len is not None or question.machine.kind != "gpu":
        return
    changes: dict[str, object] = {}
    if all(rank.device.budget_bytes is None for rank in found.ranks) and found.utilization < MOST_UTILIZATION:
        changes["gpu_memory_utilization"] = MOST_UTILIZATION
        question = with_settings(question, utilization=MOST_UTILIZATION)
    if question.settings.max_num_seqs is None and question.settings.max_num_batched_tokens is None:
        modest = {"max_num_seqs": MODEST_SEQUENCES, "max_num_batched_tokens": MODEST_STEP_TOKENS}
        changes |= modest
        question = with_settings(question, **modest)
    most = max(way.fit.limits.max_model_len for way in alone)
    for kv in dict.fromkeys((question.settings.kv_cache_dtype, _smaller_kv(found) or question.settings.kv_cache_dtype)):
        better = longest(with_settings(question, kv_cache_dtype=kv))
        if better is None or better.limits.max_model_len < MUCH_LONGER * most:
            continue
        most = better.limits.max_model_len
        also = {} if kv == question.settings.kv_cache_dtype else {"kv_cache_dtype": kv}
        memory = f"utilization {MOST_UTILIZATION:g}, " if "gpu_memory_utilization" in changes else ""
        sequences = f", {counted(better.limits.max_num_seqs, 'sequence')}" if "max_num_seqs" in changes else ""
        yield Remedy(
            kind="configuration",
            change=f"{memory}{f'KV in {kv}, ' if also else ''}{counted(most, 'token')}{sequences}, together",
            settings={**changes, **also, "max_model_len": most},
            fit=better,
        )


def _idle_gpus(found: Fit) -> Iterator[Remedy]:
    """GPUs that are there and not used, or used in another way: a split that was not asked for."""
    devices = len(found.question.machine.devices)
    for question, split in other_splits(found.question):
        better = first_that_fits(question)
        if better is not None:
            more, changes = better
            yield Remedy(
                kind="idle_gpus",
                change=f"use {len(more.ranks)} of the {devices} available GPUs, {split_said(split)}{said(changes)}",
                settings={**split, **changes},
                fit=more,
            )
            return


def _shorter_requests(found: Fit) -> Iterator[Remedy]:
    """Prompts cut to what the answers leave of the model's context, and fewer at once where memory wants that too."""
    traffic, most = found.question.traffic, found.question.model.spec.max_position
    assert traffic is not None
    output = traffic.output_tokens if traffic.output_tokens < most else most // 2
    shorter = replace(traffic, prompt_tokens=most - output, output_tokens=output, length_tokens=None)
    held = int(fit(replace(found.question, traffic=shorter)).concurrency(most))
    for count in (traffic.concurrency, held, held - 1):
        if not 1 <= count <= traffic.concurrency:
            continue
        question = replace(found.question, traffic=replace(shorter, concurrency=count))
        fewer = count < traffic.concurrency
        better = planned(with_settings(question, max_num_seqs=count) if fewer else question)
        if better is None:
            continue
        settings: dict[str, object] = {"prompt": most - output, "output": output}
        if fewer or traffic.source != "stated":
            settings["concurrency"] = count
        if fewer:
            settings["max_num_seqs"] = count
        yield Remedy(
            kind="shorter_requests",
            change=f"prompts of at most {counted(most - output, 'token')} with outputs of {output:,}: the model's"
            f" context length is {most:,}" + (f", {count} at once" if fewer else ""),
            settings=settings,
            fit=better,
            note=None if traffic.source == "stated" else "instead of --traffic",
        )
        return


# KV and weights in fewer bits


def _smaller_kv(found: Fit) -> str | None:
    """What KV could be kept in instead; None: it is that already, or the GPU has no such units."""
    on_gpu = found.question.machine.kind == "gpu"
    able = on_gpu and all(rank.device.gpu is not None and rank.device.gpu.fp8 for rank in found.ranks)
    smaller = "fp8" if able else "float16" if not on_gpu and found.kv_dtype == "float32" else None
    return None if smaller == found.kv_dtype else smaller


def _kv_dtype(found: Fit) -> Iterator[Remedy]:
    smaller = _smaller_kv(found)
    if smaller is None:
        return
    better = planned(with_settings(found.question, kv_cache_dtype=smaller))
    if better is not None:
        yield Remedy(
            kind="kv_cache_dtype",
            change=f"KV in {smaller}: {counted(KV_ELEMENT_BYTES[smaller], 'byte')} per element instead of"
            f" {KV_ELEMENT_BYTES[found.kv_dtype]}",
            settings={"kv_cache_dtype": smaller},
            fit=better,
        )


def variants(found: Fit) -> list[Variant]:
    """Published ones first, most bits first; only what engines have kernels for on these GPUs."""
    model, devices = found.question.model, found.question.machine.devices
    if not is_plain(model):
        return []
    if found.question.engine == "llama.cpp":
        return list(derived_variants(model, GGUF_TYPES))
    if found.question.machine.kind == "cpu":
        return list(derived_variants(model, HOLDFAST_GGUF_TYPES if model.spec.runnable else GGUF_TYPES))
    gpus = [device.gpu for device in devices]
    published = [one for one in published_variants(model) if lacks_method(one.model, gpus) is None]
    known = {variant.model.spec.quantization.bits for variant in published if variant.model.spec.quantization}
    made = tuple(method for method, bits in (("fp8", 8), ("nf4", 4)) if bits not in known)
    every = [*published, *(one for one in derived_variants(model, made) if lacks_method(one.model, gpus) is None)]
    if lacks_engine("vllm", gpus) is not None:
        every = []
    every.sort(key=lambda variant: -(variant.model.spec.quantization.bits if variant.model.spec.quantization else 0))
    return [*every, *derived_variants(model, GGUF_TYPES if not every else ("Q4_K_M",))]


def _quantized(found: Fit, others: Sequence[Variant], *, lower: bool) -> Iterator[Remedy]:
    """Published ones first, of these the most bits that fit. A GGUF that nobody has made yet only where nothing else
    fits on a GPU; a shorter context only where no variant holds the one that was asked for; fewer bits than four, with
    `lower`, only then too."""
    whole: list[Remedy] = []
    shorter: list[Remedy] = []
    both = _kv_beside_a_variant(found)
    to_be_made = found.question.machine.kind == "gpu" and found.question.engine != "llama.cpp"
    for variant in sorted(others, key=lambda one: not one.published):
        if variant.method in GGUF_TYPES and whole and to_be_made:
            continue
        question = replace(found.question, model=variant.model)
        way = _variant_whole(found, variant, question, {})
        if way is None and both:
            way = _variant_whole(found, variant, with_settings(question, kv_cache_dtype=both), {"kv_cache_dtype": both})
        if way is not None:
            whole.append(way)
        elif not whole:
            shorter += _variant_shorter(found, variant, question)
    if not whole:
        shorter += _fewer_bits(found, cut=not shorter) if lower else ()
        shorter.sort(key=lambda way: not meets(found.question, way.fit))
    yield from (whole or shorter)[:VARIANTS_SHOWN]


def _fewer_bits(found: Fit, *, cut: bool) -> Iterator[Remedy]:
    """The most bits of those below four that hold what was asked for; with `cut`, else a part of it."""
    question = found.question
    if question.machine.kind == "cpu" and question.engine != "llama.cpp" and question.model.spec.runnable:
        return  # Holdfast computes with none of them.
    least = least_bytes(question)
    tried = [(one, replace(question, model=one.model)) for one in lower_variants(question.model)]
    tried = [(one, changed) for one, changed in tried if least_bytes(changed) < least]
    for variant, changed in tried:
        way = _variant_whole(found, variant, changed, {})
        if way is not None:
            yield way
            return
    for variant, changed in tried if cut else ():
        for way in _variant_shorter(found, variant, changed):
            yield way
            return


def _kv_beside_a_variant(found: Fit) -> str | None:
    """What KV would be kept in where a variant alone is not enough; None: that alone does, or cannot be."""
    smaller = _smaller_kv(found) if found.question.machine.kind == "gpu" else None
    if smaller is None or planned(with_settings(found.question, kv_cache_dtype=smaller)) is not None:
        return None
    return smaller


def _variant_whole(found: Fit, variant: Variant, question: Question, also: dict[str, object]) -> Remedy | None:
    """With what was asked for, and with what `also` sets; over other GPUs of those that are there where it takes
    them."""
    better = first_that_fits(question)
    if better is not None:
        return _variant_way(found, variant, better[0], {**also, **better[1]})
    for changed, split in other_splits(question):
        better = first_that_fits(changed)
        if better is not None:
            return _variant_way(found, variant, better[0], {**also, **split, **better[1]})
    return None


def _variant_shorter(found: Fit, variant: Variant, question: Question) -> Iterator[Remedy]:
    for changed, changes in attempts(question):
        cut = longest(changed)
        if cut is not None:
            yield _variant_way(found, variant, cut, {"max_model_len": cut.limits.max_model_len, **changes})
            return


def _made_first(made_as: str | None) -> str:
    coarse = "; two bits noticeably reduce quality: compare its output with a smaller model's"
    return "the file has to be converted or found first" + (coarse if made_as in TWO_BIT_GGUF_TYPES else "")


def _variant_way(found: Fit, variant: Variant, better: Fit, changes: dict[str, object]) -> Remedy:
    sizes = f"{format_bytes(better.weights_bytes)} of weights instead of {format_bytes(found.weights_bytes)}"
    made_as = better.question.model.made_as
    to_be_made = made_as is not None and made_as not in MADE_WHILE_LOADING["vllm"]
    # Who asks for llama.cpp has a GGUF made or found in any case.
    available = not to_be_made or found.question.engine == "llama.cpp"
    return Remedy(
        kind="quantization",
        change=f"{variant.label}: {sizes}{said(changes)}",
        settings={**model_setting(variant), **changes},
        fit=better,
        available=available,
        note=_made_first(made_as) if to_be_made else None,
    )
