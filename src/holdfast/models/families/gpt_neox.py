"""GPT-NeoX 20B and Pythia: LayerNorm with biases, q, k and v in one matrix, part of each head rotates."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "gpt_neox"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "num_key_value_heads": "num_attention_heads",
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "rope_theta": ("rope_theta", "rotary_emb_base"),
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    shape = read_shape(
        source, eps="layer_norm_eps", act_default="gelu", max_position=None if source.gguf else 2048, rotary=0.25
    )
    bias = source.fields.boolean("attention_bias", default=True)
    tensors = TensorList("gpt_neox.")
    tensors.embed(shape, "embed_in")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=True)
        block.linear("qkv", 3 * shape.query, shape.hidden, "attention.query_key_value", "attn_qkv", axis=0, bias=bias)
        block.linear("o", shape.hidden, shape.query, "attention.dense", "attn_output", axis=1, bias=bias)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True)
    tensors.end(shape, "final_layer_norm", bias=True, head="embed_out")
    features = ("norms with biases", "an MLP without a gate", "q, k and v in one matrix")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
