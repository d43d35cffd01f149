"""OPT: learned positions, LayerNorm with biases, ReLU. llama.cpp does not have it."""

from __future__ import annotations

from holdfast.models.fields import MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "opt"

_POSITION_OFFSET = 2
"""The table of positions begins with two rows that are never looked up."""


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"intermediate_size": "ffn_dim", "num_key_value_heads": "num_attention_heads"})
    fields = source.fields
    shape = read_shape(source, tied=True, act=None, max_position=2048, rotary=0.0)
    width = fields.integer("word_embed_proj_dim", high=MAX_WIDTH, default=shape.hidden)
    bias = fields.boolean("enable_bias", default=True)
    stem = "model.decoder."
    tensors = TensorList(stem)
    tensors.add("embed", (shape.vocab, width), f"{stem}embed_tokens.weight", shard_axis=0)
    tensors.add("positions", (shape.max_position + _POSITION_OFFSET, shape.hidden), f"{stem}embed_positions.weight")
    if width != shape.hidden:
        tensors.add("embed_in", (shape.hidden, width), f"{stem}project_in.weight", linear=True)
        tensors.add("embed_out", (width, shape.hidden), f"{stem}project_out.weight", linear=True)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.attention(shape, bias="qkv" if bias else "", out="out_proj", out_bias=bias)
        block.norm("attn_norm", shape.hidden, "self_attn_layer_norm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "fc1", "fc2", bias=bias)
        block.norm("mlp_norm", shape.hidden, "final_layer_norm", bias=True)
    if fields.boolean("do_layer_norm_before", default=True) and not fields.boolean(
        "_remove_final_layer_norm", default=False
    ):
        tensors.norm("final_norm", shape.hidden, "final_layer_norm", bias=True)
    if not shape.tied:
        tensors.add("head", (shape.vocab, width), "lm_head.weight", shard_axis=0, linear=True)
    features = ("learned positions", "norms with biases", "an MLP without a gate", "ReLU")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
