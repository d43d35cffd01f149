"""DBRX: 16 fine-grained experts kept in one matrix each way, q, k and v in one, LayerNorm without biases."""

from __future__ import annotations

from holdfast.models.fields import MAX_EXPERTS, MAX_WIDTH, Fields
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "dbrx"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "num_key_value_heads": "attn_config.kv_n_heads",
    "intermediate_size": "ffn_config.ffn_hidden_size",
    "num_experts": "ffn_config.moe_num_experts",
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    ffn, kv_heads, inner = source.fields, None, None
    if not source.gguf:
        empty = Fields({}, where="config.json")
        ffn = source.fields.table("ffn_config") or empty
        attention = source.fields.table("attn_config") or empty
        kv_heads = attention.integer("kv_n_heads", high=1 << 16, default=1)
        inner = ffn.integer("ffn_hidden_size", high=MAX_WIDTH, default=3584)
    shape = read_shape(
        source, eps="layer_norm_eps" if source.gguf else "rms_norm_eps", act=None, kv_heads=kv_heads, inner=inner
    )
    count = ffn.integer("num_experts" if source.gguf else "moe_num_experts", high=MAX_EXPERTS, default=4)
    used = ffn.integer("num_experts_per_tok" if source.gguf else "moe_top_k", high=count, default=1)
    experts = ExpertsSpec(count=count, per_token=used, intermediate_size=shape.inner)
    tensors = TensorList("transformer.", "blocks")
    tensors.embed(shape, "wte")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        stem = "norm_attn_norm"
        block.norm("attn_norm", shape.hidden, f"{stem}.norm_1", "attn_norm")
        block.linear("qkv", shape.query + 2 * shape.key, shape.hidden, f"{stem}.attn.Wqkv", "attn_qkv", axis=0)
        block.linear("o", shape.hidden, shape.query, f"{stem}.attn.out_proj", "attn_output", axis=1)
        block.norm("mlp_norm", shape.hidden, f"{stem}.norm_2", "attn_output_norm")
        block.router(count, shape.hidden, "ffn.router.layer")
        flat = (count * shape.inner, shape.hidden)
        wide, tall = (count, shape.inner, shape.hidden), (count, shape.hidden, shape.inner)
        block.stacked("experts.gate", wide, "ffn.experts.mlp.w1", "ffn_gate_exps", axis=1, hf_shape=flat)
        block.stacked("experts.up", wide, "ffn.experts.mlp.v1", "ffn_up_exps", axis=1, hf_shape=flat)
        block.stacked("experts.down", tall, "ffn.experts.mlp.w2", "ffn_down_exps", axis=2, hf_shape=flat)
    tensors.end(shape, "norm_f")
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, experts=experts) for index in range(shape.layer_count)],
        tensors=tensors.found,
        features=("LayerNorm", "q, k and v in one matrix", "clipped q, k and v"),
    )
