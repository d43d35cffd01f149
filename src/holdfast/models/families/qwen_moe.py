"""Qwen's mixtures of experts: 1.5-MoE and 2-57B (a shared expert), 3-30B-A3B, 3-235B, 3-Coder and 3-VL (none)."""

from __future__ import annotations

from holdfast.models.families.qwen import windows_if_used
from holdfast.models.families.qwen_vision import qwen_encoder, qwen_vision
from holdfast.models.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "qwen_moe"


WITH_VISION = "Qwen3VLMoeForConditionalGeneration"


def describe(source: ModelDescription) -> ModelSpec:
    whole, outer = source.architecture == WITH_VISION, source
    source = source.within("text_config") if whole else source
    source = source.called({"num_experts": ("num_experts", "num_local_experts")})
    third = source.architecture in ("Qwen3MoeForCausalLM", "qwen3moe", WITH_VISION)
    shape = read_shape(
        source,
        kv_heads=4 if third and not source.gguf else None,
        max_position=None if source.gguf else 32_768,
        inner=1 if source.gguf else None,
    )
    # llama.cpp's header does not say: it norms the third generation's weights and not those of the second.
    normalized = third if source.gguf else source.fields.boolean("norm_topk_prob", default=False)
    experts = read_experts(source, shared=not third, normalized=normalized)
    sparse = sparse_layers(source, shape.layer_count)
    bias = not third or source.fields.boolean("attention_bias", default=False)
    if source.gguf:
        bias = source.has_tensor("blk.0.attn_q.bias")
    elif not third:
        bias = source.fields.boolean("qkv_bias", default=True)
    tensors = TensorList("model.language_model." if whole else "model.")
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias and third)
        if third:
            block.norm("q_norm", shape.head_dim, "self_attn.q_norm", "attn_q_norm")
            block.norm("k_norm", shape.head_dim, "self_attn.k_norm", "attn_k_norm")
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        if sparse[index]:
            qwen_experts(block, shape.hidden, experts)
        else:
            block.gated_mlp(shape.hidden, shape.inner)
    tensors.end(shape)
    layers = [
        LayerSpec(index=index, window=window, experts=experts if sparse[index] else None)
        for index, window in enumerate(_windows(source, shape.layer_count, third))
    ]
    decoder = DecoderSpec(query_key_norm="head" if third else "none")
    found = [*tensors.found, *(qwen_vision(outer) if whole else ())]
    encoder = qwen_encoder(outer) if whole else None
    return build_spec(source, shape, family=FAMILY, layers=layers, tensors=found, decoder=decoder, encoder=encoder)


def _windows(source: ModelDescription, count: int, third: bool) -> tuple[int | None, ...]:
    """Where a window is used at all, all layers of the third generation have it, and of the second every other one of
    the first max_window_layers."""
    last = source.fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return windows_if_used(source, count, lambda index: third or (index % 2 == 0 and index < last))


def read_experts(source: ModelDescription, *, shared: bool, normalized: bool = True) -> ExpertsSpec:
    fields = source.fields
    count = fields.integer("num_experts", high=MAX_EXPERTS)
    return ExpertsSpec(
        count=count,
        per_token=fields.integer("num_experts_per_tok", high=count),
        intermediate_size=fields.integer("moe_intermediate_size", high=MAX_WIDTH),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH) if shared else 0,
        normalized=normalized,
    )


def sparse_layers(source: ModelDescription, count: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, but for those in mlp_only_layers."""
    step = source.fields.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = source.fields.integers("mlp_only_layers", low=0, high=count - 1, most=count) or ()
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


def qwen_experts(block: LayerTensors, hidden: int, experts: ExpertsSpec) -> None:
    block.router(experts.count, hidden, "mlp.gate")
    block.experts(experts.count, hidden, experts.intermediate_size, "mlp.experts", "gate_proj", "up_proj", "down_proj")
    if experts.shared_intermediate_size:
        block.shared_expert(hidden, experts.shared_intermediate_size, "mlp.shared_expert")
        # GGUF keeps the gate's one row as a vector; it is the same number of elements.
        block.add("shared.router", (1, hidden), "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight")
