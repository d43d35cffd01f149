"""The llama family: Llama 1 to 3.3, SmolLM, Yi, Mistral. The plain decoder that the engine runs.

Knows the names and shapes of its tensors; not where files lie, nor how anything is computed.
"""

from __future__ import annotations

from holdfast.models.families import mixtral
from holdfast.models.fields import MAX_CONTEXT, MAX_EXPERTS
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList, gguf_biases

FAMILY = "llama"


def describe(source: ModelDescription) -> ModelSpec:
    fields = source.fields
    if source.gguf and fields.integer("num_experts", low=0, high=MAX_EXPERTS, default=0):
        return mixtral.describe(source)  # llama.cpp keeps both under one name
    mistral = source.architecture == "MistralForCausalLM"
    shape = read_shape(source, kv_heads=8 if mistral else None, max_position=_context(source, mistral))
    window = _window(source, mistral)
    mlp_bias = source.has_tensor("blk.0.ffn_up.bias") or (not mistral and fields.boolean("mlp_bias", default=False))
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index in range(shape.layer_count)],
        tensors=plain_tensors(source, shape, biases=_biases(source, mistral), mlp_bias=mlp_bias).found,
    )


def plain_tensors(
    source: ModelDescription, shape: DecoderShape, *, biases: str = "", mlp_bias: bool = False, outer: str = ""
) -> TensorList:
    """What the whole family has; `biases`: which of q, k, v and o have one; `outer` stands before every name."""
    tensors = TensorList(f"{outer}model.")
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias=biases, out_bias="o" in biases, turned=True)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.gated_mlp(shape.hidden, shape.inner, bias=mlp_bias)
    tensors.end(shape, head=f"{outer}lm_head")
    tensors.rope_freqs(source, shape)
    return tensors


def _context(source: ModelDescription, mistral: bool) -> int | None:
    if source.gguf:
        return None
    return 131_072 if mistral else 2048


def _window(source: ModelDescription, mistral: bool) -> int | None:
    fields = source.fields
    if source.gguf:
        return fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=0) or None
    if not mistral:
        return None
    default = None if "sliding_window" in fields.values else 4096
    return fields.integer("sliding_window", high=MAX_CONTEXT, default=default)


def _biases(source: ModelDescription, mistral: bool) -> str:
    if source.gguf:
        return gguf_biases(source)
    return "qkvo" if not mistral and source.fields.boolean("attention_bias", default=False) else ""
