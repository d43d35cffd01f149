"""ChatGLM 2 and 3, and GLM-4-9B in its first form: q, k and v in one matrix, gate and up in one, few KV heads."""

from __future__ import annotations

from holdfast.models.fields import MAX_HEADS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "chatglm"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "padded_vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "max_position_embeddings": "seq_length",
    "num_key_value_heads": "multi_query_group_num",
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    fields = source.fields
    if not source.gguf and not fields.boolean("multi_query_attention", default=False):
        source = source.called({"num_key_value_heads": "num_attention_heads"})
        fields.integer("num_attention_heads", high=MAX_HEADS)
    shape = read_shape(source, act=None, rotary=0.5)
    bias = not source.gguf and fields.boolean("add_bias_linear", default=False)
    qkv_bias = source.has_tensor("blk.0.attn_qkv.bias") or bias or fields.boolean("add_qkv_bias", default=False)
    tensors = TensorList("transformer.encoder.")
    embed = "transformer.embedding.word_embeddings.weight"
    tensors.add("embed", (shape.vocab, shape.hidden), embed, "token_embd.weight", shard_axis=0)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        stem = "self_attention"
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        rows = shape.query + 2 * shape.key
        block.linear("qkv", rows, shape.hidden, f"{stem}.query_key_value", "attn_qkv", axis=0, bias=qkv_bias)
        block.linear("o", shape.hidden, shape.query, f"{stem}.dense", "attn_output", axis=1, bias=bias)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.linear("gate_up", 2 * shape.inner, shape.hidden, "mlp.dense_h_to_4h", "ffn_up", axis=0, bias=bias)
        block.linear("down", shape.hidden, shape.inner, "mlp.dense_4h_to_h", "ffn_down", axis=1, bias=bias)
    tensors.end(shape, "final_layernorm", head="transformer.output_layer")
    features = ("q, k and v in one matrix", "gate and up in one matrix")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
