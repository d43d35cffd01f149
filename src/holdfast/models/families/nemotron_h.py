"""Nemotron-H and Nemotron 3 Nano: each layer is one part, Mamba-2, attention, an MLP or experts; nothing rotates."""

from __future__ import annotations

from holdfast.models.families.deepseek import read_shared_experts
from holdfast.models.families.mamba import MambaShape, mamba_tensors
from holdfast.models.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "nemotron_h"

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NAMES: dict[str, str | tuple[str, ...]] = {
    "num_experts": "n_routed_experts",
    "rms_norm_eps": ("layer_norm_epsilon", "norm_eps"),
    "layer_types": ("layers_block_type", "layer_types"),
}


def describe(source: ModelDescription) -> ModelSpec:
    kinds = _kinds(source.called(_NAMES))
    # The list of kinds says how many layers there are; newer configs have no other count.
    counted = {**source.fields.values, "num_hidden_layers": len(kinds)}
    source = source.called(_NAMES).holding(counted)
    shape = read_shape(source, act=None, head_dim=128, inner=1, max_position=4096, rotary=0.0)
    mamba, experts = _mamba(source), _experts(source) if "moe" in kinds else None
    tensors = TensorList("backbone.")
    tensors.embed(shape, "embeddings")
    for index, kind in enumerate(kinds):
        block = tensors.block(index)
        block.norm("norm", shape.hidden, "norm")
        _mixer(block, source, shape, kind, mamba, experts)
    tensors.end(shape, "norm_f")
    layers = [
        LayerSpec(
            index=index,
            attends=kind == "full_attention",
            state=mamba.state if kind == "linear_attention" else None,
            experts=experts if kind == "moe" else None,
        )
        for index, kind in enumerate(kinds)
    ]
    features = ("layers of one part each", "squared ReLU", "an MLP without a gate")
    return build_spec(source, shape, family=FAMILY, layers=layers, tensors=tensors.found, features=features)


def _kinds(source: ModelDescription) -> tuple[str, ...]:
    fields = source.fields
    listed = fields.raw("layer_types")
    if listed is not None:
        count = len(listed) if isinstance(listed, list) and 0 < len(listed) <= MAX_LAYERS else 1
        return fields.texts("layer_types", count=count, allowed=tuple(_LETTERS.values())) or ()
    pattern = fields.text("hybrid_override_pattern")
    if not 0 < len(pattern) <= MAX_LAYERS or not set(pattern) <= set(_LETTERS):
        raise fields.wrong("hybrid_override_pattern", "a letter M, *, - or E for each layer", pattern)
    if fields.integer("num_hidden_layers", high=MAX_LAYERS, default=len(pattern)) != len(pattern):
        raise fields.wrong("num_hidden_layers", f"the {len(pattern)} of hybrid_override_pattern", "another")
    return tuple(_LETTERS[letter] for letter in pattern)


def _mamba(source: ModelDescription) -> MambaShape:
    fields = source.fields
    return MambaShape(
        heads=fields.integer("mamba_num_heads", high=MAX_HEADS),
        head_dim=fields.integer("mamba_head_dim", high=MAX_HEAD_DIM),
        groups=fields.integer("n_groups", high=MAX_HEADS, default=8),
        state_size=fields.integer("ssm_state_size", high=MAX_WIDTH, default=128),
        kernel=fields.integer("conv_kernel", high=1024, default=4),
        conv_bias=fields.boolean("use_conv_bias", default=True),
        bias=fields.boolean("mamba_proj_bias", default=False),
    )


def _experts(source: ModelDescription) -> ExpertsSpec:
    routed = read_shared_experts(source)
    if routed is None:
        raise source.fields.wrong("num_experts", "at least 1: there are layers of experts", "none")
    shared = source.fields.integer("moe_shared_expert_intermediate_size", high=MAX_WIDTH)
    return ExpertsSpec(
        count=routed.count,
        per_token=routed.per_token,
        intermediate_size=routed.intermediate_size,
        shared_intermediate_size=shared,
    )


def _mixer(
    block: LayerTensors,
    source: ModelDescription,
    shape: DecoderShape,
    kind: str,
    mamba: MambaShape,
    experts: ExpertsSpec | None,
) -> None:
    if kind == "linear_attention":
        mamba_tensors(block, shape.hidden, mamba, "mixer")
    elif kind == "full_attention":
        bias = source.fields.boolean("attention_bias", default=False)
        block.attention(shape, "mixer", bias="qkv" if bias else "", out_bias=bias)
    elif experts is None or kind == "mlp":
        bias = source.fields.boolean("mlp_bias", default=False)
        inner = source.fields.integer("intermediate_size", high=MAX_WIDTH)
        block.plain_mlp(shape.hidden, inner, "mixer.up_proj", "mixer.down_proj", bias=bias)
    else:
        hidden, inner, count = shape.hidden, experts.intermediate_size, experts.count
        block.router(count, hidden, "mixer.gate")
        block.add("router_correction", (count,), "mixer.gate.e_score_correction_bias")
        stem = "mixer.experts.{expert}"
        block.stacked("experts.up", (count, inner, hidden), f"{stem}.up_proj.weight", axis=1)
        block.stacked("experts.down", (count, hidden, inner), f"{stem}.down_proj.weight", axis=2)
        wide = experts.shared_intermediate_size
        block.linear("shared.up", wide, hidden, "mixer.shared_experts.up_proj", axis=0)
        block.linear("shared.down", hidden, wide, "mixer.shared_experts.down_proj", axis=1)
