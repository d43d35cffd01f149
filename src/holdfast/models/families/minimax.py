"""MiniMax-M2: routed experts in every layer, norms over whole queries and keys."""

from __future__ import annotations

from holdfast.models.fields import MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "minimax"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"})
    fields = source.fields
    shape = read_shape(
        source,
        kv_heads=None if source.gguf else 8,
        head_dim=None if source.gguf else 128,
        max_position=None if source.gguf else 196_608,
        inner=1 if source.gguf else None,
        rotary=0.5,
    )
    count = fields.integer("num_experts", high=MAX_EXPERTS)
    inner = fields.integer("moe_intermediate_size", high=1 << 22) if source.gguf else shape.inner
    used = fields.integer("num_experts_per_tok", high=count)
    experts = ExpertsSpec(count=count, per_token=used, intermediate_size=inner)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape)
        block.norm("q_norm", shape.query, "self_attn.q_norm", "attn_q_norm")
        block.norm("k_norm", shape.key, "self_attn.k_norm", "attn_k_norm")
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.router(count, shape.hidden, "block_sparse_moe.gate")
        correction = "block_sparse_moe.e_score_correction_bias"
        block.add("router_correction", (count,), correction, "exp_probs_b.bias")
        block.experts(count, shape.hidden, inner, "block_sparse_moe.experts", "w1", "w3", "w2")
    tensors.end(shape)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, experts=experts) for index in range(shape.layer_count)],
        tensors=tensors.found,
        features=("norms on queries and keys",),
    )
