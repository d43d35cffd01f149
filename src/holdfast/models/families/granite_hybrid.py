"""Granite 4: Mamba-2 in most layers, attention in a few, a shared MLP in all, routed experts in some sizes."""

from __future__ import annotations

from holdfast.models.families.mamba import MambaShape, mamba_tensors
from holdfast.models.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "granite_hybrid"

_KINDS = ("mamba", "attention", "linear_attention", "full_attention")


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"})
    fields = source.fields
    rotates = fields.text("position_embedding_type", default="nope") == "rope"
    shape = read_shape(source, max_position=2048, rotary=1.0 if rotates else 0.0)
    kinds = fields.texts("layer_types", count=shape.layer_count, allowed=_KINDS)
    attends = [kind in ("attention", "full_attention") for kind in kinds or ("mamba",) * shape.layer_count]
    mamba = _mamba(source, shape.hidden)
    experts = _experts(source, shape.inner)
    shared = fields.integer("shared_intermediate_size", high=MAX_WIDTH, default=1024)
    bias = fields.boolean("attention_bias", default=False)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm")
        if attends[index]:
            block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        else:
            mamba_tensors(block, shape.hidden, mamba, "mamba")
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm")
        block.linear("shared.gate_up", 2 * shared, shape.hidden, "shared_mlp.input_linear", axis=0)
        block.linear("shared.down", shape.hidden, shared, "shared_mlp.output_linear", axis=1)
        if experts is not None:
            stem, count = "block_sparse_moe", experts.count
            block.router(count, shape.hidden, f"{stem}.router.layer")
            both = (count, 2 * shape.inner, shape.hidden)
            block.stacked("experts.gate_up", both, f"{stem}.input_linear.weight", axis=1)
            block.stacked("experts.down", (count, shape.hidden, shape.inner), f"{stem}.output_linear.weight", axis=2)
    tensors.end(shape)
    layers = [
        LayerSpec(
            index=index,
            attends=attends[index],
            state=None if attends[index] else mamba.state,
            intermediate_size=shared,
            experts=experts,
        )
        for index in range(shape.layer_count)
    ]
    features = ("scaled embeddings, residuals and logits", "gate and up in one matrix")
    return build_spec(source, shape, family=FAMILY, layers=layers, tensors=tensors.found, features=features)


def _experts(source: ModelDescription, inner: int) -> ExpertsSpec | None:
    count = source.fields.integer("num_experts", low=0, high=MAX_EXPERTS, default=8)
    if not count:
        return None
    used = source.fields.integer("num_experts_per_tok", high=count, default=min(2, count))
    return ExpertsSpec(count=count, per_token=used, intermediate_size=inner)


def _mamba(source: ModelDescription, hidden: int) -> MambaShape:
    fields = source.fields
    heads = fields.integer("mamba_n_heads", high=MAX_HEADS, default=128)
    inner = hidden * fields.integer("mamba_expand", high=64, default=2)
    given = (
        None
        if fields.raw("mamba_d_head") == "auto"
        else fields.integer("mamba_d_head", high=MAX_HEAD_DIM, default=None)
    )
    if inner % heads or (given is not None and given * heads != inner):
        raise fields.wrong("mamba_n_heads", f"heads that make up the {inner} of mamba_expand x hidden_size", heads)
    return MambaShape(
        heads=heads,
        head_dim=inner // heads,
        groups=fields.integer("mamba_n_groups", high=MAX_HEADS, default=1),
        state_size=fields.integer("mamba_d_state", high=MAX_WIDTH, default=256),
        kernel=fields.integer("mamba_d_conv", high=1024, default=4),
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        bias=fields.boolean("mamba_proj_bias", default=False),
    )
