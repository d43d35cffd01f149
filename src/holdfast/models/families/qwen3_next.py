"""Qwen3-Next and Qwen3.5: three of four layers keep a recurrent state (gated delta rule), every fourth attends.

Next has experts in all layers; 3.5 is dense or a mixture, and published with a vision tower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.models.families.qwen_moe import qwen_experts, read_experts, sparse_layers
from holdfast.models.families.qwen_vision import qwen_encoder, qwen_vision
from holdfast.models.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec, StateSpec, TensorSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "qwen3_next"


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of the recurrent layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """What the short convolution runs over: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> StateSpec:
        return StateSpec(
            recurrent_elements=self.value_heads * self.key_dim * self.value_dim,
            convolution_elements=self.channels * (self.kernel - 1),
        )


def describe(source: ModelDescription) -> ModelSpec:
    whole, outer = source.architecture.endswith("ForConditionalGeneration"), source
    source = source.within("text_config") if whole else source
    shape = read_shape(source, head_dim=256, inner=1, max_position=32_768, rotary=0.25)
    dense = source.architecture.startswith("Qwen3_5For")
    if dense:
        shape = replace(shape, inner=source.fields.integer("intermediate_size", high=MAX_WIDTH))
    experts, delta = None if dense else read_experts(source, shared=True), _delta(source)
    sparse = [not dense and found for found in sparse_layers(source, shape.layer_count)]
    attends = _attending(source, shape.layer_count)
    bias = source.fields.boolean("attention_bias", default=False)
    fused = source.architecture == "Qwen3NextForCausalLM"
    tensors = TensorList("model.language_model." if whole else "model.")
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm")
        if attends[index]:
            _attention(block, shape, bias=bias)
        else:
            _delta_tensors(block, shape.hidden, delta, fused=fused)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm")
        if experts is not None and sparse[index]:
            qwen_experts(block, shape.hidden, experts)
        else:
            block.gated_mlp(shape.hidden, shape.inner)
    tensors.end(shape)
    layers = [
        LayerSpec(
            index=index,
            attends=attends[index],
            state=None if attends[index] else delta.state,
            experts=experts if sparse[index] else None,
        )
        for index in range(shape.layer_count)
    ]
    features = ("norms on queries and keys", "gated attention", "gated delta rule")
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=layers,
        tensors=[*tensors.found, *_draft(source, shape, experts, bias=bias), *(qwen_vision(outer) if whole else ())],
        features=features,
        encoder=qwen_encoder(outer) if whole else None,
    )


def _attention(block: LayerTensors, shape: DecoderShape, *, bias: bool) -> None:
    # The query's product gives the output gate as well.
    block.linear("q", 2 * shape.query, shape.hidden, "self_attn.q_proj", axis=0, bias=bias)
    block.linear("k", shape.key, shape.hidden, "self_attn.k_proj", axis=0, bias=bias)
    block.linear("v", shape.key, shape.hidden, "self_attn.v_proj", axis=0, bias=bias)
    block.linear("o", shape.hidden, shape.query, "self_attn.o_proj", axis=1, bias=bias)
    block.norm("q_norm", shape.head_dim, "self_attn.q_norm")
    block.norm("k_norm", shape.head_dim, "self_attn.k_norm")


def _draft(
    source: ModelDescription, shape: DecoderShape, experts: ExpertsSpec | None, *, bias: bool
) -> list[TensorSpec]:
    """Layers for multi-token prediction, which attend: one in every published checkpoint, though Next's config does
    not say so. Embedding and head are the model's."""
    if source.gguf:  # converters leave them out
        return []
    tensors = TensorList("mtp.", part="draft")
    for number in range(source.fields.integer("mtp_num_hidden_layers", low=0, high=64, default=1)):
        block = tensors.draft_block(number, number)
        if number == 0:
            tensors.add("draft.0.join", (shape.hidden, 2 * shape.hidden), "mtp.fc.weight")
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                tensors.add(f"draft.0.{name}", (shape.hidden,), f"mtp.{name}.weight")
        block.norm("attn_norm", shape.hidden, "input_layernorm")
        _attention(block, shape, bias=bias)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm")
        if experts is not None:
            qwen_experts(block, shape.hidden, experts)
        else:
            block.gated_mlp(shape.hidden, shape.inner)
    return tensors.found


def _delta(source: ModelDescription) -> DeltaShape:
    fields = source.fields
    key_heads = fields.integer("linear_num_key_heads", high=MAX_HEADS, default=16)
    value_heads = fields.integer("linear_num_value_heads", high=MAX_HEADS, default=32)
    if value_heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of the {key_heads} key heads", value_heads)
    return DeltaShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", high=MAX_HEAD_DIM, default=128),
        value_dim=fields.integer("linear_value_head_dim", high=MAX_HEAD_DIM, default=128),
        kernel=fields.integer("linear_conv_kernel_dim", high=1024, default=4),
    )


def _attending(source: ModelDescription, count: int) -> list[bool]:
    kinds = source.fields.texts("layer_types", count=count, allowed=("full_attention", "linear_attention"))
    if kinds is not None:
        return [kind == "full_attention" for kind in kinds]
    step = source.fields.integer("full_attention_interval", high=MAX_LAYERS, default=4)
    return [(index + 1) % step == 0 for index in range(count)]


def _delta_tensors(block: LayerTensors, hidden: int, delta: DeltaShape, *, fused: bool) -> None:
    values = delta.value_heads * delta.value_dim
    block.add("delta.conv", (delta.channels, 1, delta.kernel), "linear_attn.conv1d.weight", shard_axis=0)
    block.add("delta.dt_bias", (delta.value_heads,), "linear_attn.dt_bias", shard_axis=0)
    block.add("delta.decay", (delta.value_heads,), "linear_attn.A_log", shard_axis=0)
    if fused:
        block.linear("delta.qkvz", delta.channels + values, hidden, "linear_attn.in_proj_qkvz", axis=0)
        block.linear("delta.ba", 2 * delta.value_heads, hidden, "linear_attn.in_proj_ba", axis=0)
    else:
        block.linear("delta.qkv", delta.channels, hidden, "linear_attn.in_proj_qkv", axis=0)
        block.linear("delta.z", values, hidden, "linear_attn.in_proj_z", axis=0)
        block.linear("delta.b", delta.value_heads, hidden, "linear_attn.in_proj_b", axis=0)
        block.linear("delta.a", delta.value_heads, hidden, "linear_attn.in_proj_a", axis=0)
    block.norm("delta.norm", delta.value_dim, "linear_attn.norm")
    block.linear("delta.out", hidden, values, "linear_attn.out_proj", axis=1)
