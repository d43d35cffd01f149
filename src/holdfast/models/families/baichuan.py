"""Baichuan 1 and 2: llama's build with q, k and v in one matrix; the 13B has ALiBi positions."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "baichuan"

_ALIBI_FROM_HIDDEN = 5120
"""Its config does not say; the 13B is told by its width, as loaders do."""


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"max_position_embeddings": ("max_position_embeddings", "model_max_length")})
    shape = read_shape(source)
    alibi = shape.hidden >= _ALIBI_FROM_HIDDEN
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        if source.gguf:  # converters take it apart
            block.attention(shape, turned=not alibi)
        else:
            block.linear("qkv", 3 * shape.query, shape.hidden, "self_attn.W_pack", axis=0)
            block.linear("o", shape.hidden, shape.query, "self_attn.o_proj", axis=1)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.gated_mlp(shape.hidden, shape.inner)
    tensors.end(shape)
    features = ("q, k and v in one matrix", *(("ALiBi positions",) if alibi else ()))
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
