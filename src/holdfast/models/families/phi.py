"""Phi 1, 1.5 and 2: LayerNorm with biases, attention and MLP side by side, part of each head rotates."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "phi"


def describe(source: ModelDescription) -> ModelSpec:
    shape = read_shape(
        source,
        eps="layer_norm_eps",
        act_default="gelu_new",
        max_position=None if source.gguf else 2048,
        rotary=0.5,
    )
    normed = source.fields.boolean("qk_layernorm", default=False)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        if source.has_tensor(f"blk.{index}.attn_qkv.weight"):
            rows = shape.query + 2 * shape.key
            block.linear("qkv", rows, shape.hidden, "", "attn_qkv", axis=0, bias=True)
            block.linear("o", shape.hidden, shape.query, "", "attn_output", axis=1, bias=True)
        else:
            block.attention(shape, bias="qkv", out="dense", out_bias=True)
        if normed:
            block.norm("q_norm", shape.head_dim, "self_attn.q_layernorm", bias=True)
            block.norm("k_norm", shape.head_dim, "self_attn.k_layernorm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.fc1", "mlp.fc2", bias=True)
    tensors.end(shape, "final_layernorm", bias=True, head_bias=True)
    features = ("norms with biases", "attention and MLP side by side", "an MLP without a gate")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
