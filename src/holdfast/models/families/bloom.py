"""BLOOM: ALiBi positions, a norm after the embedding, LayerNorm with biases."""

from __future__ import annotations

from holdfast.models.fields import MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "bloom"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embed"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_key_value_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "seq_length",
    "layer_norm_eps": "layer_norm_epsilon",
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    shape = read_shape(
        source,
        inner=4 * source.fields.integer("hidden_size", high=MAX_WIDTH),
        tied=True,
        eps="layer_norm_eps",
        act_default="gelu",
        max_position=None if source.gguf else 2048,
        rotary=0.0,
    )
    tensors = TensorList("transformer.", "h")
    tensors.embed(shape, "word_embeddings")
    tensors.norm("embed_norm", shape.hidden, "word_embeddings_layernorm", "token_embd_norm", bias=True)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        rows, stem = 3 * shape.query, "self_attention"
        block.linear("qkv", rows, shape.hidden, f"{stem}.query_key_value", "attn_qkv", axis=0, bias=True)
        block.linear("o", shape.hidden, shape.query, f"{stem}.dense", "attn_output", axis=1, bias=True)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)
    tensors.end(shape, "ln_f", bias=True)
    features = ("ALiBi positions", "norms with biases", "an MLP without a gate", "q, k and v in one matrix")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
