"""What a log says a server was given, as the words of a command: lists as several words, objects as JSON, a feature
that was switched off as its own flag; and what nobody gave, left out.

What cannot be written as words is named, not guessed. Reads no line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from holdfast.doctor.evidence.argument_dumps import UNREADABLE, Call
from holdfast.engine_profiles.profile import MODEL_FLAGS, profile, release

_NO_FLAGS = ("subparser", "dispatch-function", "model-tag", "config", "model-config", "command")
_STEP_FLAGS = ("chunked-prefill-size", "cuda-graph-max-bs")
_MANY_RANKS = 4


def was_given(engine: str, name: str, value: Any, everything: Mapping[str, Any]) -> bool:
    """Of a dump of everything: whether somebody set it."""
    dumps = profile(engine).data.get("dumps", {})
    if name in _NO_FLAGS or name in dumps.get("derived", ()) or value is None or value in ([], {}, ""):
        return False
    if value is False:
        return name in dumps.get("switches", ())
    ranks = everything.get("tensor-parallel-size", 1)
    ranks = ranks if isinstance(ranks, int) else 1
    if "steps" in dumps and name in _STEP_FLAGS:
        chunk, batch = (everything.get(flag) for flag in _STEP_FLAGS)
        own = dumps["steps"].get(str(chunk))
        # Some releases do not print the batch.
        return own is None or (batch is not None and batch not in own[ranks >= _MANY_RANKS])
    if "fractions" in dumps and name == "mem-fraction-static":
        return str(value) != dumps["fractions"].get(str(ranks)) and len(str(value).partition(".")[2]) < 3
    if name in ("served-model-name", "tokenizer", "tokenizer-path") and value in _models(everything):
        return False
    return str(value) not in profile(engine).flag(name).defaults


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
    program = profile(engine).start(release(version or ""), model=shlex.quote(model))
    return " ".join([program, *map(shlex.quote, words)]), lost


def _words(engine: str, name: str, value: Any, version: str | None) -> list[str] | None:
    flag = f"--{name}"
    if value is UNREADABLE or isinstance(value, Call):
        return None
    if isinstance(value, bool):
        return [flag] if value else _off(engine, name, version)
    if isinstance(value, list):
        return _listed(engine, name, value)
    if isinstance(value, dict):
        if name == "limit-mm-per-prompt" and not _has("json-multimodal-limits", version):
            return [flag, ",".join(f"{kind}={count}" for kind, count in value.items())]
        return None if _has_calls(value) else [flag, json.dumps(value)]
    if name == "dtype":
        return [flag, str(value).removeprefix("torch.")]
    return [flag, str(value)]


def _off(engine: str, name: str, version: str | None) -> list[str]:
    if engine not in ("vllm", "holdfast"):
        return []
    feature = "no-prefix-caching-flag" if name == "enable-prefix-caching" else "negated-flags"
    if engine == "holdfast" or _has(feature, version):
        return [f"--no-{name}"]
    return [f"--{name}=False"] if name == "enable-chunked-prefill" else []


def _has(feature: str, version: str | None) -> bool:
    """Of vLLM; of no version the newest."""
    return version is None or profile("vllm").has(feature, release(version))


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
    if profile(engine).takes_many(name) and len(plain) == len(values):
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
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Call) or value is UNREADABLE or any(_has_calls(one) for one in inside)
