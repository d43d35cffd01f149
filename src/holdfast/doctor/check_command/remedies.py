"""A plan's ways out as changes of a command: in the engine's own words, what can be run first.

Plans nothing itself; what is no change of this command is said in words.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from holdfast.doctor.build_finding import changed
from holdfast.doctor.check_command.refusals import SHORTER
from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.findings import Fix
from holdfast.engine_profiles.profile import profile
from holdfast.units import MIB

if TYPE_CHECKING:
    from holdfast.planner.advice.remedy import Remedy
    from holdfast.planner.report.answer import PlanAnswer

SAME_NAMES = (
    "max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "tensor-parallel-size",
    "pipeline-parallel-size", "dtype", "kv-cache-dtype", "block-size", "revision", "max-loras", "max-lora-rank",
)  # fmt: skip
_PRICES = {
    "context": SHORTER, "sequences": "others wait in the queue",
    "utilization": "less is left for others on that GPU", "kv_cache_dtype": "KV in fewer bits: a little precision",
    "quantization": "weights in fewer bits: some quality", "configuration": "several limits are lower",
    "tiers": "slower: part of it is read over the link in every step", "smaller_model": "another model's answers",
    "more_gpus": "more hardware", "bigger_gpu": "other hardware", "more_ram": "more RAM is used", "idle_gpus": None,
}  # fmt: skip
WAYS_SHOWN = 4
_SETTABLE = frozenset(name.replace("-", "_") for name in SAME_NAMES)


def ways(command: ServerCommand, told: PlanAnswer) -> list[Fix]:
    """Those that can be run first, in the plan's order; of what has to be made or bought the first alone. A plan in
    tiers is none: nothing here runs it."""
    usable = [way for way in told.ways_out if way.tiers is None]
    if command.engine == "sglang":  # Its share is of another thing.
        usable = [way for way in usable if "gpu_memory_utilization" not in way.settings]
    if command.engine != "vllm":
        usable = [way for way in usable if "made by vLLM" not in way.change]
    fixes = [_way(command, way) for way in usable]
    ready = [fix for fix in fixes if fix.command is not None]
    # A checkpoint that is quantized already is refused with a method for another.
    quantized = command.value("quantization") is not None
    ready = [fix for fix in ready if not (quantized and "--model" in fix.changes)]
    return [*ready[:WAYS_SHOWN], *[fix for fix in fixes if fix.command is None][: 2 if ready else WAYS_SHOWN]]


def _way(command: ServerCommand, way: Remedy) -> Fix:
    """A way out as a change of this command; where it is none, in words."""
    changes: dict[str, str | None] = {}
    beyond, model = way.tiers is not None, None
    for name, value in way.settings.items():
        theirs = _spelled(command, name, value)
        if name == "model":
            model = str(value)
        elif (name in _SETTABLE or name == "ram_bytes") and theirs is not None:
            changes[theirs[0]] = theirs[1]
        else:
            beyond = True
    price = way.note or _PRICES.get(way.kind)
    if beyond or not way.available or not (changes or model):
        return Fix(changes={}, why=way.change, price=price)
    why = f"{way.change}; planned: it fits"
    if model is None:
        return changed(command, changes, why, price)
    words = [model if word == command.model else word for word in command.words]
    other = parse_command(shlex.join(words))
    text = None if other is None else other.with_changes(changes)
    return Fix(command=text, changes={"--model": model, **changes}, why=why, price=price)


def _spelled(command: ServerCommand, name: str, value: object) -> tuple[str, str] | None:
    """A setting in the engine's words; None: it has none for it."""
    if name == "ram_bytes":
        own = command.engine == "holdfast" and isinstance(value, int)
        return ("--ram", f"{-(-int(str(value)) // MIB)}MiB") if own else None
    theirs = profile(command.engine).spelling(name.replace("_", "-"))
    if theirs is None:
        return None
    if command.engine == "llama.cpp" and name == "max_model_len":
        slots = command.value("parallel")
        return theirs, str(int(str(value)) * (int(slots) if slots is not None and slots.isdecimal() else 1))
    if command.engine == "sglang" and name == "kv_cache_dtype":
        return theirs, "fp8_e4m3"
    return theirs, str(value)
