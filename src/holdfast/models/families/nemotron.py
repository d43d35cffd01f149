"""Nemotron 3 and 4, Minitron: LayerNorm with biases, squared ReLU without a gate, half of each head rotates."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "nemotron"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(
        {"layer_norm_eps": "norm_eps", "partial_rotary_factor": ("partial_rotary_factor", "rope_percent")}
    )
    shape = read_shape(source, eps="layer_norm_eps", act=None, max_position=None if source.gguf else 4096, rotary=0.5)
    bias, mlp_bias = (source.fields.boolean(name, default=False) for name in ("attention_bias", "mlp_bias"))
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.up_proj", "mlp.down_proj", bias=mlp_bias)
    tensors.end(shape, bias=True)
    features = ("norms with biases", "an MLP without a gate", "squared ReLU")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
