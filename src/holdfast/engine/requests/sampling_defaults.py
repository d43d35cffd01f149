"""Default sampling parameters: the model's generation_config.json, another folder's, and overrides. A request's own
values win.

    auto:  the makers' advice ─► of a GGUF file without any: llama.cpp's defaults, for which such files are made
                              ─► of other models: the API's own, as vLLM has it
    vllm:  the API's own, whatever the model says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.checkpoints.bounded_files import read_json
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, RequestError
from holdfast.models import ModelSpec
from holdfast.observability.decisions import SAMPLING, Decision
from holdfast.records import EngineInfo, SamplingParams

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
"""In a generation config, and ours."""

GGUF_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own. At temperature 1 over the whole vocabulary a small quantized model soon writes nonsense."""
SMALL_PARAMETERS = 1_000_000_000
SMALL_ANSWER_TOKENS = 1024
"""Smaller models often do not find an end and repeat themselves up to the context's."""


def chat_limit(config: EngineConfig, files: ModelFiles, spec: ModelSpec) -> int | None:
    """The max_tokens of a chat that says none and whose model advises none: for a small model in a GGUF file."""
    reasons = "think" in (files.chat_template or "")  # Such a model needs thousands of tokens, however small it is.
    small = files.format == "gguf" and spec.parameters < SMALL_PARAMETERS and not reasons
    return SMALL_ANSWER_TOKENS if small and config.generation_config == "auto" else None


def served_sampling(config: EngineConfig, files: ModelFiles, spec: ModelSpec) -> dict[str, Any]:
    """As a chat is sampled: `default_sampling` with that limit."""
    limit = chat_limit(config, files, spec)
    return ({} if limit is None else {"max_tokens": limit}) | default_sampling(config, files)


def default_sampling(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """SamplingParams by name."""
    if config.generation_config == "vllm":
        chosen: Mapping[str, Any] = {}
    elif config.generation_config == "auto":
        chosen = files.generation_config or (GGUF_DEFAULTS if files.format == "gguf" else {})
    else:
        path = Path(config.generation_config) / "generation_config.json"
        read = read_json(path)
        if read is None:
            raise ConfigurationError(
                f"{path} does not exist",
                needed="auto, vllm, or a folder with a generation_config.json",
                found=config.generation_config,
                fix="leave generation_config out to use the model's own",
                field="generation_config",
            )
        chosen = read
    overriding = config.override_generation_config or {}
    unknown = [name for name in overriding if name not in NAMES and name not in NAMES.values()]
    if unknown:
        raise ConfigurationError(
            f"override_generation_config: {unknown[0]!r} is not a sampling parameter with a default",
            needed=", ".join(NAMES),
            found=unknown[0],
            fix=f"leave {unknown[0]} out",
            field="override_generation_config",
        )
    return sampling_defaults(chosen) | _ours(overriding, "override_generation_config")


def sampling_defaults(generation_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a generation_config.json says of sampling, under our names. `do_sample` is passed over, as in vLLM: many
    models carry transformers' default of it, and their users do not expect greedy answers from a server."""
    return _ours(generation_config or {}, "generation_config")


def _ours(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    found = {NAMES.get(name, name): value for name, value in config.items() if name in NAMES or name == "max_tokens"}
    found = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**found)
    except (RequestError, TypeError) as error:
        own = field == "override_generation_config"
        raise ConfigurationError(
            f"{field} cannot be used: {error.message if isinstance(error, RequestError) else error}",
            needed=getattr(error, "needed", None),
            found=getattr(error, "found", None),
            fix="correct it, or leave it out" if own else "--generation-config vllm ignores the model's own",
            field=field,
        ) from error
    return found


def decided(
    info: EngineInfo,
    config: EngineConfig,
    defaults: Mapping[str, Any],
    others: Sequence[Decision] = (),
    *,
    advised: bool = True,
) -> EngineInfo:
    """With a line on how is sampled where a request says nothing, behind those of `others`. `advised`: the model's
    files say how."""
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items()) or "API defaults"
    reasons = {
        "auto": "from the model's generation config",
        "vllm": "the model's generation config is ignored",
    }
    reason = reasons.get(config.generation_config, f"read from {config.generation_config}")
    if config.generation_config == "auto" and not (advised and defaults):
        reason = "the model sets none" if not defaults else "the file sets none: llama.cpp's defaults"
    if config.generation_config == "auto" and defaults.get("max_tokens") == SMALL_ANSWER_TOKENS:
        reason += "; max_tokens in chats only, for a small model"
    if config.override_generation_config:
        reason += ", overridden by override_generation_config"
    source = "model" if config.generation_config == "auto" and not config.override_generation_config else "set"
    line = Decision(SAMPLING, shown, reason, source).line()
    return msgspec.structs.replace(info, decisions=[*info.decisions, *(one.line() for one in others), line])
