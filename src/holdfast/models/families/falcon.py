"""Falcon 7B, 40B, 180B and 11B: q, k and v in one matrix, attention and MLP side by side.

Falcon 3 is of the llama family.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.models.fields import MAX_HEADS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "falcon"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": "ffn_hidden_size",
    "layer_norm_eps": "layer_norm_epsilon",
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    fields = source.fields
    alibi = fields.boolean("alibi", default=False)
    hidden = fields.integer("hidden_size", high=1 << 22)
    shape = read_shape(
        source,
        inner=4 * hidden,
        tied=True,
        eps="layer_norm_eps",
        act="activation",
        act_default="gelu",
        max_position=None if source.gguf else 2048,
        rotary=0.0 if alibi else 1.0,
    )
    new = source.has_tensor("blk.0.attn_norm_2.weight") or fields.boolean("new_decoder_architecture", default=False)
    if not source.gguf and not new:
        many = not fields.boolean("multi_query", default=True)
        kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=shape.heads) if many else 1
        shape = replace(shape, kv_heads=kv_heads)
    norms = 2 if new and fields.integer("num_ln_in_parallel_attn", low=1, high=2, default=2) == 2 else 1
    bias = not source.gguf and fields.boolean("bias", default=False)
    parallel = source.gguf or new or fields.boolean("parallel_attn", default=True)
    tensors = TensorList("transformer.", "h")
    tensors.embed(shape, "word_embeddings")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        if norms == 2:
            block.norm("attn_norm", shape.hidden, "ln_attn", "attn_norm_2", bias=True)
            block.norm("mlp_norm", shape.hidden, "ln_mlp", "attn_norm", bias=True)
        else:
            block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
            if not parallel:
                block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", bias=True)
        rows, stem = shape.query + 2 * shape.key, "self_attention"
        block.linear("qkv", rows, shape.hidden, f"{stem}.query_key_value", "attn_qkv", axis=0, bias=bias)
        block.linear("o", shape.hidden, shape.query, f"{stem}.dense", "attn_output", axis=1, bias=bias)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=bias)
    tensors.end(shape, "ln_f", bias=True)
    features = ["norms with biases", "an MLP without a gate", "q, k and v in one matrix"]
    features += ["attention and MLP side by side"] if parallel else []
    features += ["ALiBi positions"] if alibi else []
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
