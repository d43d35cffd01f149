"""Phi 3, 3.5, 4 and 4-mini: q, k and v in one matrix, gate and up in one, rotations that long contexts stretch."""

from __future__ import annotations

from dataclasses import replace

from holdfast.models.fields import MAX_CONTEXT
from holdfast.models.rope import long_magnitude
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import LayerSpec, ModelSpec, RopeSpec
from holdfast.models.tensors import TensorList

FAMILY = "phi3"


def describe(source: ModelDescription) -> ModelSpec:
    shape = read_shape(source, max_position=None if source.gguf else 4096, eps_default=1e-5)
    if source.has_tensor("rope_factors_long.weight"):
        shape = replace(shape, rope=_long_rope(source, shape))
    window = source.fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=0) or None
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.linear("qkv", shape.query + 2 * shape.key, shape.hidden, "self_attn.qkv_proj", "attn_qkv", axis=0)
        block.linear("o", shape.hidden, shape.query, "self_attn.o_proj", "attn_output", axis=1)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.linear("gate_up", 2 * shape.inner, shape.hidden, "mlp.gate_up_proj", "ffn_up", axis=0)
        block.linear("down", shape.hidden, shape.inner, "mlp.down_proj", "ffn_down", axis=1)
    tensors.end(shape)
    for name, stored in (("rope_freqs", "rope_factors_short"), ("rope_freqs_long", "rope_factors_long")):
        if source.has_tensor(f"{stored}.weight"):
            tensors.add(name, (shape.rope.dim // 2,), "", f"{stored}.weight", optional=True)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index in range(shape.layer_count)],
        tensors=tensors.found,
    )


def _long_rope(source: ModelDescription, shape: DecoderShape) -> RopeSpec:
    """GGUF has the factors as tensors, and says no more of the scaling than what it multiplies."""
    fields = source.fields
    original = fields.integer(
        "rope.scaling.original_context_length", low=2, high=MAX_CONTEXT, default=shape.max_position
    )
    factor = shape.max_position / original
    return replace(
        shape.rope,
        scaling="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=fields.number(
            "rope.scaling.attn_factor", low=1e-3, high=1e3, default=long_magnitude(factor, original)
        ),
    )
