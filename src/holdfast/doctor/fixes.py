"""From a rule's fixes to commands: values worked out from the log's numbers, flags in the engine's own words.

Only what can be worked out whole is given; a fix with an unknown in it is left out.
"""

from __future__ import annotations

import re
import shlex

from holdfast.doctor.commands import ServerCommand, parse_command
from holdfast.doctor.formulas import evaluate, filled, holds, written
from holdfast.doctor.records import Fix
from holdfast.doctor.rulebook import FixRule, Rule
from holdfast.doctor.scene import Event, Scene
from holdfast.doctor.spellings import translated

_SETTINGS = {
    "max_model_len": ("max-model-len", "context-length", "max-total-tokens", "ctx-size"),
    "utilization": ("gpu-memory-utilization", "mem-fraction-static", "cuda-memory-fraction"),
    "tp": ("tensor-parallel-size", "num-shard", "tp"),
    "max_num_seqs": ("max-num-seqs", "max-running-requests", "parallel"),
    "batched": ("max-num-batched-tokens", "chunked-prefill-size", "max-batch-prefill-tokens", "ubatch-size"),
    "max_lora_rank": ("max-lora-rank",),
    "max_loras": ("max-loras", "max-loras-per-batch"),
    "layers_on_gpu": ("n-gpu-layers",),
    "swap_space": ("swap-space",),
    "port": ("port",),
}
_DEFAULTS: dict[str, dict[str, float]] = {
    "vllm": {"utilization": 0.9, "tp": 1, "max_num_seqs": 256, "max_lora_rank": 16, "max_loras": 1, "port": 8000},
    "sglang": {"tp": 1, "port": 30000},
    "llama.cpp": {"port": 8080},
    "holdfast": {"utilization": 0.9, "tp": 1, "port": 8000},
}
_GGUF_FOLDER = re.compile(r"(?i)(?:gguf|[-_.]i?q[2-8](?:_[\dk])?(?:_[sml])?)/?$")
_PACKAGES = {"llama.cpp": "llama-cpp-python", "tgi": "text-generation-server"}
_PLACEHOLDER = {
    "vllm": "vllm serve MODEL",
    "sglang": "python -m sglang.launch_server --model-path MODEL",
    "holdfast": "holdfast serve MODEL",
    "llama.cpp": "llama-server -m MODEL",
    "tgi": "text-generation-launcher --model-id MODEL",
    "ollama": "ollama serve",
}


def known_numbers(scene: Scene, event: Event) -> dict[str, float]:
    """By the names that rules use: settings, what the log told before, what the line itself said; the last wins."""
    numbers = dict(_DEFAULTS.get(scene.engine or "vllm", {}))
    for name, flags in _SETTINGS.items():
        value = scene.settings.number(*flags)
        if value is not None:
            numbers[name] = value
            numbers[f"{name}_set"] = value
    if _GGUF_FOLDER.search(scene.settings.model or ""):
        numbers["gguf_folder"] = 1
    return {**numbers, **scene.numbers, **event.numbers}


def known_words(scene: Scene, event: Event) -> dict[str, str]:
    command = base_command(scene)
    return {
        "model": scene.settings.model or "MODEL",
        "fetch_again": _fetch_again(scene.settings.model or "MODEL"),
        "package": _PACKAGES.get(scene.engine or "", scene.engine or "vllm"),
        "command": "" if command is None else command.with_changes({}),
        **scene.words,
        **event.words,
    }


def _fetch_again(model: str) -> str:
    if model.startswith(("/", "./", "~")):
        return f"ls -l {shlex.quote(model)}; sha256sum {shlex.quote(model.rstrip('/'))}/*.safetensors"
    return f"hf download {shlex.quote(model)} --force-download"


def fixes(scene: Scene, rule: Rule, numbers: dict[str, float], words: dict[str, str]) -> list[Fix]:
    """Those that can be worked out, the best first."""
    found = []
    for one in rule.fix:
        fix = _fix(scene, one, numbers, words)
        if fix is not None and fix not in found:
            found.append(fix)
    return found


def base_command(scene: Scene) -> ServerCommand | None:
    """What was run, as far as it is known; MODEL stands where the model is not."""
    engine = scene.engine or "vllm"
    return scene.settings.rebuilt(engine) or parse_command(_PLACEHOLDER.get(engine, _PLACEHOLDER["vllm"]))


def _fix(scene: Scene, rule: FixRule, numbers: dict[str, float], words: dict[str, str]) -> Fix | None:
    engine = scene.engine or "vllm"
    if (rule.engines and engine not in rule.engines) or not holds(rule.when, numbers):
        return None
    changes: dict[str, str | None] = {}
    values: dict[str, object] = {**words, **numbers}
    for ours, formula in rule.change.items():
        flag = _told(ours, words) if "{" in ours else translated(engine, ours)
        if flag is None:
            return None
        value = _changed(formula, numbers, words)
        if value is None and formula is not False:
            return None
        changes[flag] = value
        values[f"new_{ours.replace('-', '_')}"] = value
    command = None
    if changes:
        base = base_command(scene)
        command = None if base is None else base.with_changes(changes)
    elif rule.run:
        command = filled((rule.run,), values) or None
    why = filled((rule.why,), values)
    if rule.why and not why:
        return None
    return Fix(command=command, changes=changes, why=why, price=filled((rule.price,), values) or None)


def _told(ours: str, words: dict[str, str]) -> str | None:
    """A flag that the message itself names."""
    named = filled((ours,), words).split("/")[0].split("=")[0].rstrip(",:")
    if not named or not re.fullmatch(r"-{0,2}[A-Za-z][\w-]*", named):
        return None
    return named if named.startswith("-") else f"--{named.replace('_', '-')}"


def _changed(formula: object, numbers: dict[str, float], words: dict[str, str]) -> str | None:
    if formula is False:
        return None
    text = str(formula)
    if text == "":
        return ""
    if text.startswith("'"):
        return filled((text.strip("'"),), {**words, **numbers}) or None
    value = evaluate(text, numbers)
    return None if value is None else written(value)
