"""gpt-oss 20b and 120b: every second layer a window of 128, attention sinks, biases everywhere, experts in mxfp4."""

from __future__ import annotations

from holdfast.models.fields import MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "gpt_oss"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(
        {"num_experts": ("num_local_experts", "num_experts"), "moe_intermediate_size": "intermediate_size"}
    )
    fields = source.fields
    shape = read_shape(
        source,
        kv_heads=None if source.gguf else 8,
        head_dim=64,
        max_position=None if source.gguf else 131_072,
        inner=None if not source.gguf else 1,
    )
    count = fields.integer("num_experts", high=MAX_EXPERTS)
    inner_name = "moe_intermediate_size" if source.gguf else "intermediate_size"
    experts = ExpertsSpec(
        count=count,
        per_token=fields.integer("num_experts_per_tok", high=count, default=min(4, count)),
        intermediate_size=fields.integer(inner_name, high=1 << 22, default=shape.inner),
    )
    bias = source.gguf or fields.boolean("attention_bias", default=True)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        block.add("sinks", (shape.heads,), "self_attn.sinks", "attn_sinks.weight", shard_axis=0)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "post_attention_norm")
        block.router(count, shape.hidden, "mlp.router", bias=True)
        _experts(block, shape.hidden, experts, gguf=source.gguf)
    tensors.end(shape)
    windows = read_windows(source, shape.layer_count, lambda index: index % 2 == 0, window=128)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window, experts=experts) for index, window in enumerate(windows)],
        tensors=tensors.found,
        features=("attention sinks", "clamped gates"),
    )


def _experts(block: LayerTensors, hidden: int, experts: ExpertsSpec, *, gguf: bool) -> None:
    count, inner = experts.count, experts.intermediate_size
    apart = [("gate", inner, hidden, 1), ("up", inner, hidden, 1)]
    for name, rows, columns, axis in [
        *(apart if gguf else [("gate_up", 2 * inner, hidden, 1)]),
        ("down", hidden, inner, 2),
    ]:
        # safetensors keep them [expert, in, out]; in mxfp4 as {name}_blocks and {name}_scales, [expert, out, in].
        block.stacked(
            f"experts.{name}",
            (count, rows, columns),
            f"mlp.experts.{name}_proj",
            f"ffn_{name}_exps",
            axis=axis,
            hf_shape=(count, columns, rows),
            alternating=name == "gate_up",
        )
        block.add(
            f"experts.{name}_bias",
            (count, rows),
            f"mlp.experts.{name}_proj_bias",
            f"ffn_{name}_exps.bias",
            experts=count,
            shard_axis=1 if axis == 1 else None,
        )
