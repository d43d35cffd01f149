"""Jamba: Mamba-1 in seven of eight layers, attention that does not rotate in the eighth, experts in every second."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.models.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec, StateSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "jamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Sizes of the Mamba-1 layers."""

    inner: int
    state_size: int
    kernel: int
    rank: int
    conv_bias: bool
    bias: bool

    @property
    def state(self) -> StateSpec:
        return StateSpec(
            recurrent_elements=self.inner * self.state_size, convolution_elements=self.inner * (self.kernel - 1)
        )


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"moe_intermediate_size": "intermediate_size"})
    fields = source.fields
    shape = read_shape(source, kv_heads=8, max_position=262_144, rotary=0.0)
    recurrence = _recurrence(source, shape.hidden)
    count = fields.integer("num_experts", high=MAX_EXPERTS, default=16)
    used = fields.integer("num_experts_per_tok", high=count, default=min(2, count))
    experts = ExpertsSpec(count=count, per_token=used, intermediate_size=shape.inner) if count > 1 else None
    attends = _every(source, "attn_layer", shape.layer_count, (8, 4))
    sparse = [found and experts is not None for found in _every(source, "expert_layer", shape.layer_count, (2, 1))]
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm")
        if attends[index]:
            block.attention(shape)
        else:
            _recurrent_tensors(block, shape.hidden, recurrence)
        block.norm("mlp_norm", shape.hidden, "pre_ff_layernorm")
        if sparse[index]:
            block.router(count, shape.hidden, "feed_forward.router")
            stem = "feed_forward.experts"
            block.experts(count, shape.hidden, shape.inner, stem, "gate_proj", "up_proj", "down_proj")
        else:
            block.gated_mlp(shape.hidden, shape.inner, "feed_forward")
    tensors.end(shape, "final_layernorm")
    layers = [
        LayerSpec(
            index=index,
            attends=attends[index],
            state=None if attends[index] else recurrence.state,
            experts=experts if sparse[index] else None,
        )
        for index in range(shape.layer_count)
    ]
    return build_spec(source, shape, family=FAMILY, layers=layers, tensors=tensors.found)


def _every(source: ModelDescription, name: str, count: int, default: tuple[int, int]) -> list[bool]:
    period = source.fields.integer(f"{name}_period", high=MAX_LAYERS, default=default[0])
    offset = source.fields.integer(f"{name}_offset", low=0, high=MAX_LAYERS, default=default[1])
    return [index % period == offset for index in range(count)]


def _recurrence(source: ModelDescription, hidden: int) -> Recurrence:
    fields = source.fields
    given = (
        None if fields.raw("mamba_dt_rank") == "auto" else fields.integer("mamba_dt_rank", high=MAX_WIDTH, default=None)
    )
    return Recurrence(
        inner=hidden * fields.integer("mamba_expand", high=64, default=2),
        state_size=fields.integer("mamba_d_state", high=MAX_WIDTH, default=16),
        kernel=fields.integer("mamba_d_conv", high=1024, default=4),
        rank=-(-hidden // 16) if given is None else given,
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        bias=fields.boolean("mamba_proj_bias", default=False),
    )


def _recurrent_tensors(block: LayerTensors, hidden: int, size: Recurrence) -> None:
    block.add("mamba.decay", (size.inner, size.state_size), "mamba.A_log", shard_axis=0)
    block.add("mamba.skip", (size.inner,), "mamba.D", shard_axis=0)
    block.add("mamba.conv", (size.inner, 1, size.kernel), "mamba.conv1d.weight", shard_axis=0)
    if size.conv_bias:
        block.add("mamba.conv_bias", (size.inner,), "mamba.conv1d.bias", shard_axis=0)
    block.linear("mamba.in", 2 * size.inner, hidden, "mamba.in_proj", axis=0, bias=size.bias)
    block.linear("mamba.x", size.rank + 2 * size.state_size, size.inner, "mamba.x_proj", axis=1)
    block.linear("mamba.dt", size.inner, size.rank, "mamba.dt_proj", axis=0, bias=True)
    block.linear("mamba.out", hidden, size.inner, "mamba.out_proj", axis=1, bias=size.bias)
    for name, width in (("dt", size.rank), ("b", size.state_size), ("c", size.state_size)):
        block.norm(f"mamba.{name}_norm", width, f"mamba.{name}_layernorm")
