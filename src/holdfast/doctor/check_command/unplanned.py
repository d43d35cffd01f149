"""What a command sets that the planner has no setting for: reckoned where a sum is enough, else named as not planned.

    more replicas than GPUs, a KV pool in bytes, SGLang's static share, a draft model             reckoned
    offloading, other splits, quantization by other methods, stretched positions, shell's values  named

Nothing that a command sets for memory is passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.parts.quantization import KERNEL_NAMES, MADE_WHILE_LOADING
from holdfast.doctor.build_finding import changed, found
from holdfast.doctor.check_command.gpu_split import DRAFT, Split
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import weights_bytes_of
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.engine_profiles.profile import profile
from holdfast.units import GIB, MIB, counted, format_bytes

if TYPE_CHECKING:
    from holdfast.planner.report.answer import PlanAnswer

METHODS = {"bitsandbytes": "nf4", "fp8": "fp8"}
"""Of `--quantization`, those that are made while loading, to what a plan calls them; others are of the checkpoint."""
_MADE_BY_HOLDFAST = {method: method for method in MADE_WHILE_LOADING} | {
    name: method for name, method in KERNEL_NAMES.items() if method in MADE_WHILE_LOADING
}
_CHECKPOINT_METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "fbgemm", "gguf", "quark", "hqq", "marlin")
_SPECULATIVE = (
    "speculative-config", "speculative-model", "speculative-draft-model-path", "speculative-algorithm", "model-draft",
)  # fmt: skip
_HARMLESS = {"load-format": ("auto", "safetensors", "runai_streamer"), "n-gpu-layers": ("all", "auto")}
SPARE_SHARE = 0.02
"""Of the free memory, beyond what one sequence takes."""
ALL_LAYERS = 90
"""So many layers on the GPU mean all of them."""


def quantization_of(command: ServerCommand, quantized: bool) -> str | None:
    """As a plan takes it; None: the checkpoint's own, or one that is not planned."""
    method = (command.value("quantization") or "").lower()
    made = _MADE_BY_HOLDFAST if command.engine == "holdfast" else METHODS
    return None if quantized else made.get(method)


def not_planned(command: ServerCommand) -> list[str]:
    """What matters for memory and no plan here has counted, in words."""
    plan, told = profile(command.engine).data.get("plan", {}), []
    for flag in command.flags:
        value = flag.value or ""
        matters = flag.name in plan.get("not-planned", "").split() and value not in _HARMLESS.get(flag.name, ())
        if flag.name == "n-gpu-layers" and value.isdecimal() and int(value) >= ALL_LAYERS:
            matters = False
        if flag.name == "quantization" and plan.get("names-quantization"):
            matters = value.lower() not in METHODS and not value.lower().startswith(_CHECKPOINT_METHODS)
        if flag.name in _SPECULATIVE:
            matters = not (draft_model(command) or _loads_nothing(command) or drafts_itself(command))
        if flag.unknown and flag.name in _SIZES:
            told.append(f"--{flag.name} {command.spelled.get(flag.words[1] - 1, '')}: only the shell knows its value")
        elif matters:
            told.append(f"--{flag.name} {value}".rstrip())
    return list(dict.fromkeys(told))


_SIZES = (
    "max-model-len", "max-num-seqs", "gpu-memory-utilization", "tensor-parallel-size", "model", "context-length",
    "mem-fraction-static", "ctx-size", "kv-cache-dtype", "dtype", "quantization",
)  # fmt: skip


def drafts_itself(command: ServerCommand) -> bool:
    """With the model's own layers for multi-token prediction, which a plan for vLLM counts."""
    settings = _speculative_config(command) or {}
    own = settings.get("model") is None and str(settings.get("method", "")).endswith("mtp")
    return own and command.engine == "vllm"


def _speculative_config(command: ServerCommand) -> dict[str, Any] | None:
    try:
        read: Any = json.loads(command.value("speculative-config") or "{}")
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else {}


def draft_model(command: ServerCommand) -> str | None:
    """None: none is loaded, or neither the catalogue knows it nor, for llama.cpp, is the file here."""
    name = _draft_name(command)
    if command.engine == "llama.cpp":
        return name if name is not None and Path(name).expanduser().is_file() else None
    if name is None or command.engine not in ("vllm", "sglang"):
        return None
    return name if weights_bytes_of(name) is not None else None


def _draft_name(command: ServerCommand) -> str | None:
    settings = _speculative_config(command) or {}
    flags = ("speculative-model", "speculative-draft-model-path", "model-draft")
    name = settings.get("model") or next(filter(None, map(command.value, flags)), None)
    return name if isinstance(name, str) else None


def _loads_nothing(command: ServerCommand) -> bool:
    """It guesses from the text itself."""
    name, method = _draft_name(command), (_speculative_config(command) or {}).get("method")
    return name in ("ngram", "[ngram]") or (name is None and method == "ngram")


def stretched(command: ServerCommand) -> bool:
    """Whether positions are scaled: then a model reads further than it was made for."""
    text = " ".join(command.value(name) or "" for name in ("hf-overrides", "rope-scaling", "json-model-override-args"))
    return "rope" in text or "yarn" in text.lower()


def _evidence(line: str) -> list[Evidence]:
    return [Evidence(line=line, source="command")]


def too_many_replicas(command: ServerCommand, told: PlanAnswer) -> Iterator[Finding]:
    value = command.value("data-parallel-size") or "1"
    ranks, devices = len(told.fit.ranks), len(told.question.machine.devices)
    if not value.isdecimal() or int(value) * ranks <= devices or command.has("data-parallel-size-local"):
        return
    flag = "--dp" if command.engine == "sglang" else "--data-parallel-size"
    most = max(1, devices // ranks)
    yield found(
        "tensor_parallel_mismatch",
        "not_memory",
        "high",
        what=f"{value} replicas of {counted(ranks, 'GPU')} each are asked for; there: {counted(devices, 'GPU')}",
        why="every replica needs GPUs of its own",
        evidence=_evidence(f"{flag} {value}"),
        fixes=[changed(command, {flag: str(most)}, f"as many as {counted(devices, 'GPU')} can hold")],
    )


def ill_divided(command: ServerCommand, split: Split, length: int) -> Finding | None:
    """A split that holds too little, or leaves too little, where another value of its flag would do. `length`: of the
    context, in tokens."""
    if split.pool_bytes < split.needed_bytes:
        return _too_little(command, split, length)
    if split.pool_bytes <= split.room_bytes or not command.has(split.flag):
        return None
    share = split.share
    set_so = f"a KV pool of {format_bytes(split.pool_bytes)}" if share is None else f"a static share of {share:g}"
    value = str(split.room_bytes // MIB * MIB) if share is None else _written(min(split.most_share, _usual(split)))
    return found(
        "utilization_too_high",
        "configuration_overshoot",
        "medium",
        what=f"{set_so} leaves {format_bytes(max(0, split.left_bytes))} of {format_bytes(split.free_bytes)} beside"
        f" weights and KV, and steps and graphs take some {format_bytes(split.beside_bytes)}",
        why="weights and KV are taken at start, whole: what a step or a graph lacks then is out of memory",
        evidence=_evidence(f"{split.flag} {command.value(split.flag)}"),
        fixes=[
            changed(command, {split.flag: value}, "planned: it leaves steps and graphs what they take", "less KV cache")
        ],
    )


def _too_little(command: ServerCommand, split: Split, length: int) -> Finding:
    needed, pool = format_bytes(split.needed_bytes), format_bytes(max(0, split.pool_bytes))
    numbers = {"needed_bytes": float(split.needed_bytes), "available_bytes": float(max(0, split.pool_bytes))}
    if split.share is None:
        more = split.needed_bytes + split.needed_bytes // max(1, length // 16)
        return found(
            "kv_cache_too_small_for_max_len",
            "kv_blowout",
            "high",
            what=f"one sequence of {length:,} tokens needs {needed} of KV, and {pool} are set",
            why="vLLM refuses to start when its pool does not hold one sequence of max_model_len",
            evidence=_evidence(f"{split.flag} {command.value(split.flag)}"),
            numbers=numbers,
            fixes=[changed(command, {split.flag: str(min(more, split.room_bytes))}, "planned: one whole sequence")],
        )
    static = format_bytes(int(split.share * split.free_bytes))
    enough = _written(min(split.most_share, max(_usual(split), split.least_share + SPARE_SHARE)))
    given = command.has(split.flag)
    share = f"{split.share:g}" if given else f"{split.share:g}, which SGLang takes by itself,"
    draft = f" and a draft of {format_bytes(split.draft_bytes)}" if split.draft_bytes and given else ""
    none = split.pool_bytes <= 0
    return found(
        "no_memory_for_kv_blocks" if none else "kv_cache_too_small_for_max_len",
        "configuration_overshoot" if none else "kv_blowout",
        "high" if given else "medium",
        what=f"a static share of {share} is {static}: weights of {format_bytes(split.weights_bytes)}{draft} leave"
        f" {pool} of it for KV, and one sequence of {length:,} tokens needs {needed}",
        why="--mem-fraction-static is weights and KV together, of what is free at start"
        + ("" if none else "; longer requests than its pool holds are refused"),
        evidence=_evidence(f"{split.flag} {split.share:g}"),
        numbers=numbers,
        fixes=[
            changed(
                command,
                {split.flag: enough},
                "planned: it holds weights and one whole sequence, and leaves steps and graphs what they take",
            )
        ],
    )


def _usual(split: Split) -> float:
    """SGLang's own choice, where it holds one sequence."""
    return max(split.own_share or 0.0, split.least_share)


def _written(share: float) -> str:
    """In hundredths, rounded down: what is not there is not given away."""
    return f"{int(share * 100 + 1e-6) / 100:g}"


def budget_words(command: ServerCommand, told: PlanAnswer, split: Split | None) -> str:
    """What the plan rests on, in one line."""
    fit = told.fit
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    each = "" if len(fit.ranks) == 1 else f" on each of {len(fit.ranks)}"
    weights = sum(term.nbytes for term in rank.terms if term.name == "weights")
    draft = sum(term.nbytes for term in rank.terms if term.name == DRAFT)
    pool, after = rank.room_bytes, ""
    if split is None:
        device, on_cpu = rank.device, rank.device.kind == "cpu"
        whole = device.free_bytes if on_cpu else device.total_bytes
        text = f"budget {format_bytes(rank.budget_bytes)}"
        if device.budget_bytes is None and rank.budget_bytes == int(whole * fit.utilization):  # Else less is free.
            text += f" ({fit.utilization:g} of {format_bytes(whole)}{' of free RAM' if on_cpu else ''})"
        text += f"{each}, "
    else:
        pool, left = split.pool_bytes, format_bytes(max(0, split.left_bytes))
        after = f"; {left} left for steps and graphs, which take some {format_bytes(split.beside_bytes)}"
        text = f"{format_bytes(split.free_bytes)} free{each}, "
        if split.share is not None:
            chosen = "" if command.has(split.flag) else ", SGLang's own choice"
            static, weights = format_bytes(int(split.share * split.free_bytes)), split.weights_bytes
            share = f"static share {split.share:g}{chosen} = {static}"
            text = f"{format_bytes(split.free_bytes)} free at start{each}, {share}: "
    text += f"weights {format_bytes(weights)}" + (f", draft {format_bytes(draft)}" if draft else "")
    if split is None and not told.fits:
        return f"{text}, {format_bytes(fit.short_bytes)} short"
    if pool <= 0:
        return f"{text}, none for KV"
    length = max(1, min(fit.limits.max_model_len, rank.kv.longest(pool, told.question.model.spec.max_position)))
    at_once = rank.kv.concurrency(pool, length)
    count = f"{at_once:,.0f}" if at_once >= 100 else f"{at_once:.1f}"
    held = f"some {int(at_once * length):,} tokens, {count} sequences of {length:,} at once"
    return f"{text}, {format_bytes(pool)} for KV: {held}{after}"


def draft_too_large(command: ServerCommand, draft: int, draft_kv: int, left: int, others: list[Fix]) -> Finding:
    """Where the model alone fits. `draft`, `draft_kv`: its weights and its KV of one sequence. `left`: beside the model
    and one sequence. `others`: fixes that keep it."""
    dropped: dict[str, str | None] = {f"--{name}": None for name in _SPECULATIVE if command.has(name)}
    return found(
        "speculative_memory",
        "configuration_overshoot",
        "high",
        what=f"the draft's weights take {format_bytes(draft)} and its KV of one sequence {format_bytes(draft_kv)}, and"
        f" {format_bytes(left)} are left beside the model and one sequence",
        why="a draft is loaded beside the model and keeps KV of the same tokens: both leave less for the model's KV",
        evidence=_evidence(f"draft {draft / GIB:.2f} GiB, its KV {draft_kv / GIB:.2f} GiB"),
        fixes=[changed(command, dropped, "without speculation it fits", "slower answers at low load"), *others],
    )
