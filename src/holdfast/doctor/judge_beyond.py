"""What a command sets that the planner has no setting for: reckoned where a sum is enough, else named as not planned.

    more replicas than GPUs, a KV pool in bytes, SGLang's static share, the weights of a draft    reckoned
    offloading, other splits, quantization by other methods, stretched positions, shell's values  named

Nothing that a command sets for memory is passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.doctor.commands import ServerCommand
from holdfast.doctor.records import Evidence, Finding
from holdfast.doctor.said import changed, found
from holdfast.doctor.sizes import weights_bytes_of
from holdfast.errors import HoldfastError
from holdfast.units import GIB, counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from holdfast.planner.answer import Answer

METHODS = {"bitsandbytes": "nf4", "fp8": "fp8"}
"""Of `--quantization`, those that are made while loading, to what a plan calls them; others are of the checkpoint."""
_CHECKPOINT_METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "fbgemm", "gguf", "quark", "hqq", "marlin")
_NAMED = {
    "vllm": (
        "cpu-offload-gb", "kv-offloading-size", "num-gpu-blocks-override", "decode-context-parallel-size",
        "prefill-context-parallel-size", "enable-expert-parallel", "hf-overrides", "rope-scaling", "load-format",
        "model-loader-extra-config", "offload-params", "cpu-offload-params",
    ),
    "sglang": (
        "cpu-offload-gb", "torchao-config", "max-total-tokens", "expert-parallel-size", "ep-size",
        "enable-dp-attention", "json-model-override-args", "hicache-size", "enable-hierarchical-cache",
    ),
    "llama.cpp": (
        "n-gpu-layers", "tensor-split", "n-cpu-moe", "cpu-moe", "override-tensor", "cache-type-k", "cache-type-v",
        "model-draft", "rope-scaling", "rope-scale", "rope-freq-base", "no-kv-offload", "mmproj",
    ),
}  # fmt: skip
_SPECULATIVE = ("speculative-config", "speculative-model", "speculative-draft-model-path", "speculative-algorithm")
_HARMLESS = {"load-format": ("auto", "safetensors", "runai_streamer"), "n-gpu-layers": ("all", "auto")}
MOST_STATIC = 0.92
"""Of a GPU's memory, that SGLang's static share may take: steps and graphs need the rest."""
ALL_LAYERS = 90
"""So many layers on the GPU mean all of them."""


def quantization_of(command: ServerCommand, quantized: bool) -> str | None:
    """As a plan takes it; None: the checkpoint's own, or one that is not planned."""
    method = (command.value("quantization") or "").lower()
    return None if quantized else METHODS.get(method)


def not_planned(command: ServerCommand) -> list[str]:
    """What matters for memory and no plan here has counted, in words."""
    told = []
    for flag in command.flags:
        value = flag.value or ""
        matters = flag.name in _NAMED.get(command.engine, ()) and value not in _HARMLESS.get(flag.name, ())
        if flag.name == "n-gpu-layers" and value.isdecimal() and int(value) >= ALL_LAYERS:
            matters = False
        if flag.name == "quantization" and command.engine in ("vllm", "sglang"):
            known = value.lower() in METHODS or value.lower().startswith(_CHECKPOINT_METHODS)
            matters = not known
        if flag.name in _SPECULATIVE:
            matters = draft_of(command) is None
        if flag.unknown and flag.name in _SIZES:
            told.append(f"--{flag.name} {command.spelled.get(flag.words[1] - 1, '')}: only the shell knows its value")
        elif matters:
            told.append(f"--{flag.name} {value}".rstrip())
    return list(dict.fromkeys(told))


_SIZES = (
    "max-model-len", "max-num-seqs", "gpu-memory-utilization", "tensor-parallel-size", "model", "context-length",
    "mem-fraction-static", "ctx-size", "kv-cache-dtype", "dtype", "quantization",
)  # fmt: skip


def draft_of(command: ServerCommand) -> int | None:
    """Bytes of a draft's weights; 0: it has none (n-grams); None: not known."""
    settings: dict[str, Any] = {}
    try:
        read = json.loads(command.value("speculative-config") or "{}")
        settings = read if isinstance(read, dict) else {}
    except ValueError:
        return None
    name = settings.get("model") or command.value("speculative-model") or command.value("speculative-draft-model-path")
    if name in ("ngram", "[ngram]") or (name is None and settings.get("method") == "ngram"):
        return 0
    return None if not isinstance(name, str) else weights_bytes_of(name)


def stretched(command: ServerCommand) -> bool:
    """Whether positions are scaled: then a model reads further than it was made for."""
    text = " ".join(command.value(name) or "" for name in ("hf-overrides", "rope-scaling", "json-model-override-args"))
    return "rope" in text or "yarn" in text.lower()


def beyond(command: ServerCommand, told: Answer) -> Iterator[Finding]:
    """Of a command that fits as far as the planner counts."""
    yield from _replicas(command, told)
    if told.fits and told.question.machine.kind == "gpu":
        yield from _pool(command, told)
        yield from _static(command, told)
        yield from _draft(command, told)


def _evidence(line: str) -> list[Evidence]:
    return [Evidence(line=line, source="command")]


def _replicas(command: ServerCommand, told: Answer) -> Iterator[Finding]:
    value = command.value("data-parallel-size") or "1"
    ranks, devices = len(told.fit.ranks), len(told.question.machine.devices)
    if not value.isdecimal() or int(value) * ranks <= devices or command.has("data-parallel-size-local"):
        return
    flag = "--dp" if command.engine == "sglang" else "--data-parallel-size"
    most = max(1, devices // ranks)
    yield found(
        "tensor_parallel_mismatch", "not_memory", "high",
        what=f"{value} replicas of {counted(ranks, 'GPU')} each are asked for; there: {counted(devices, 'GPU')}",
        why="every replica needs GPUs of its own", evidence=_evidence(f"{flag} {value}"),
        fixes=[changed(command, {flag: str(most)}, f"as many as {counted(devices, 'GPU')} can hold")],
    )  # fmt: skip


def _pool(command: ServerCommand, told: Answer) -> Iterator[Finding]:
    """vLLM's KV cache as a number of bytes: a whole request must fit it."""
    written = command.value("kv-cache-memory-bytes")
    if written is None or command.engine != "vllm":
        return
    try:
        pool = parse_bytes(written)
    except HoldfastError:
        return
    rank = min(told.fit.ranks, key=lambda one: one.room_bytes)
    needed = told.fit.needed_bytes(rank)
    if pool >= needed:
        return
    length = told.fit.limits.max_model_len
    more = needed + needed // max(1, length // 16)
    yield found(
        "kv_cache_too_small_for_max_len", "kv_blowout", "high",
        what=f"one sequence of {length:,} tokens needs {format_bytes(needed)} of KV, and {format_bytes(pool)} are set",
        why="vLLM refuses to start when its pool does not hold one sequence of max_model_len",
        evidence=_evidence(f"--kv-cache-memory-bytes {written}"),
        fixes=[changed(command, {"--kv-cache-memory-bytes": str(more)}, "room for one whole sequence")],
        numbers={"needed_bytes": float(needed), "available_bytes": float(pool)},
    )  # fmt: skip


def _static(command: ServerCommand, told: Answer) -> Iterator[Finding]:
    """SGLang's weights and KV together."""
    written = command.value("mem-fraction-static")
    if written is None or command.engine != "sglang":
        return
    rank = min(told.fit.ranks, key=lambda one: one.room_bytes)
    weights = sum(term.nbytes for term in rank.terms if term.name == "weights")
    needed = weights + told.fit.needed_bytes(rank)
    total = rank.device.total_bytes
    try:
        share = float(written)
    except ValueError:
        return
    if not 0 < share <= 1 or needed <= share * total:
        return
    enough = -(-needed * 100 // total) / 100 + 0.02
    fixes = [changed(command, {"--mem-fraction-static": f"{enough:.2f}"}, "weights and one whole sequence fit it")]
    yield found(
        "no_memory_for_kv_blocks", "configuration_overshoot", "high",
        what=f"weights of {format_bytes(weights)} and one sequence's KV need {format_bytes(needed)}, and a static share"
        f" of {share:g} is {format_bytes(int(share * total))}",
        why="--mem-fraction-static is weights and KV together", evidence=_evidence(f"--mem-fraction-static {written}"),
        fixes=fixes if enough <= MOST_STATIC else [],
    )  # fmt: skip


def _draft(command: ServerCommand, told: Answer) -> Iterator[Finding]:
    """A draft's weights stand beside the model's."""
    if not any(command.has(name) for name in _SPECULATIVE):
        return
    draft = draft_of(command)
    rank = min(told.fit.ranks, key=lambda one: one.room_bytes)
    left = rank.room_bytes - told.fit.needed_bytes(rank)
    if draft is None or draft // len(told.fit.ranks) <= left:
        return
    yield found(
        "speculative_memory", "configuration_overshoot", "high",
        what=f"the draft's weights take {format_bytes(draft)}, and {format_bytes(max(0, left))} are left beside the"
        " model and one sequence",
        why="a draft is loaded beside the model, and its weights leave that much less for KV",
        evidence=_evidence(f"draft {draft / GIB:.2f} GiB"),
        fixes=[
            changed(command, {f"--{name}": None for name in _SPECULATIVE if command.has(name)},
                    "without speculation it fits", "slower answers at low load")
        ],
    )  # fmt: skip
