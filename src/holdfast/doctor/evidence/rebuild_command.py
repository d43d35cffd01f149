"""What a log says a server was given, as the words of a command: lists as several words, objects as JSON, a feature
that was switched off as its own flag; and what nobody gave, left out.

What cannot be written as words is named, not guessed. Reads no line.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from holdfast.doctor.command.flag_aliases import MANY_VALUED, MODEL_FLAGS
from holdfast.doctor.command.known_flags import release
from holdfast.doctor.command.programs import vllm_program
from holdfast.doctor.evidence.argument_dumps import UNREADABLE, Call

_NO_FLAGS = ("subparser", "dispatch-function", "model-tag", "config", "model-config", "command")
_DERIVED = {
    "sglang": (
        "attention-backend", "sampling-backend", "grammar-backend", "random-seed", "cuda-graph-bs", "page-size",
        "nccl-port", "prefill-attention-backend", "decode-attention-backend", "mm-attention-backend", "device",
    ),
    "tgi": ("hostname",),
}  # fmt: skip
"""Worked out by the engine itself at every start, and printed as if somebody had set it."""
_STATIC_SHARES = {1: "0.88", 2: "0.87", 4: "0.85", 8: "0.81", 16: "0.79"}
"""SGLang's own choice by its ranks, where it does not work it out from the GPU's memory with more digits."""
_STEPS = {
    (2048, False): (8, 24), (2048, True): (8, 80), (4096, False): (32,), (4096, True): (160,),
    (8192, False): (160, 256), (8192, True): (160, 512), (16_384, False): (512,), (16_384, True): (512,),
}  # fmt: skip
"""SGLang's own choice by the GPU's memory: tokens of a chunk, and the largest batch of its graphs, with 4 ranks or more
(True) and with fewer. Of a pair that is none of these somebody set the one or the other."""
_STEP_FLAGS = ("chunked-prefill-size", "cuda-graph-max-bs")
_SWITCHES = ("enable-chunked-prefill", "enable-prefix-caching", "async-scheduling")
"""Of vLLM: left out, they are decided by the model, so that False is a wish."""
_JSON_LIMITS, _NO_FORM, _NO_PREFIX_FORM = (0, 8, 5), (0, 8, 5), (0, 6, 4)


@cache
def _defaults() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(
        (resources.files("holdfast.doctor") / "evidence" / "printed_defaults.toml").read_text(encoding="utf-8")
    )


def was_given(engine: str, name: str, value: Any, everything: Mapping[str, Any]) -> bool:
    """Of a dump of everything: whether somebody set it."""
    if name in _NO_FLAGS or name in _DERIVED.get(engine, ()):
        return False
    if value is None or value in ([], {}, ""):
        return False
    if value is False:
        return engine == "vllm" and name in _SWITCHES
    if engine == "sglang" and name in _STEP_FLAGS:
        return not _own_steps(everything)
    if engine == "sglang" and name == "mem-fraction-static":
        ranks = everything.get("tensor-parallel-size", 1)
        own = _STATIC_SHARES.get(ranks if isinstance(ranks, int) else 1)
        return str(value) != own and len(str(value).partition(".")[2]) < 3
    if name in ("served-model-name", "tokenizer", "tokenizer-path") and value in _models(everything):
        return False
    return str(value) not in _defaults().get(engine, {}).get(name, ())


def _own_steps(everything: Mapping[str, Any]) -> bool:
    chunk, batch = (everything.get(name) for name in _STEP_FLAGS)
    ranks = everything.get("tensor-parallel-size", 1)
    many = isinstance(ranks, int) and ranks >= 4
    if batch is None:  # Releases that do not print it.
        return any(chunk == tokens for tokens, _ in _STEPS)
    return isinstance(chunk, int) and batch in _STEPS.get((chunk, many), ())


def _models(everything: Mapping[str, Any]) -> list[Any]:
    return [shape for name in MODEL_FLAGS if (model := everything.get(name)) for shape in (model, [model])]


def written(engine: str, model: str, given: Mapping[str, Any], version: str | None) -> tuple[str, list[str]]:
    """The command, and the flags that could not be put into it."""
    words, lost = [], []
    for name, value in given.items():
        if name in MODEL_FLAGS or name in _NO_FLAGS or value is None:
            continue
        mine = _words(engine, name, value, version)
        if mine is None:
            lost.append(f"--{name}")
        else:
            words += mine
    return " ".join([_program(engine, model, version), *map(shlex.quote, words)]), lost


def _program(engine: str, model: str, version: str | None) -> str:
    name = shlex.quote(model)
    if engine == "vllm":
        program = vllm_program(version)
        return f"{program} {name}" if program.endswith("serve") else f"{program} --model {name}"
    return {
        "sglang": f"python -m sglang.launch_server --model-path {name}",
        "llama.cpp": f"llama-server -m {name}",
        "tgi": f"text-generation-launcher --model-id {name}",
        "ollama": "ollama serve",
        "holdfast": f"holdfast serve {name}",
    }.get(engine, f"vllm serve {name}")


def _words(engine: str, name: str, value: Any, version: str | None) -> list[str] | None:
    flag = f"--{name}"
    if value is UNREADABLE or isinstance(value, Call):
        return None
    if isinstance(value, bool):
        return [flag] if value else _off(engine, name, version)
    if isinstance(value, list):
        return _listed(engine, name, value)
    if isinstance(value, dict):
        if name == "limit-mm-per-prompt" and version is not None and release(version) < _JSON_LIMITS:
            return [flag, ",".join(f"{kind}={count}" for kind, count in value.items())]
        return None if _has_calls(value) else [flag, json.dumps(value)]
    if name == "dtype":
        return [flag, str(value).removeprefix("torch.")]
    return [flag, str(value)]


def _off(engine: str, name: str, version: str | None) -> list[str]:
    at = (99,) if version is None else release(version)
    if engine not in ("vllm", "holdfast"):
        return []
    if at >= _NO_FORM or (name == "enable-prefix-caching" and at >= _NO_PREFIX_FORM) or engine == "holdfast":
        return [f"--no-{name}"]
    return [f"--{name}=False"] if name == "enable-chunked-prefill" else []


def _listed(engine: str, name: str, values: list[Any]) -> list[str] | None:
    flag = f"--{name}"
    if name in ("lora-modules", "lora-paths"):
        adapters = [_adapter(one) for one in values]
        return None if None in adapters else [flag, *(one for one in adapters if one is not None)]
    if _has_calls(values):
        return None
    if name in ("middleware", "logits-processors"):
        return [word for value in values for word in (flag, str(value))]
    plain = [value for value in values if not isinstance(value, dict | list)]
    if name in MANY_VALUED.get(engine, ()) and len(plain) == len(values):
        return [flag, *map(str, values)]
    return [flag, json.dumps(values)]


def _adapter(value: Any) -> str | None:
    """`name=path`, or with its base model an object."""
    fields = value.keywords if isinstance(value, Call) else value
    if isinstance(fields, str):
        return fields
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return None
    known = {key: fields[key] for key in ("name", "path", "base_model_name") if fields.get(key)}
    return json.dumps(known) if "base_model_name" in known else f"{fields['name']}={fields.get('path', '')}"


def _has_calls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_calls(one) for one in value.values())
    if isinstance(value, list):
        return any(_has_calls(one) for one in value)
    return isinstance(value, Call) or value is UNREADABLE
