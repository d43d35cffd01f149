"""`Change`, a candidate change of a question; planned, and turned into a `Remedy` if it fits.

Knows no order and no reasons; those are in remedies.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.config.parts.offload import MOST_LAYERS
from holdfast.errors import ConfigurationError
from holdfast.planner.advice.offload import Tiers
from holdfast.planner.advice.search import first_that_fits
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.count import cannot_hold_weights
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS, MOST_UTILIZATION, Settings
from holdfast.planner.models.variants import Variant
from holdfast.planner.serve.shares.nodes import held_by_each
from holdfast.units import GIB, MIB, counted, format_bytes

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
"""A shorter one is not a remedy."""
USUAL_UTILIZATION = 0.90
MODEST = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
"""Enough for a small service, and little compared with the weights."""
_FIELDS = {
    "gpu_memory_utilization": "utilization",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
}
"""Of `Settings`, where it is not the flag's name."""


@dataclass(frozen=True, slots=True)
class Change:
    """One candidate. Mutates nothing; planned only when the search reaches it."""

    question: Question
    """As asked, or with another model, machine or traffic; `settings` are applied to it."""
    settings: Mapping[str, object]
    """What is set differently, by the names of flags. None: the context that the plan finds."""
    text: str
    """For people; {context} and {weights} are filled in from the plan."""
    longest: bool = False
    """With the longest context that fits."""
    least_tokens: float = 0
    """Of the context: with less it is not worth the change."""
    available: bool = True
    note: str | None = None
    tiers: Tiers | None = None
    fit: Plan | None = None
    """Planned already."""
    price: str | None = None
    """What it costs beside what all of its kind do, for people; None: nothing."""

    def plan(self) -> Plan | None:
        """None: it does not fit."""
        if self.fit is not None:
            return self.fit
        found = (longest if self.longest else planned)(changed(self.question, self.settings))
        return found if found is not None and found.limits.max_model_len >= self.least_tokens else None

    def remedy(self, kind: Kind, price: str | None, asked: Question, found: Plan) -> Remedy:
        tokens = found.limits.max_model_len
        filled = {"{context}": counted(tokens, "token"), "{weights}": format_bytes(found.weights_bytes)}
        text = self.text
        for name, value in filled.items():
            text = text.replace(name, value)
        return Remedy(
            kind=kind,
            change=text,
            settings={name: tokens if value is None else value for name, value in self.settings.items()},
            fit=found,
            tiers=self.tiers,
            meets_request=meets(asked, found),
            available=self.available,
            note=self.note,
            price="; ".join(one for one in (price, self.price) if one) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    kind: Kind
    change: str
    """For people."""
    settings: Mapping[str, object]
    """What is set differently, by the names of the settings; as `flags` behind the plan's own command line they give
    `fit`. Of tiers, what they would need."""
    fit: Plan
    """Planned with the change; of tiers that nobody runs, planned without them."""
    tiers: Tiers | None = None
    meets_request: bool = True
    """False: fewer sequences at once than the traffic has, or a shorter context than was requested."""
    available: bool = True
    """False: no engine here can do it yet, or something has to be made first."""
    note: str | None = None
    price: str | None = None
    """What it costs, for people; None: nothing."""

    @property
    def fits(self) -> bool:
        return self.fit.fits or self.tiers is not None

    @property
    def flags(self) -> str:
        """The change as flags of `holdfast plan`, whose names `holdfast serve` and vLLM share where they have them.
        None for tiers that nobody runs: no setting of a plan makes it fit."""
        if self.tiers is not None and not self.available:
            return ""
        words = []
        for name, value in self.settings.items():
            if name == "ram_bytes":
                assert isinstance(value, int)
                words += ["--ram", f"{-(-value // MIB)}MiB" if value % GIB else f"{value // GIB}GiB"]
            elif isinstance(value, bool):
                words.append(("--" if value else "--no-") + name.replace("_", "-"))
            elif name != "gpus":  # `gpu` says the same with the kind
                words += ["--" + name.replace("_", "-"), shlex.quote(str(value))]
        return " ".join(words)

    def commands(self, vllm: Vllm | None = None) -> dict[str, Command]:
        return commands(self.fit, sequences=self.fit.limits.max_num_seqs, vllm=vllm)


def meets(asked: Question, found: Plan) -> bool:
    """Whether what was planned serves all that was requested."""
    length, traffic, served = asked.settings.max_model_len, asked.traffic, found.question.traffic
    if length is not None and found.limits.max_model_len < length:
        return False
    if traffic is None or served is None:
        return True
    return served.concurrency >= traffic.concurrency and served.length >= traffic.length


def too_long(question: Question) -> bool:
    """Requests longer than the model can read: no memory helps."""
    return question.traffic is not None and question.traffic.length > question.model.spec.max_position


def planned(question: Question) -> Plan | None:
    """None: it cannot be planned so, or does not fit; of several nodes, where one of them cannot hold its part."""
    if too_long(question) or cannot_hold_weights(question):
        return None
    try:
        found = held_by_each(fit(question))
    except ConfigurationError:
        return None
    return found if found.fits else None


def with_settings(question: Question, **changes: object) -> Question:
    return replace(question, settings=replace(question.settings, **changes))  # type: ignore[arg-type]


def changed(question: Question, settings: Mapping[str, object]) -> Question:
    """With settings by the names of flags; those of models and machines are in the question already."""
    named = {_FIELDS.get(name, name): value for name, value in settings.items() if value is not None}
    own = {name: value for name, value in named.items() if name in Settings.__dataclass_fields__}
    count = named.get("concurrency")
    if question.traffic is not None and isinstance(count, int):
        question = replace(question, traffic=replace(question.traffic, concurrency=count))
    return with_settings(question, **own)


def without_hand(question: Question) -> tuple[Question, dict[str, object]]:
    """The same where nothing was set by hand of layers and experts in RAM, nor that none shall be there, and the flags
    that undo what was: of patterns there is none. The same question: nothing was."""
    asked = question.settings.offload
    if not asked.refused and not asked.by_hand and not asked.experts_by_hand:
        return question, {}
    groups = {"offload_group_size": 0, "offload_num_in_group": 1, "offload_backend": "auto"}
    undone: dict[str, object] = {
        **({"offload": True} if asked.refused else {}),
        **({} if asked.gpu_layers is None else {"gpu_layers": "auto"}),
        **({"cpu_offload_gb": 0} if asked.cpu_bytes else {}),
        **({} if asked.groups is None else groups),
        **({"n_cpu_moe": 0} if 0 < asked.expert_layers < MOST_LAYERS else {}),
        **({"cpu_moe": False} if asked.expert_layers == MOST_LAYERS else {}),
    }
    left = replace(asked, refused=False, gpu_layers=None, cpu_bytes=0, groups=None, expert_layers=0, overrides=())
    settings = with_settings(
        question,
        offload=left,
        streamed_layers=0,
        layers_on_disk=None,
        embedding_on_disk=False,
        resident_experts=None,
        experts_wait=False,
        host_experts=False,
    )
    return settings, undone


def longest(question: Question) -> Plan | None:
    """The same with the longest context that fits; traffic that is stated cannot be shortened."""
    if question.traffic is not None or cannot_hold_weights(question):
        return None
    length = question.model.spec.max_position
    try:
        # A shorter context needs smaller tables, which leaves room for a few more tokens: twice is enough.
        for _ in range(2):
            length = held_by_each(fit(with_settings(question, max_model_len=length))).longest_tokens
            if length < LEAST_CONTEXT:
                return None
        return planned(with_settings(question, max_model_len=length))
    except ConfigurationError:
        return None


def is_absolute(question: Question) -> bool:
    """The budget is set in bytes, rather than as a share of the memory."""
    return any(device.budget_bytes is not None for device in question.machine.devices)


def attempts(question: Question) -> Iterator[dict[str, object]]:
    """What may be set with another change: nothing; the usual share of memory where less was requested; modest limits
    where none were."""
    settings = question.settings
    share: dict[str, object] = {}
    yield share
    absolute = is_absolute(question)
    if not absolute and settings.utilization is not None and settings.utilization < USUAL_UTILIZATION:
        share = {"gpu_memory_utilization": USUAL_UTILIZATION}
        yield share
    limits_open = settings.max_num_seqs is None and settings.max_num_batched_tokens is None
    if question.traffic is None and limits_open and question.machine.kind == "gpu":
        yield {**share, **MODEST}
        if not absolute:
            yield {**MODEST, "gpu_memory_utilization": MOST_UTILIZATION}


STAGES = (2, 3, 4, 6, 8)


def other_splits(question: Question) -> Iterator[tuple[Question, dict[str, int]]]:
    """The same over the GPUs that are there, split in another way: by heads as the plan would choose where that was
    set, then with layers in stages, the fewest first. Each with what it sets."""
    settings, devices = question.settings, len(question.machine.devices)
    if devices == 1 or cannot_hold_weights(question):
        return
    most = min(devices, len(question.model.spec.layers))
    for stages in (1, *STAGES):
        if stages > most or (stages == settings.pipeline_parallel and settings.tensor_parallel is None):
            continue
        split = with_settings(question, tensor_parallel=None, pipeline_parallel=stages)
        found = first_that_fits([split], fit)
        if found is None:
            continue
        parallel = {"tensor_parallel_size": found[1].tensor_parallel}
        if stages != settings.pipeline_parallel:
            parallel["pipeline_parallel_size"] = stages
        yield split, parallel


def also(changes: Mapping[str, object]) -> str:
    """Of the changes that a remedy needs in addition to its own."""
    words: dict[str, Callable[[Any], str]] = {
        "kv_cache_dtype": lambda value: f"KV in {value}",
        "gpu_memory_utilization": lambda value: f"{value:g} memory utilization",
        "max_model_len": lambda value: "{context}",
        "max_num_seqs": lambda value: counted(value, "sequence"),
        "tensor_parallel_size": lambda value: describe_split(changes),
    }
    said = [write(changes[name]) for name, write in words.items() if name in changes]
    return f", with {' and '.join(said)}" if said else ""


def describe_split(changes: Mapping[str, object]) -> str:
    """Of what `other_splits` sets."""
    stages, size = changes.get("pipeline_parallel_size", 1), changes["tensor_parallel_size"]
    if stages == 1:
        return f"each layer over {size} GPUs" if size != 1 else "one GPU"
    return f"its layers in {stages} stages" + (f" of {size} GPUs" if size != 1 else ", one per GPU")


def model_setting(variant: Variant | None) -> dict[str, object]:
    if variant is None:
        return {}
    if variant.published:
        # A --quantization that was planned with says what this one is stored in.
        replaced: dict[str, object] = {} if variant.made_of is None else {"quantization": variant.method}
        return {"model": variant.model.name, **replaced}
    made_of: dict[str, object] = {} if variant.made_of is None else {"model": variant.made_of}
    return {**made_of, "quantization": variant.method}
