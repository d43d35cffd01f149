"""Rows of the table of remedies that store numbers in fewer bits: KV, and quantized variants of the model.

Each yields candidates; what fits is found by the search in remedies.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from holdfast.engine_profiles.profile import profile
from holdfast.footprint.cpu import KV_ELEMENT_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.hardware.gpus import Gpu
from holdfast.planner.advice.remedy import (
    Change,
    Remedy,
    also,
    attempts,
    model_setting,
    other_splits,
    planned,
    with_settings,
)
from holdfast.planner.compat.gpu_kernels import lacks_engine, lacks_method
from holdfast.planner.fit.count import least_bytes
from holdfast.planner.fit.search import Plan, Question
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.model_sources import MADE_WHILE_LOADING
from holdfast.planner.models.variants import (
    GGUF_TYPES,
    HOLDFAST_GGUF_TYPES,
    TWO_BIT_GGUF_TYPES,
    Variant,
    base_of,
    derived_variants,
    is_plain,
    lower_variants,
    published_as,
    published_variants,
)
from holdfast.units import counted, format_bytes

MADE_FIRST = "the file has to be converted or found first"
SLOW_ON_A_CPU = "on a CPU a GGUF of as many bits is faster: compiled kernels multiply from its blocks"
FEWER_BITS = "weights in fewer bits: some quality"
EIGHT_BITS_MADE = "weights in 8 bits: a little quality; loading takes longer"
FOUR_BITS_MADE = (
    "weights in 4 bits, without calibration: some quality, more than with AWQ or GPTQ; loading takes longer"
)
SMALLER_KV = "KV in fewer bits: a little precision"
COARSE = "; two bits noticeably reduce quality: compare its output with a smaller model's"


def smaller_kv(found: Plan) -> str | None:
    """What KV could be stored in instead; None: it is that already, or nothing reads it on these GPUs. Holdfast decodes
    it on every GPU that it runs on, vLLM and SGLang on older ones than have units for it."""
    engine = found.question.engine
    on_gpu, gpus = found.question.machine.kind == "gpu", [rank.device.gpu for rank in found.ranks]
    decoded = engine in (None, "holdfast") and lacks_engine("holdfast", gpus) is None
    least = profile(engine or "vllm").data.get("gpus", {}).get("fp8-kv")
    able = on_gpu and all(gpu is not None and (gpu.fp8 or decoded or _reads(gpu, least)) for gpu in gpus)
    smaller = "fp8" if able else "float16" if not on_gpu and found.kv_dtype == "float32" else None
    return None if smaller == found.kv_dtype else smaller


def _reads(gpu: Gpu, least: Sequence[int] | None) -> bool:
    return least is not None and gpu.compute_capability is not None and gpu.compute_capability >= tuple(least)


def kv_dtype(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    smaller = smaller_kv(found)
    if smaller is not None:
        size, now = counted(KV_ELEMENT_BYTES[smaller], "byte"), KV_ELEMENT_BYTES[found.kv_dtype]
        text = f"KV in {smaller}: {size} per element instead of {now}"
        yield [Change(found.question, {"kv_cache_dtype": smaller}, text)]


def variants(found: Plan) -> list[Variant]:
    """Checkpoints that are published, most bits first; then what an engine makes of this one while it loads it; then
    files that have to be made. Only what engines have kernels for on these GPUs."""
    return _variants(Same(found.question))


@lru_cache(maxsize=4)
def _variants(key: Same[Question]) -> list[Variant]:
    question = key.held
    model, gpus = question.model, [device.gpu for device in question.machine.devices]
    if not is_plain(model):
        return _of_base(question)
    if question.engine == "llama.cpp":
        return list(derived_variants(model, GGUF_TYPES))
    if question.machine.kind == "cpu":
        ready = [one for one in published_variants(model) if one.model.spec.runnable]
        files: tuple[str, ...] = HOLDFAST_GGUF_TYPES if model.spec.runnable else GGUF_TYPES
    elif lacks_engine("vllm", gpus) is None:
        ready = [one for one in published_variants(model) if lacks_method(one.model, gpus) is None]
        if question.engine == "holdfast":
            ready = [one for one in ready if one.model.spec.runnable]
        files = ("Q4_K_M",)
    else:
        return list(derived_variants(model, GGUF_TYPES))
    made = [one for one in derived_variants(model, _made_methods(question, ready)) if _can_be_made(one, gpus)]
    return [*ready, *made, *derived_variants(model, files)]


def _of_base(question: Question) -> list[Variant]:
    """Of a quantized checkpoint: what its unquantized model is published in, or made into, with fewer bits than it has.
    Files that have to be made are told elsewhere."""
    base = base_of(question.model)
    if base is None or question.engine == "llama.cpp":
        return []
    stored = _stored_bits(question.model)
    found = _variants(Same(replace(question, model=base)))
    return [
        replace(one, made_of=None if question.model.made_as is None else base.name)
        if one.published
        else replace(one, label=f"{one.label}, of {base.name}", made_of=base.name)
        for one in found
        if _is_ready(one) and bits(one) < stored
    ]


def _stored_bits(model: PlannedModel) -> int:
    """Of a quantized model; of a GGUF, whose types are mixed, the whole bits of a weight: 4 of Q4_K_M, 8 of Q8_0."""
    if model.spec.quantization is not None:
        return model.spec.quantization.bits
    stored = (model.stored or {}).values()
    return sum(tensor.nbytes for tensor in stored) * 8 // max(1, sum(math.prod(tensor.shape) for tensor in stored))


def _made_methods(question: Question, ready: Sequence[Variant]) -> tuple[str, ...]:
    """What the engine that would run this makes of an unquantized checkpoint: Holdfast wherever it can, unless another
    was asked for. vLLM's only where nothing of so many bits is published."""
    devices = question.machine.devices
    able = lacks_engine("holdfast", [device.gpu for device in devices]) is None and question.model.spec.runnable
    if question.engine == "holdfast" or (question.engine is None and able and len(devices) == 1):
        return tuple(MADE_WHILE_LOADING["holdfast"]) if able else ()
    if question.machine.kind == "cpu":
        return ()
    known = {bits(variant) for variant in ready}
    makers = MADE_WHILE_LOADING[question.engine or "vllm"]
    return tuple(method for method, size in (("fp8", 8), ("nf4", 4)) if size not in known and method in makers)


def _can_be_made(variant: Variant, gpus: Sequence[Gpu | None]) -> bool:
    """What is published so needs not be made."""
    return lacks_method(variant.model, gpus) is None and published_as(variant.model) is None


def bits(variant: Variant) -> int:
    quantization = variant.model.spec.quantization
    return 0 if quantization is None else quantization.bits


def published(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """With all that was requested; over other GPUs of those that are there, and with KV in fewer bits, where it takes
    them."""
    yield from (_whole(found, variant, _kv_beside(found)) for variant in variants(found) if variant.published)


def made_eight_bits(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    yield from _made(found, 8)


def made_four_bits(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    yield from _made(found, 4)


def _made(found: Plan, size: int) -> Iterator[Iterable[Change]]:
    """While the model is loaded: it needs no other file."""
    for variant in variants(found):
        if is_made(variant) and bits(variant) == size:
            yield _whole(found, variant, _kv_beside(found))


def quality_price(variant: Variant) -> str:
    """What its fewer bits cost, for people."""
    if not is_made(variant):
        return FEWER_BITS
    return EIGHT_BITS_MADE if bits(variant) == 8 else FOUR_BITS_MADE


def is_made(variant: Variant) -> bool:
    """While it is loaded."""
    return any(variant.model.made_as in methods for methods in MADE_WHILE_LOADING.values())


def cut_ready(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """A shorter context, where none of those that need no other file holds the one that was requested."""
    if not _quantized(offered):
        yield from (_cut(found, variant) for variant in variants(found) if _is_ready(variant))


def cut_with_kv(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """Where a published checkpoint holds only a shorter context: a longer one, with KV in fewer bits too."""
    smaller, alone = _kv_beside(found), _quantized(offered)
    if smaller is None or not alone or any(way.meets_request for way in offered):
        return
    least = max(way.fit.limits.max_model_len for way in alone) + 1
    for variant in [one for one in variants(found) if one.published][-1:]:
        question = with_settings(replace(found.question, model=variant.model), kv_cache_dtype=smaller)
        changes = ({"kv_cache_dtype": smaller, **more} for more in _cut_settings(question))
        yield (_change(found, variant, question, more, longest=True, least_tokens=least) for more in changes)


def files_to_be_made(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """On a GPU only where nothing of what is there holds all that was requested; with llama.cpp a GGUF is made or found
    in any case."""
    question = found.question
    needless = question.machine.kind == "gpu" and question.engine != "llama.cpp"
    for variant in variants(found):
        enough = needless and any(way.meets_request for way in _quantized(offered))
        if not _is_ready(variant) and not enough:
            yield _whole(found, variant, _kv_beside(found))


def cut_files(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """A shorter context only where no variant is of use otherwise; fewer bits than four only where nothing before
    serves all that was requested."""
    question, before = found.question, len(offered)
    if _quantized(offered):
        return
    enough = any(way.meets_request for way in offered)
    yield from (_cut(found, variant) for variant in variants(found) if not _is_ready(variant))
    on_our_cpu = question.machine.kind == "cpu" and question.engine != "llama.cpp" and question.model.spec.runnable
    if enough or on_our_cpu or question.engine == "holdfast":  # Holdfast computes with none of them.
        return
    least = least_bytes(question)
    lower = [one for one in lower_variants(question.model) if least_bytes(replace(question, model=one.model)) < least]
    cut = len(offered) == before
    yield chain.from_iterable(_whole(found, variant) for variant in lower)
    if cut and len(offered) == before:
        yield chain.from_iterable(_cut(found, variant) for variant in lower)


def _quantized(offered: Sequence[Remedy]) -> list[Remedy]:
    return [way for way in offered if way.kind == "quantization"]


def _is_ready(variant: Variant) -> bool:
    return variant.published or is_made(variant)


def _kv_beside(found: Plan) -> str | None:
    """What KV may be stored in as well, where that alone is not enough."""
    return _kv_beside_once(Same(found))


@lru_cache(maxsize=4)
def _kv_beside_once(key: Same[Plan]) -> str | None:
    found = key.held
    smaller = smaller_kv(found) if found.question.machine.kind == "gpu" else None
    if smaller is not None and planned(with_settings(found.question, kv_cache_dtype=smaller)) is not None:
        return None
    return smaller


def _whole(found: Plan, variant: Variant, smaller: str | None = None) -> Iterator[Change]:
    for kv in ({}, {"kv_cache_dtype": smaller}) if smaller is not None else ({},):
        question = with_settings(replace(found.question, model=variant.model), **kv)
        yield from (_change(found, variant, question, {**kv, **more}) for more in attempts(question))
        for split_question, split in other_splits(question):
            for more in attempts(split_question):
                yield _change(found, variant, split_question, {**kv, **split, **more})


def _cut(found: Plan, variant: Variant) -> Iterator[Change]:
    question = replace(found.question, model=variant.model)
    yield from (_change(found, variant, question, more, longest=True) for more in _cut_settings(question))


def _cut_settings(question: Question) -> Iterator[dict[str, object]]:
    yield from ({"max_model_len": None, **more} for more in attempts(question))


def _change(
    found: Plan,
    variant: Variant,
    question: Question,
    changes: dict[str, object],
    *,
    longest: bool = False,
    least_tokens: int = 0,
) -> Change:
    made_as = variant.model.made_as
    to_be_made = made_as is not None and not is_made(variant)
    coarse = COARSE if made_as in TWO_BIT_GGUF_TYPES else ""
    slow = None if question.machine.kind == "gpu" or variant.method in GGUF_TYPES else SLOW_ON_A_CPU
    return Change(
        question,
        {**model_setting(variant), **changes},
        f"{variant.label}: {{weights}} of weights instead of {format_bytes(found.weights_bytes)}{also(changes)}",
        longest=longest,
        least_tokens=least_tokens,
        # With llama.cpp a GGUF is made or found in any case.
        available=not to_be_made or found.question.engine == "llama.cpp",
        note=f"{MADE_FIRST}{coarse}" if to_be_made else slow,
    )
