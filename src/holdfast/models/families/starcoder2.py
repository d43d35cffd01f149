"""StarCoder2: LayerNorm with biases, biases everywhere, an MLP without a gate, a window in all layers."""

from __future__ import annotations

from holdfast.models.fields import MAX_CONTEXT
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import DecoderSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "starcoder2"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"layer_norm_eps": "norm_epsilon"})
    shape = read_shape(
        source,
        kv_heads=None if source.gguf else 2,
        tied=True,
        eps="layer_norm_eps",
        act_default="gelu_pytorch_tanh",
        max_position=None if source.gguf else 4096,
        eps_default=1e-5,
    )
    bias = source.has_tensor("blk.0.attn_q.bias") if source.gguf else source.fields.boolean("use_bias", default=True)
    window = source.fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=0) or None
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.c_fc", "mlp.c_proj", bias=bias)
    tensors.end(shape, bias=True)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index in range(shape.layer_count)],
        tensors=tensors.found,
        decoder=DecoderSpec(norm="layer", mlp="plain"),
    )
