"""Which family file reads which architecture. A new family is one file in `families` and one line here.

describe_config, describe_gguf    any known model, for planning
from_config, from_gguf            the same for the engine: what it cannot run is refused by name
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from holdfast.errors import CheckpointError, UnknownArchitectureError
from holdfast.models.families import (
    baichuan,
    bloom,
    chatglm,
    cohere,
    dbrx,
    deepseek,
    exaone,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    internlm2,
    jamba,
    llama,
    llama4,
    minicpm,
    minimax,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from holdfast.models.fields import Fields, shorten
from holdfast.models.runnable import RUNNABLE_FAMILIES, lacking, require_runnable
from holdfast.models.source import Source, source_of_config, source_of_gguf
from holdfast.models.spec import ModelSpec


class Family(Protocol):
    """What a family's module offers."""

    FAMILY: str
    ARCHITECTURES: tuple[str, ...]
    GGUF_ARCHITECTURES: tuple[str, ...]

    def describe(self, source: Source) -> ModelSpec: ...


_MODULES = (
    baichuan,
    bloom,
    chatglm,
    cohere,
    dbrx,
    deepseek,
    exaone,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    internlm2,
    jamba,
    llama,
    llama4,
    minicpm,
    minimax,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
    stablelm,
    starcoder2,
)
FAMILIES: dict[str, Family] = {module.FAMILY: cast(Family, module) for module in _MODULES}

_BY_ARCHITECTURE = {name: family for family in FAMILIES.values() for name in family.ARCHITECTURES}
_BY_GGUF = {name: family for family in FAMILIES.values() for name in family.GGUF_ARCHITECTURES}
# Configs saved from a bare model name no architecture that can generate; their model_type still tells.
_BY_MODEL_TYPE = {
    **{name.removesuffix("ForCausalLM").lower(): name for name in _BY_ARCHITECTURE if name.endswith("ForCausalLM")},
    **{name.removesuffix("ForConditionalGeneration").lower(): name for name in _BY_ARCHITECTURE if name[-3:] == "ion"},
    "gemma3text": "Gemma3ForCausalLM",
    "llama4text": "Llama4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "chatglm": "ChatGLMModel",
}


def known_architectures() -> tuple[str, ...]:
    """What can be planned."""
    return tuple(sorted(_BY_ARCHITECTURE))


def known_gguf_architectures() -> tuple[str, ...]:
    return tuple(sorted(_BY_GGUF))


def runnable_architectures() -> tuple[str, ...]:
    """What this engine can run, unless a model of it asks for something that is not there."""
    return tuple(sorted(name for family in RUNNABLE_FAMILIES for name in FAMILIES[family].ARCHITECTURES))


def runnable_gguf_architectures() -> tuple[str, ...]:
    return tuple(sorted(name for family in RUNNABLE_FAMILIES for name in FAMILIES[family].GGUF_ARCHITECTURES))


def from_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a config.json that the engine is to run; what it cannot is refused here, before loading."""
    return require_runnable(describe_config(config, generation_config), runnable_architectures())


def from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """The spec of a GGUF header that the engine is to run; what it cannot is refused here, before loading."""
    return require_runnable(describe_gguf(metadata, tensor_names), runnable_gguf_architectures())


def describe_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a Hugging Face config.json; generation_config.json adds its ends to the config's own."""
    if not isinstance(config, Mapping):
        raise CheckpointError("config.json is not a table", found=type(config).__name__)
    named = config.get("architectures")
    if named:
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise Fields(config, where="config.json").wrong("architectures", "a list of names", named)
        names = list(named)
    else:
        model_type = config.get("model_type")
        names = [_of_model_type(model_type) if isinstance(model_type, str) else "(none named)"]
    for name in names:
        if name in _BY_ARCHITECTURE:
            return _described(_BY_ARCHITECTURE[name], source_of_config(config, generation_config, name))
    raise _unknown(", ".join(names), known_architectures(), field="architectures")


def describe_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """The spec of a GGUF header; which tensors there are tells about ties, biases and rotary factors."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _BY_GGUF:
        shown = name if isinstance(name, str) else "(none named)"
        raise _unknown(shown, known_gguf_architectures(), field="general.architecture")
    return _described(_BY_GGUF[name], source_of_gguf(metadata, tensor_names, name))


def _of_model_type(model_type: str) -> str:
    return _BY_MODEL_TYPE.get(model_type.replace("_", ""), model_type)


def _described(family: Family, source: Source) -> ModelSpec:
    spec = family.describe(source)
    return replace(spec, unsupported=lacking(spec, source.fields))


def _unknown(name: str, known: tuple[str, ...], *, field: str) -> UnknownArchitectureError:
    shown = shorten(name)
    return UnknownArchitectureError(
        f"model architecture {shown} is not supported", needed="one of " + ", ".join(known), found=shown, field=field
    )
