"""An allocation on the GPU failed: what that means, by the phase and the numbers. The phase decides, the hint misleads.

Names the entry of rules/out_of_memory.toml that holds; the words and the fix are there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from holdfast.doctor.evidence.log_state import SECOND, Event, LogState

_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([KMG]i?B) memory in use")
_OURS = re.compile(r"this process has ([\d.]+) ([KMG]i?B) memory in use")
_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0}
DIED_SERVING = "died_serving"
"""The tag of a run whose last words only a server that had begun to serve says."""
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

Sureness = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class OomVerdict:
    rule: str
    phase: str | None
    confidence: Sureness


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


def judge(event: Event, scene: LogState) -> OomVerdict:
    numbers = {**scene.numbers, **event.numbers}
    text = next((one.line for one in event.evidence if "Tried to allocate" in one.line), event.evidence[0].line)
    phase, confidence = phase_of(event)
    if _CAPTURE in text:
        phase, confidence = "capture", "high"
    if scene.engine == "tgi" and any(_TGI_WARMUP.search(one.line) for one in event.evidence):
        phase, confidence = "warmup", "high"
    if phase is None and DIED_SERVING in scene.run.tags:
        phase, confidence = "serve", "medium"
    if phase is None and scene.run.phase == "load" and not scene.run.ready:
        phase, confidence = "load", "medium"  # The bar of the shards comes late, from another stream.
    whole = "total_gib" in event.numbers and not event.numbers.keys().isdisjoint(("reserved_gib", "reserved_all_gib"))
    if not whole and confidence == "high":
        confidence = "medium"  # The line was cut short, or tells little.
    torn, placed = (False, False) if event.trace is None else (event.trace.torn, event.trace.phase is not None)
    if torn or (not placed and len(scene.engines.keys() - {"llama.cpp"}) > 1):
        confidence = "medium" if confidence == "high" else confidence  # Or another engine's lines told the phase.
    total, tried = numbers.get("total_gib"), numbers.get("tried_gib", 0.0)
    if total is not None and tried > 2 * total:
        return OomVerdict("oom_quadratic", phase, "high")
    others = others_gib(text, event.numbers)
    if total is not None and others >= max(1.0, NEIGHBOUR_SHARE * total):
        event.numbers["others_gib"] = others
        return OomVerdict(
            "oom_neighbour", phase, "high" if _OURS.search(text) or len(_PROCESS.findall(text)) > 1 else "medium"
        )
    tags = event.trace.tags if event.trace is not None else set()
    for tag, rule in _BY_TAG:
        if tag in tags and (tag != "multimodal" or phase in ("profile", "load", None)):
            return OomVerdict(rule, phase, "high" if phase is not None and confidence == "high" else "medium")
    if phase == "serve" and _speculates(scene):
        return OomVerdict("oom_speculative", phase, "medium")
    if "multimodal" in event.tags and phase == "profile":
        return OomVerdict("oom_multimodal", phase, "medium")
    return _by_phase(event, scene, numbers, phase, confidence)


_BY_TAG = (
    ("prompt_logprobs", "oom_prompt_logprobs"),
    ("speculative", "oom_speculative"),
    ("sampler_warmup", "oom_sampler"),
    ("lora", "oom_lora"),
    ("multimodal", "oom_multimodal"),
)


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


def _by_phase(
    event: Event, scene: LogState, numbers: dict[str, float], phase: str | None, confidence: Sureness
) -> OomVerdict:
    total, tried = numbers.get("total_gib"), numbers.get("tried_gib", 0.0)
    reserved = numbers.get("reserved_gib", 0.0)
    if SECOND in event.tags and phase in ("args", "download", "load", "profile"):
        return OomVerdict("oom_second_engine", phase, "medium")
    if phase in ("profile", "capture", "warmup") and _in_pieces(total, tried, reserved):
        return OomVerdict("oom_fragmentation", phase, "medium")
    if phase in ("args", "download", "load"):
        if _unused_gpus(scene):
            return OomVerdict("oom_parallel_unused", "load", "medium")
        return OomVerdict("oom_weights", "load", confidence)
    if phase == "profile":
        return OomVerdict(*_in_profile(numbers, total, tried), confidence="high" if confidence == "high" else "medium")
    if phase == "capture":
        return OomVerdict("oom_capture", phase, confidence)
    if phase == "warmup" and scene.engine == "tgi":
        return OomVerdict("oom_tgi_warmup", phase, confidence)
    if phase == "warmup":
        return OomVerdict("oom_warmup", phase, "medium" if confidence == "high" else confidence)  # Or a capture in it.
    if total is not None and reserved >= max(tried, FRAGMENTED_SHARE * total):
        return OomVerdict("oom_fragmentation", phase, "medium")
    if phase in ("serve", "request"):
        return OomVerdict("oom_serving", phase, confidence)
    return OomVerdict("oom_unknown_phase", None, "low")


def _in_pieces(total: float | None, tried: float, reserved: float) -> bool:
    return total is not None and tried > 0 and reserved >= max(2 * tried, FRAGMENTED_AT_START * total)


def _in_profile(numbers: dict[str, float], total: float | None, tried: float) -> tuple[str, str]:
    weights, allocated = numbers.get("weights_gib"), numbers.get("allocated_gib")
    if total is None:
        return "oom_profile", "profile"
    if weights is not None:
        return ("oom_weights_profile" if weights >= WEIGHTS_SHARE * total else "oom_profile"), "profile"
    crowded = allocated is not None and allocated >= FULL_SHARE * total and tried <= SMALL_SHARE * total
    return ("oom_weights_profile" if crowded else "oom_profile"), "profile"


def _speculates(scene: LogState) -> bool:
    values = scene.settings.values
    return any(
        values.get(name, "None") != "None" for name in ("speculative-model", "speculative-config", "model-draft")
    )


def _unused_gpus(scene: LogState) -> bool:
    size = scene.settings.number("tensor-parallel-size") or 1
    return scene.numbers.get("gpus", 1) > 1 and size == 1 and scene.engine in ("vllm", "sglang", "tgi", "holdfast")
