"""Which family file reads which architecture. A new family is one file in `families` and one line here.

describe_config, describe_gguf    any known model, for planning
from_config, from_gguf            the same for the engine: what it cannot run is refused by name
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

from holdfast.errors import CheckpointError, UnknownArchitectureError
from holdfast.models.fields import Fields
from holdfast.models.runnable import RUNNABLE_ARCHITECTURES, decoder_of, lacking, require_runnable
from holdfast.models.source import ModelDescription, source_of_config, source_of_gguf
from holdfast.models.spec import ModelSpec
from holdfast.units import shorten


class Family(Protocol):
    """What a family's module offers."""

    def describe(self, source: ModelDescription) -> ModelSpec: ...


class Names(NamedTuple):
    architectures: tuple[str, ...]
    """As config.json names them."""
    gguf_architectures: tuple[str, ...] = ()
    """As GGUF headers do; empty: it is not known there."""


FAMILIES: Mapping[str, Names] = {
    "baichuan": Names(("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",)),
    "bloom": Names(("BloomForCausalLM",), ("bloom",)),
    "chatglm": Names(("ChatGLMModel", "ChatGLMForConditionalGeneration"), ("chatglm",)),
    "cohere": Names(("CohereForCausalLM", "Cohere2ForCausalLM"), ("command-r", "cohere2")),
    "dbrx": Names(("DbrxForCausalLM",), ("dbrx",)),
    "deepseek": Names(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM",
            "KimiK25ForConditionalGeneration",
        ),
        ("deepseek2",),
    ),
    "exaone": Names(("ExaoneForCausalLM", "Exaone4ForCausalLM"), ("exaone", "exaone4")),
    "falcon": Names(("FalconForCausalLM", "RWForCausalLM"), ("falcon",)),
    "gemma": Names(
        ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma", "gemma2", "gemma3"),
    ),
    "gemma3n": Names(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), ()),
    "gemma4": Names(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), ()),
    "glm": Names(("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"), ("glm4", "glm4moe")),
    "gpt2": Names(("GPT2LMHeadModel",), ("gpt2",)),
    "gpt_neox": Names(("GPTNeoXForCausalLM",), ("gptneox",)),
    "gpt_oss": Names(("GptOssForCausalLM",), ("gpt-oss",)),
    "granite": Names(("GraniteForCausalLM", "GraniteMoeForCausalLM"), ("granite", "granitemoe")),
    "granite_hybrid": Names(("GraniteMoeHybridForCausalLM",), ()),
    "internlm2": Names(("InternLM2ForCausalLM",), ("internlm2",)),
    "jamba": Names(("JambaForCausalLM",), ()),
    "llama": Names(("LlamaForCausalLM", "MistralForCausalLM"), ("llama",)),
    "llama4": Names(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), ("llama4",)),
    "minicpm": Names(("MiniCPMForCausalLM",), ("minicpm",)),
    "minimax": Names(("MiniMaxM2ForCausalLM",), ("minimax-m2",)),
    "mistral": Names(
        (
            "MinistralForCausalLM",
            "Ministral3ForCausalLM",
            "Mistral3ForConditionalGeneration",
            "LlavaForConditionalGeneration",
        ),
        ("mistral3",),
    ),
    "mixtral": Names(("MixtralForCausalLM", "PhiMoEForCausalLM", "PhimoeForCausalLM"), ("phimoe",)),
    "nemotron": Names(("NemotronForCausalLM",), ("nemotron",)),
    "nemotron_h": Names(("NemotronHForCausalLM",), ()),
    "olmo": Names(
        ("OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"), ("olmo", "olmo2", "olmoe")
    ),
    "opt": Names(("OPTForCausalLM",), ()),
    "phi": Names(("PhiForCausalLM",), ("phi2",)),
    "phi3": Names(("Phi3ForCausalLM",), ("phi3",)),
    "qwen": Names(
        (
            "Qwen2ForCausalLM",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "SeedOssForCausalLM",
        ),
        ("qwen2", "qwen3", "seed_oss"),
    ),
    "qwen3_next": Names(
        (
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        (),
    ),
    "qwen_moe": Names(
        ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"), ("qwen2moe", "qwen3moe")
    ),
    "smollm3": Names(("SmolLM3ForCausalLM",), ("smollm3",)),
    "stablelm": Names(("StableLmForCausalLM", "StableLMEpochForCausalLM"), ("stablelm",)),
    "starcoder2": Names(("Starcoder2ForCausalLM",), ("starcoder2",)),
}
"""By the name of its module, which is imported when a model of it is read: the other three dozen are not needed."""

_BY_ARCHITECTURE = {name: family for family, names in FAMILIES.items() for name in names.architectures}
_BY_GGUF = {name: family for family, names in FAMILIES.items() for name in names.gguf_architectures}
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
    return tuple(sorted(RUNNABLE_ARCHITECTURES & _BY_ARCHITECTURE.keys()))


def runnable_gguf_architectures() -> tuple[str, ...]:
    return tuple(sorted(RUNNABLE_ARCHITECTURES & _BY_GGUF.keys()))


def from_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a config.json that the engine is to run; what it cannot is refused here, before loading."""
    return require_runnable(describe_config(config, generation_config), runnable_architectures())


def from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """The spec of a GGUF header that the engine is to run; what it cannot is refused here, before loading."""
    return require_runnable(describe_gguf(metadata, tensor_names), runnable_gguf_architectures())


def describe_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a Hugging Face config.json; generation_config.json adds its ends to the config's own."""
    if not isinstance(config, Mapping):
        raise CheckpointError("config.json is not an object", found=type(config).__name__)
    named = config.get("architectures")
    model_type = Fields(config, where="config.json").text("model_type", default="") or None
    if named:
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise Fields(config, where="config.json").wrong("architectures", "a list of names", named)
        names = list(named)
    else:
        names = ["(none named)" if model_type is None else _of_model_type(model_type)]
    for name in names:
        decoder = decoder_of(name)
        if decoder in _BY_ARCHITECTURE:
            _require_one_family(model_type, decoder)
            spec = _described(_BY_ARCHITECTURE[decoder], source_of_config(config, generation_config, decoder))
            if name == decoder:
                return spec
            from holdfast.models.families.classifier import with_classifier

            return with_classifier(spec, config, name)
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


def _require_one_family(model_type: str | None, architecture: str) -> None:
    """Servers go by the one or by the other: a config must not name two families. Unknown types are makers' own."""
    other = architecture if model_type is None else _of_model_type(model_type)
    family = _BY_ARCHITECTURE[architecture]
    if _BY_ARCHITECTURE.get(other, family) != family:
        raise CheckpointError(
            f"config.json names two families: architectures says {architecture}, model_type {shorten(model_type)}",
            needed=f"a model_type of the {family} family, as {architecture} says",
            found=shorten(model_type),
            fix="use the config.json that belongs to these weights",
            field="model_type",
        )


def _described(family: str, source: ModelDescription) -> ModelSpec:
    module = cast(Family, importlib.import_module(f"holdfast.models.families.{family}"))
    spec = module.describe(source)
    return replace(spec, unsupported=lacking(spec, source.fields))


def _unknown(name: str, known: tuple[str, ...], *, field: str) -> UnknownArchitectureError:
    shown = shorten(name)
    near = difflib.get_close_matches(shown, known, n=3)
    return UnknownArchitectureError(
        f"model architecture {shown} is not supported",
        needed=f"one of {len(known)} known ones" + (f", the closest: {', '.join(near)}" if near else ""),
        found=shown,
        fix="holdfast models lists those that run, and with --json all that can be planned; or use another server",
        field=field,
    )
