"""One way out of a plan that does not fit, and what all of them are made with: a changed question, planned again.

Knows no order and no reasons; those are in remedies.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.errors import ConfigurationError
from holdfast.planner.advice.offload import Tiers
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.count import cannot_hold_weights
from holdfast.planner.fit.search import Fit, Question, fit
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS
from holdfast.planner.models.variants import Variant
from holdfast.units import GIB, MIB, counted

Kind = Literal[
    "utilization",
    "context",
    "sequences",
    "configuration",
    "idle_gpus",
    "kv_cache_dtype",
    "quantization",
    "more_gpus",
    "tiers",
    "bigger_gpu",
    "more_ram",
    "smaller_model",
    "shorter_requests",
    "longer_model",
]
LEAST_CONTEXT = CPU_USEFUL_TOKENS
"""A shorter one is no way out."""
USUAL_UTILIZATION, MOST_UTILIZATION = 0.90, 0.95
"""Never past the second: the rest is for what cannot be counted."""
MODEST_SEQUENCES, MODEST_STEP_TOKENS = 16, 2048
"""Enough for a small service, and little beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    kind: Kind
    change: str
    """For people."""
    settings: Mapping[str, object]
    """What is set differently, by the names of the settings; as `flags` behind the plan's own command line they give
    `fit`. Of tiers, what they would need."""
    fit: Fit
    """Planned with the change; of tiers, planned without them."""
    tiers: Tiers | None = None
    meets_request: bool = True
    """False: fewer sequences at once than the traffic has, or a shorter context than was asked for."""
    available: bool = True
    """False: no engine here can do it yet, or something has to be made first."""
    note: str | None = None

    @property
    def fits(self) -> bool:
        return self.fit.fits or self.tiers is not None

    @property
    def flags(self) -> str:
        """The change as flags of `holdfast plan`, whose names `holdfast serve` and vLLM share where they have them.
        None for tiers: nothing that a plan can be told makes it fit."""
        if self.tiers is not None:
            return ""
        words = []
        for name, value in self.settings.items():
            if name == "ram_bytes":
                assert isinstance(value, int)
                words += ["--ram", f"{-(-value // MIB)}MiB" if value % GIB else f"{value // GIB}GiB"]
            elif name != "gpus":  # `gpu` says the same with the kind
                words += ["--" + name.replace("_", "-"), shlex.quote(str(value))]
        return " ".join(words)

    def commands(self, vllm: Vllm | None = None) -> dict[str, Command]:
        return commands(self.fit, sequences=self.fit.limits.max_num_seqs, vllm=vllm)


def meets(asked: Question, found: Fit) -> bool:
    """Whether what was planned serves all that was asked for."""
    length, traffic, served = asked.settings.max_model_len, asked.traffic, found.question.traffic
    if length is not None and found.limits.max_model_len < length:
        return False
    if traffic is None or served is None:
        return True
    return served.concurrency >= traffic.concurrency and served.length >= traffic.length


def too_long(question: Question) -> bool:
    """Requests longer than the model can read: no memory helps."""
    return question.traffic is not None and question.traffic.length > question.model.spec.max_position


def planned(question: Question) -> Fit | None:
    """None: it cannot be planned so, or does not fit."""
    if too_long(question) or cannot_hold_weights(question):
        return None
    try:
        found = fit(question)
    except ConfigurationError:
        return None
    return found if found.fits else None


def with_settings(question: Question, **changes: object) -> Question:
    return replace(question, settings=replace(question.settings, **changes))  # type: ignore[arg-type]


def longest(question: Question) -> Fit | None:
    """The same with the longest context that fits; traffic that is stated cannot be shortened."""
    if question.traffic is not None or cannot_hold_weights(question):
        return None
    length = question.model.spec.max_position
    try:
        # A shorter context needs smaller tables, which leaves room for a few more tokens: twice is enough.
        for _ in range(2):
            length = fit(with_settings(question, max_model_len=length)).longest_tokens
            if length < LEAST_CONTEXT:
                return None
        return planned(with_settings(question, max_model_len=length))
    except ConfigurationError:
        return None


def attempts(question: Question) -> Iterator[tuple[Question, dict[str, object]]]:
    """As asked; with the usual share of memory where less was asked; with modest limits where none were. Each with
    what it sets differently."""
    settings = question.settings
    changes: dict[str, object] = {}
    yield question, changes
    absolute = any(device.budget_bytes is not None for device in question.machine.devices)
    if not absolute and settings.utilization is not None and settings.utilization < USUAL_UTILIZATION:
        changes = {"gpu_memory_utilization": USUAL_UTILIZATION}
        question = with_settings(question, utilization=USUAL_UTILIZATION)
        yield question, changes
    if question.traffic is None and settings.max_num_seqs is None and settings.max_num_batched_tokens is None:
        modest: dict[str, object] = {"max_num_seqs": MODEST_SEQUENCES, "max_num_batched_tokens": MODEST_STEP_TOKENS}
        if question.machine.kind == "gpu":
            yield with_settings(question, **modest), {**changes, **modest}
        if question.machine.kind == "gpu" and not absolute:
            most = {**modest, "gpu_memory_utilization": MOST_UTILIZATION}
            yield with_settings(question, utilization=MOST_UTILIZATION, **modest), most


def first_that_fits(question: Question) -> tuple[Fit, dict[str, object]] | None:
    for changed, changes in attempts(question):
        found = planned(changed)
        if found is not None:
            return found, changes
    return None


STAGES = (2, 3, 4, 6, 8)


def other_splits(question: Question) -> Iterator[tuple[Question, dict[str, object]]]:
    """The same over the GPUs that are there, split in another way: by heads as the plan would choose where that was
    set, then with layers in stages, the fewest first. Each with what it sets."""
    settings, devices = question.settings, len(question.machine.devices)
    if devices == 1 or cannot_hold_weights(question):
        return
    for stages in (1, *STAGES):
        if stages == settings.pipeline_parallel and settings.tensor_parallel is None:
            continue
        if stages > min(devices, len(question.model.spec.layers)):
            continue
        changed = with_settings(question, tensor_parallel=None, pipeline_parallel=stages)
        try:
            size = fit(changed).tensor_parallel
        except ConfigurationError:
            continue
        parallel: dict[str, object] = {"tensor_parallel_size": size}
        if stages != settings.pipeline_parallel:
            parallel["pipeline_parallel_size"] = stages
        yield with_settings(changed, tensor_parallel=size), parallel


def said(changes: Mapping[str, object]) -> str:
    """Of the changes that a way needs beside its own."""
    words = []
    if "kv_cache_dtype" in changes:
        words.append(f"KV in {changes['kv_cache_dtype']}")
    if "gpu_memory_utilization" in changes:
        words.append(f"{changes['gpu_memory_utilization']:g} memory utilization")
    if "max_model_len" in changes:
        words.append(_counted(changes["max_model_len"], "token"))
    if "max_num_seqs" in changes:
        words.append(_counted(changes["max_num_seqs"], "sequence"))
    if "tensor_parallel_size" in changes:
        words.append(split_said(changes))
    return f", with {' and '.join(words)}" if words else ""


def _counted(value: object, noun: str) -> str:
    assert isinstance(value, int)
    return counted(value, noun)


def split_said(changes: Mapping[str, object]) -> str:
    """Of what `other_splits` sets."""
    stages, size = changes.get("pipeline_parallel_size", 1), changes["tensor_parallel_size"]
    if stages == 1:
        return f"each layer over {size} GPUs" if size != 1 else "one GPU"
    return f"its layers in {stages} stages" + (f" of {size} GPUs" if size != 1 else ", one per GPU")


def model_setting(variant: Variant | None) -> dict[str, object]:
    if variant is None:
        return {}
    if variant.published:
        return {"model": variant.model.name}
    made_of: dict[str, object] = {} if variant.made_of is None else {"model": variant.made_of}
    return {**made_of, "quantization": variant.method}
