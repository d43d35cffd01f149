"""Rows of the table of remedies that store numbers in fewer bits: KV, and quantized variants of the model.

Each yields candidates; what fits is found by the search in remedies.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from holdfast.footprint.cpu import KV_ELEMENT_BYTES
from holdfast.footprint.identity_key import Same
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

MADE_FIRST = "the file has to be converted or found first"
COARSE = "; two bits noticeably reduce quality: compare its output with a smaller model's"


def smaller_kv(found: Plan) -> str | None:
    """What KV could be stored in instead; None: it is that already, or the GPU has no such units."""
    on_gpu = found.question.machine.kind == "gpu"
    able = on_gpu and all(rank.device.gpu is not None and rank.device.gpu.fp8 for rank in found.ranks)
    smaller = "fp8" if able else "float16" if not on_gpu and found.kv_dtype == "float32" else None
    return None if smaller == found.kv_dtype else smaller


def kv_dtype(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    smaller = smaller_kv(found)
    if smaller is not None:
        size, now = counted(KV_ELEMENT_BYTES[smaller], "byte"), KV_ELEMENT_BYTES[found.kv_dtype]
        text = f"KV in {smaller}: {size} per element instead of {now}"
        yield [Change(found.question, {"kv_cache_dtype": smaller}, text)]


def variants(found: Plan) -> list[Variant]:
    """Published ones first, most bits first; only what engines have kernels for on these GPUs."""
    return _variants(Same(found.question))


@lru_cache(maxsize=4)
def _variants(key: Same[Question]) -> list[Variant]:
    question = key.held
    model, gpus = question.model, [device.gpu for device in question.machine.devices]
    if not is_plain(model):
        return []
    if question.engine == "llama.cpp":
        return list(derived_variants(model, GGUF_TYPES))
    if question.machine.kind == "cpu":
        return list(derived_variants(model, HOLDFAST_GGUF_TYPES if model.spec.runnable else GGUF_TYPES))
    every: list[Variant] = []
    if lacks_engine("vllm", gpus) is None:
        published = [one for one in published_variants(model) if lacks_method(one.model, gpus) is None]
        known = {_bits(variant) for variant in published}
        made = tuple(method for method, bits in (("fp8", 8), ("nf4", 4)) if bits not in known)
        every = [*published, *(one for one in derived_variants(model, made) if lacks_method(one.model, gpus) is None)]
    every.sort(key=lambda variant: -_bits(variant))
    return [*every, *derived_variants(model, GGUF_TYPES if not every else ("Q4_K_M",))]


def _bits(variant: Variant) -> int:
    quantization = variant.model.spec.quantization
    return 0 if quantization is None else quantization.bits


def whole_variants(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """With all that was requested; over other GPUs of those that are there, and with KV in fewer bits, where it takes
    them. A GGUF that has yet to be made only where nothing else fits on a GPU."""
    question, before = found.question, len(offered)
    to_be_made = question.machine.kind == "gpu" and question.engine != "llama.cpp"
    smaller = smaller_kv(found) if question.machine.kind == "gpu" else None
    if smaller is not None and planned(with_settings(question, kv_cache_dtype=smaller)) is not None:
        smaller = None  # That alone is enough.
    for variant in sorted(variants(found), key=lambda one: not one.published):
        if not (variant.method in GGUF_TYPES and to_be_made and len(offered) > before):
            yield _whole(found, variant, smaller)


def _whole(found: Plan, variant: Variant, smaller: str | None = None) -> Iterator[Change]:
    for kv in ({}, {"kv_cache_dtype": smaller}) if smaller is not None else ({},):
        question = with_settings(replace(found.question, model=variant.model), **kv)
        yield from (_change(found, variant, question, {**kv, **more}) for more in attempts(question))
        for split_question, split in other_splits(question):
            for more in attempts(split_question):
                yield _change(found, variant, split_question, {**kv, **split, **more})


def cut_variants(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """A shorter context only where no variant holds the one that was requested; fewer bits than four only where nothing
    before serves all that was requested."""
    question, before = found.question, len(offered)
    if any(way.kind == "quantization" for way in offered):
        return
    enough = any(way.meets_request for way in offered)
    for variant in sorted(variants(found), key=lambda one: not one.published):
        yield _cut(found, variant)
    on_our_cpu = question.machine.kind == "cpu" and question.engine != "llama.cpp" and question.model.spec.runnable
    if enough or on_our_cpu:  # Holdfast computes with none of them.
        return
    least = least_bytes(question)
    lower = [one for one in lower_variants(question.model) if least_bytes(replace(question, model=one.model)) < least]
    cut = len(offered) == before
    yield chain.from_iterable(_whole(found, variant) for variant in lower)
    if cut and len(offered) == before:
        yield chain.from_iterable(_cut(found, variant) for variant in lower)


def _cut(found: Plan, variant: Variant) -> Iterator[Change]:
    question = replace(found.question, model=variant.model)
    for more in attempts(question):
        yield _change(found, variant, question, {"max_model_len": None, **more}, longest=True)


def _change(
    found: Plan, variant: Variant, question: Question, changes: dict[str, object], *, longest: bool = False
) -> Change:
    made_as = variant.model.made_as
    to_be_made = made_as is not None and made_as not in MADE_WHILE_LOADING["vllm"]
    coarse = COARSE if made_as in TWO_BIT_GGUF_TYPES else ""
    return Change(
        question,
        {**model_setting(variant), **changes},
        f"{variant.label}: {{weights}} of weights instead of {format_bytes(found.weights_bytes)}{also(changes)}",
        longest=longest,
        # With llama.cpp a GGUF is made or found in any case.
        available=not to_be_made or found.question.engine == "llama.cpp",
        note=f"{MADE_FIRST}{coarse}" if to_be_made else None,
    )
