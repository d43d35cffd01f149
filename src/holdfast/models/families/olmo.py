"""OLMo 1 (norms without weights), 2 and 3 (norms after attention and MLP, and on whole queries and keys), OLMoE."""

from __future__ import annotations

from holdfast.models.fields import MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "olmo"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"moe_intermediate_size": "intermediate_size"})
    kind = source.architecture.removesuffix("ForCausalLM").lower()
    fields = source.fields
    eps = "layer_norm_eps" if kind == "olmo" and source.gguf else "rms_norm_eps"
    shape = read_shape(source, eps=eps, max_position=None if source.gguf else 2048, eps_default=1e-5)
    experts = None
    if kind == "olmoe":
        count = fields.integer("num_experts", high=MAX_EXPERTS)
        used = fields.integer("num_experts_per_tok", high=count)
        experts = ExpertsSpec(count=count, per_token=used, intermediate_size=shape.inner)
    bias = fields.boolean("attention_bias", default=False)
    after = kind in ("olmo2", "olmo3")
    tensors = TensorList(wide_norms=after)
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        if kind == "olmoe":
            block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias, turned=kind == "olmo")
        if kind != "olmo":
            block.norm("q_norm", shape.query, "self_attn.q_norm", "attn_q_norm")
            block.norm("k_norm", shape.key, "self_attn.k_norm", "attn_k_norm")
        if after:
            block.norm("post_attn_norm", shape.hidden, "post_attention_layernorm", "post_attention_norm")
            block.norm("post_mlp_norm", shape.hidden, "post_feedforward_layernorm", "post_ffw_norm")
        if experts is None:
            block.gated_mlp(shape.hidden, shape.inner)
        else:
            block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
            block.router(experts.count, shape.hidden, "mlp.gate")
            block.experts(experts.count, shape.hidden, shape.inner, "mlp.experts", "gate_proj", "up_proj", "down_proj")
    if kind == "olmo":
        tensors.head(shape)
    else:
        tensors.end(shape)
    windows: tuple[int | None, ...] = (None,) * shape.layer_count
    if kind == "olmo3" or (source.gguf and fields.has("sliding_window")):
        windows = read_windows(source, shape.layer_count, lambda index: (index + 1) % 4 != 0, window=4096)
    layers = [LayerSpec(index=index, window=window, experts=experts) for index, window in enumerate(windows)]
    # OLMo 3, which GGUF files call olmo2 too, rotates layers with a window in another way.
    third = kind == "olmo3" or any(window is not None for window in windows)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=layers,
        tensors=tensors.found,
        features=("norms without weights",) if kind == "olmo" else ("OLMo 3's rotations",) if third else (),
        decoder=DecoderSpec(norms="after" if after else "before", query_key_norm="none" if kind == "olmo" else "whole"),
    )
