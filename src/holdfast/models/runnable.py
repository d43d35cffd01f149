"""What this engine can run, and what it lacks for the rest, in words. Planning asks nothing of this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.errors import CheckpointError, ModelError, UnknownArchitectureError
from holdfast.models.fields import Fields
from holdfast.models.quantization import INSTEAD
from holdfast.models.spec import ExpertsSpec, ModelSpec

RUNNABLE_ARCHITECTURES = frozenset(
    (
        *("LlamaForCausalLM", "MistralForCausalLM", "llama"),
        *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM", "qwen2", "qwen3", "seed_oss"),
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "gemma", "gemma2", "gemma3"),
        *("Phi3ForCausalLM", "phi3"),
        *("Olmo2ForCausalLM", "olmo2"),
        *("GraniteForCausalLM", "granite"),
        *("SmolLM3ForCausalLM", "smollm3"),
        *("Starcoder2ForCausalLM", "starcoder2"),
        *("StableLmForCausalLM", "stablelm"),
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "qwen2moe", "qwen3moe"),
    )
)
"""Of config.json and of GGUF headers: those whose every difference from llama a spec can say, and tests have seen run.
"""
SUFFIX = "ForSequenceClassification"
"""Of the same decoders with a classification head."""
TEXT_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
"""Models that read images, and what their text model is alone: all that a GGUF file has of them."""
_SCALINGS = ("none", "linear", "llama3", "yarn")
_FAMILIES_WITH_EXPERTS = ("mixtral", "qwen_moe")
_EXPERT_COLUMNS = 8
"""Grouped products read rows in pieces of so many elements."""
_LONG_ROPE_FAMILIES = ("phi3",)
_PARTLY_ROTATING_FAMILIES = ("phi3", "stablelm")


def decoder_of(architecture: str) -> str:
    """The architecture that generates with the same decoder; the name itself where it has no such head."""
    return architecture.removesuffix(SUFFIX) + "ForCausalLM" if architecture.endswith(SUFFIX) else architecture


def lacking(spec: ModelSpec, fields: Fields) -> tuple[str, ...]:
    """Everything the engine has not got for this model; `fields` tells how its file spells them."""
    return tuple(dict.fromkeys((*_family(spec), *spec.features, *_memory(spec), *_settings(spec, fields))))


def _family(spec: ModelSpec) -> Iterator[str]:
    if TEXT_OF.get(spec.architecture, spec.architecture) not in RUNNABLE_ARCHITECTURES:
        yield f"a decoder of the {spec.family} family"


def _memory(spec: ModelSpec) -> Iterator[str]:
    for layer in spec.layers:
        if layer.experts is not None:
            yield from _experts(spec, layer.experts)
        if layer.latent is not None:
            yield "latent attention"
        if layer.state is not None:
            yield "recurrent layers"
        if layer.shares_kv_of is not None:
            yield "layers that share keys and values"
        if layer.chunked:
            yield "chunked attention"
        if layer.kv_heads is not None or layer.head_dim is not None or layer.intermediate_size is not None:
            yield "layers of different sizes"


def _experts(spec: ModelSpec, experts: ExpertsSpec) -> Iterator[str]:
    if spec.family not in _FAMILIES_WITH_EXPERTS:
        yield f"experts routed as in the {spec.family} family"
    if spec.activation == "gelu":
        yield "experts with an exact gelu"
    for width in (spec.hidden_size, experts.intermediate_size):
        if width % _EXPERT_COLUMNS:
            yield f"experts of {width} columns, which is not a multiple of {_EXPERT_COLUMNS}"


def _settings(spec: ModelSpec, fields: Fields) -> Iterator[str]:
    for scaling in (rope.scaling for rope in (spec.rope, *(layer.rope for layer in spec.layers)) if rope is not None):
        if scaling not in _SCALINGS and not (scaling == "longrope" and spec.family in _LONG_ROPE_FAMILIES):
            yield f"{fields.key('rope_scaling')}: {scaling}"
    yield from _long_rope(spec, fields)
    if spec.rope.dim != spec.head_dim and spec.family not in _PARTLY_ROTATING_FAMILIES:
        yield f"{fields.key('partial_rotary_factor')}: only {spec.rope.dim} of {spec.head_dim} dimensions rotate"
    elif spec.rope.dim == 0 or spec.rope.dim % 2:
        yield f"{fields.key('partial_rotary_factor')}: {spec.rope.dim} dimensions rotate, but they must rotate in pairs"
    if spec.quantization is not None:
        yield from (f"quantization_config: {what}" for what in spec.quantization.lacking)
    if any(tensor.part == "vision" for tensor in spec.tensors):
        yield "images"


def _long_rope(spec: ModelSpec, fields: Fields) -> Iterator[str]:
    held = {tensor.name for tensor in spec.tensors} & {"rope_freqs", "rope_freqs_long"}
    if spec.family in _LONG_ROPE_FAMILIES and len(held) == 1:
        there = "short" if "rope_freqs" in held else "long"
        yield f"{fields.key('rope_scaling')}: longrope with rope_factors_{there}.weight and not the other"
    if spec.rope.scaling != "longrope" or held:
        return
    for name, factors in (("short_factor", spec.rope.short_factors), ("long_factor", spec.rope.long_factors)):
        if len(factors) != spec.rope.dim // 2:
            needed = f"{spec.rope.dim // 2} of {name}"
            yield f"{fields.key('rope_scaling')}: longrope with {len(factors)} instead of {needed}"


def text_alone(spec: ModelSpec) -> ModelSpec:
    """The model without what reads images or sound; the same where it has none, or its text model is not told apart."""
    alone = TEXT_OF.get(spec.architecture)
    if alone is None:
        return spec
    tensors = tuple(tensor for tensor in spec.tensors if tensor.part == "text")
    text = replace(spec, architecture=alone, tensors=tensors, encoder=None)
    return replace(text, unsupported=lacking(text, Fields({}, where="config.json")))


def require_runnable(spec: ModelSpec, known: tuple[str, ...]) -> ModelSpec:
    """The same spec, or a refusal that names what is missing; `known`: architectures that could run."""
    if spec.runnable:
        return spec
    found = "; ".join(spec.unsupported)
    if decoder_of(spec.architecture) not in RUNNABLE_ARCHITECTURES:
        raise UnknownArchitectureError(
            f"model architecture {spec.architecture} is known, but this engine cannot run it yet",
            needed="one of " + ", ".join(known),
            found=f"{spec.architecture}, which needs {found}",
            fix="holdfast plan counts its memory; to run it, use another server for now",
            field="architectures",
        )
    raise _feature(spec, found)


def _feature(spec: ModelSpec, found: str) -> ModelError:
    return CheckpointError(
        f"this engine cannot run this {spec.architecture}: it lacks {found}",
        needed=f"a model of the {spec.family} family without that",
        found=found,
        field=spec.unsupported[0].partition(":")[0],
        fix=INSTEAD if spec.quantization is not None and spec.quantization.lacking else None,
    )
