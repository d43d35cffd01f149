"""Classifies a failed GPU allocation by phase and numbers; PyTorch's own hint in the message is ignored.

Returns the entry of rules/data/out_of_memory.toml that holds; texts and fixes are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.doctor.evidence.log_state import DIED_SERVING, SECOND, Event, LogState

_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([KMG]i?B) memory in use")
_OURS = re.compile(r"this process has ([\d.]+) ([KMG]i?B) memory in use")
_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0}
_CAPTURE = "Capture cuda graph failed"
_TGI_WARMUP = re.compile(r"\bwarmup\{|\bWarmup\(|Unable to warmup model|Method Warmup\b")
"""TGI's words around an error of its warm-up, whatever the log had told of its phase."""
NEIGHBOUR_SHARE = 0.12
"""Of the card, held by others, from which on they are the cause: a desktop alone takes a GiB of 24."""
FRAGMENTED_SHARE = 0.1
FRAGMENTED_AT_START = 0.15
"""Of the card, in pieces, before the server serves: less of it is what a trial step leaves behind."""
WEIGHTS_SHARE = 0.75
"""Of the card: with so much in weights, no batch is small enough to leave room for KV."""
FULL_SHARE = 0.93
SMALL_SHARE = 0.1
LONG_CONTEXT = 8192
HOLDER_GIB = 0.5
"""Held by another process, from which on it is named beside whatever the cause is."""

UNIFIED_GIB = (118.0, 124.0)
"""Of a card: no GPU with memory of its own has so much. GB10 (DGX Spark) reports 121.6 GiB, Jetson Thor 122.8."""

LLAMA = ("llama.cpp", "ollama")
"""They run no profile, and capture no graph before they serve: a failure there is of the buffers of a context."""
Sureness = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class OomVerdict:
    rule: str
    phase: str | None
    confidence: Sureness


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """The allocation that failed, and what is known around it. Sizes in GiB; `total`: of the card."""

    log: LogState
    event: Event
    text: str
    phase: str | None
    numbers: Mapping[str, float]
    others: float

    @property
    def total(self) -> float | None:
        return self.numbers.get("total_gib")

    def beyond(self, size: float, share: float, least: float = 0.0) -> bool:
        """Whether it is at least that share of a card whose size is known, and at least `least`."""
        return self.total is not None and size >= max(least, share * self.total)

    def number(self, name: str) -> float:
        return self.numbers.get(name, 0.0)

    def tagged(self, tag: str) -> bool:
        """By its own traceback."""
        return self.event.trace is not None and tag in self.event.trace.tags


def others_gib(text: str, numbers: dict[str, float]) -> float:
    """Held by processes that are not the one that failed, as far as the message tells."""
    ours = _OURS.search(text)
    total, free = numbers.get("total_gib"), numbers.get("free_gib")
    if ours is not None and total is not None and free is not None:
        return total - free - float(ours[1]) * _GIB[ours[2][0]]
    held = [float(amount) * _GIB[unit[0]] for _, amount, unit in _PROCESS.findall(text)]
    allocated = numbers.get("allocated_gib")
    if not held or allocated is None:
        return 0.0
    own = min((one for one in held if one >= allocated * 0.98), default=None)
    if own is not None:
        held.remove(own)
    return sum(held)


def holders(text: str, numbers: dict[str, float]) -> list[tuple[str, float]]:
    """Processes that are not the one that failed, and the GiB of each, where the message tells which is which."""
    held = [(name, float(amount) * _GIB[unit[0]]) for name, amount, unit in _PROCESS.findall(text)]
    if _OURS.search(text) is None:
        own = min((one for one in held if one[1] >= numbers.get("allocated_gib", math.inf) * 0.98), default=None)
        if own is None:
            return []
        held.remove(own)
    return [one for one in held if one[1] >= HOLDER_GIB]


def judge(event: Event, log: LogState) -> OomVerdict:
    """The first rule of the table that holds."""
    text = next((one.line for one in event.evidence if "Tried to allocate" in one.line), event.evidence[0].line)
    phase, confidence = phase_of(event)
    if _CAPTURE in text:
        phase, confidence = "capture", "high"
    if log.engine == "tgi" and any(_TGI_WARMUP.search(one.line) for one in event.evidence):
        phase, confidence = "warmup", "high"
    if phase is None and DIED_SERVING in log.run.tags:
        phase, confidence = "serve", "medium"
    if phase is None and log.run.phase == "load" and not log.run.ready:
        phase, confidence = "load", "medium"  # The bar of the shards comes late, from another stream.
    if log.engine == "sglang" and phase in ("profile", None) and not event.ready and "after_pool_gib" in log.numbers:
        phase, confidence = "capture", "medium"  # The KV pool stands: what is made after it lacks what the share left.
    whole = "total_gib" in event.numbers and not event.numbers.keys().isdisjoint(("reserved_gib", "reserved_all_gib"))
    torn, placed = (False, False) if event.trace is None else (event.trace.torn, event.trace.phase is not None)
    several = not placed and len(log.engines.keys() - {"llama.cpp"}) > 1
    if confidence == "high" and (not whole or torn or several):
        confidence = "medium"  # The line was cut short or says little, or another engine's lines gave the phase.
    others = others_gib(text, event.numbers)
    failure = FailedAllocation(
        log=log, event=event, text=text, phase=phase, numbers={**log.numbers, **event.numbers}, others=others
    )
    rule, _, _, sureness = next(row for row in RULES if (not row[1] or phase in row[1]) and row[2](failure))
    if others_named := holders(text, event.numbers):
        event.words["holder"] = max(others_named, key=lambda one: one[1])[0]
        event.numbers["holder_gib"] = max(gib for _, gib in others_named)
    if rule == "oom_neighbour":
        event.numbers["others_gib"] = others
    reported = "load" if rule in ("oom_weights", "oom_parallel_unused") else phase
    return OomVerdict(rule, reported, _SURENESS[sureness].get(confidence, confidence))


def phase_of(event: Event) -> tuple[str | None, Sureness]:
    """By its own traceback, else by the last phase that the log told."""
    if event.trace is not None and event.trace.phase is not None:
        return event.trace.phase, "high"
    if event.trace is not None and "making" in event.trace.tags and not event.ready:
        return "load", "medium"  # Tensors are made on a device by name while the model is built.
    if event.ready:
        return "serve", "high"
    if event.phase is not None:
        return event.phase, "medium"  # The last that was told; the lines that told the next may be gone.
    return None, "low"


def _held_by_others(failure: FailedAllocation) -> bool:
    return failure.beyond(failure.others, NEIGHBOUR_SHARE, least=1.0)


def _names_holders(failure: FailedAllocation) -> bool:
    """Its own share, or several processes: who holds the rest is certain."""
    return _OURS.search(failure.text) is not None or len(_PROCESS.findall(failure.text)) > 1


def _unified(failure: FailedAllocation) -> bool:
    return UNIFIED_GIB[0] <= (failure.total or 0.0) < UNIFIED_GIB[1] or "unified" in failure.log.run.tags


def _speculates(failure: FailedAllocation) -> bool:
    values = failure.log.settings.values
    flags = ("speculative-model", "speculative-config", "model-draft")
    return any(values.get(name, "None") != "None" for name in flags)


def _unused_gpus(failure: FailedAllocation) -> bool:
    log = failure.log
    size = log.settings.number("tensor-parallel-size") or 1
    return log.numbers.get("gpus", 1) > 1 and size == 1 and log.engine in ("vllm", "sglang", "tgi", "holdfast")


def _long_context(failure: FailedAllocation) -> bool:
    """Of one request, by what Ollama told of its runner: beyond the default of a large GPU."""
    return failure.number("kv_cells") / max(1.0, failure.number("kv_slots")) > LONG_CONTEXT


def _crowded_by_weights(failure: FailedAllocation) -> bool:
    """As far as their size is known; else by a full card on which a small allocation failed."""
    if "weights_gib" in failure.numbers:
        return failure.beyond(failure.number("weights_gib"), WEIGHTS_SHARE)
    small = failure.total is not None and failure.number("tried_gib") <= SMALL_SHARE * failure.total
    return small and "allocated_gib" in failure.numbers and failure.beyond(failure.number("allocated_gib"), FULL_SHARE)


def _in_pieces(failure: FailedAllocation) -> bool:
    """Before the server serves."""
    tried = failure.number("tried_gib")
    return tried > 0 and failure.beyond(failure.number("reserved_gib"), FRAGMENTED_AT_START, least=2 * tried)


_SURENESS: Mapping[str, Mapping[Sureness, Sureness]] = {
    "of the phase": {}, "at most medium": {"high": "medium"}, "at least medium": {"low": "medium"},
    "high": {"low": "high", "medium": "high"}, "medium": {"high": "medium", "low": "medium"},
    "low": {"high": "low", "medium": "low"},
}  # fmt: skip
_LOADING = ("args", "download", "load")
_LOADED = ("profile", "capture", "warmup", "serve", "request", None)
RULES: tuple[tuple[str, tuple[str | None, ...], Callable[[FailedAllocation], bool], str], ...] = (
    ("oom_quadratic", (), lambda one: one.total is not None and one.number("tried_gib") > 2 * one.total, "high"),
    # There the system, its file cache and other programs are what is not this process's.
    ("oom_unified", _LOADED, lambda one: _held_by_others(one) and _unified(one), "medium"),
    ("oom_neighbour", (), lambda one: _held_by_others(one) and _names_holders(one), "high"),
    ("oom_neighbour", (), _held_by_others, "medium"),
    ("oom_before_start", (*_LOADING, None), lambda one: one.tagged("first_touch"), "at least medium"),
    ("oom_prompt_logprobs", (), lambda one: one.tagged("prompt_logprobs"), "at least medium"),
    ("oom_speculative", (), lambda one: one.tagged("speculative"), "at least medium"),
    ("oom_sampler", (), lambda one: one.tagged("sampler_warmup"), "at least medium"),
    ("oom_lora", (), lambda one: one.tagged("lora"), "at least medium"),
    ("oom_multimodal", ("profile", "load", None), lambda one: one.tagged("multimodal"), "at least medium"),
    ("oom_kv_tensors", ("profile",), lambda one: one.tagged("kv_tensors"), "at least medium"),
    ("oom_speculative", ("serve",), _speculates, "medium"),
    ("oom_multimodal", ("profile",), lambda one: "multimodal" in one.event.tags, "medium"),
    ("oom_second_engine", (*_LOADING, "profile"), lambda one: SECOND in one.event.tags, "medium"),
    ("oom_fragmentation", ("profile", "capture", "warmup"), _in_pieces, "medium"),
    ("oom_parallel_unused", _LOADING, _unused_gpus, "medium"),
    ("oom_ollama_context", (), lambda one: one.log.engine == "ollama" and _long_context(one), "medium"),
    ("oom_weights", _LOADING, lambda one: True, "of the phase"),
    ("oom_unified", _LOADED, _unified, "medium"),
    ("oom_llama_buffers", ("profile", "capture", "warmup"), lambda one: one.log.engine in LLAMA, "medium"),
    ("oom_weights_profile", ("profile",), _crowded_by_weights, "at least medium"),
    ("oom_profile", ("profile",), lambda one: True, "at least medium"),
    ("oom_capture", ("capture",), lambda one: True, "of the phase"),
    ("oom_tgi_warmup", ("warmup",), lambda one: one.log.engine == "tgi", "of the phase"),
    ("oom_warmup", ("warmup",), lambda one: True, "at most medium"),  # Or a capture in it.
    (
        "oom_fragmentation",
        (),
        lambda one: one.beyond(one.number("reserved_gib"), FRAGMENTED_SHARE, least=one.number("tried_gib")),
        "medium",
    ),
    ("oom_serving", ("serve", "request"), lambda one: True, "of the phase"),
    ("oom_unknown_phase", (), lambda one: True, "low"),
)
"""A rule, the phases that it is for (none: all), when it holds, and how sure that is."""
