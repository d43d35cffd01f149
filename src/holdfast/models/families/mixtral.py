"""Mixtral, and Phi-3.5-MoE that is built alike: Mistral's attention over routed experts."""

from __future__ import annotations

from holdfast.models.fields import MAX_CONTEXT, MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList, gguf_biases

FAMILY = "mixtral"


def describe(source: ModelDescription) -> ModelSpec:
    """A GGUF of architecture llama comes here too, by way of the llama family, when it has experts."""
    source = source.called({"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"})
    fields = source.fields
    phi = source.architecture.lower().startswith("phimoe")
    shape = read_shape(
        source,
        kv_heads=None if source.gguf else 8,
        max_position=None if source.gguf else 131_072,
        theta=10_000.0 if source.gguf else 1e6,
        eps_default=1e-5,
    )
    count = fields.integer("num_experts", high=MAX_EXPERTS, default=None if source.gguf else 16 if phi else 8)
    if count is None:
        raise fields.wrong("num_experts", f"a whole number from 1 to {MAX_EXPERTS}", "nothing: the field is missing")
    used = fields.integer("num_experts_per_tok", high=count, default=2)
    window = fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=0) or None
    biases = "qkvo" if phi and fields.boolean("attention_bias", default=False) else gguf_biases(source)
    head_bias = phi and (source.has_tensor("output.bias") or fields.boolean("lm_head_bias", default=False))
    experts = ExpertsSpec(count=count, per_token=used, intermediate_size=shape.inner)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=phi)
        block.attention(shape, bias=biases, out_bias="o" in biases, turned=not phi)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=phi)
        block.router(count, shape.hidden, "block_sparse_moe.gate")
        block.experts(count, shape.hidden, shape.inner, "block_sparse_moe.experts", "w1", "w3", "w2")
    tensors.end(shape, bias=phi, head_bias=head_bias)
    tensors.rope_freqs(source, shape)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window, experts=experts) for index in range(shape.layer_count)],
        tensors=tensors.found,
        features=("norms with biases",) if phi else (),
    )
