"""SmolLM3: llama's tensors; every fourth layer does not rotate."""

from __future__ import annotations

from holdfast.models.families.llama import plain_tensors
from holdfast.models.fields import MAX_CONTEXT
from holdfast.models.source import Source, build_spec, read_shape, read_windows
from holdfast.models.spec import LayerSpec, ModelSpec

FAMILY = "smollm3"


def describe(source: Source) -> ModelSpec:
    fields = source.fields
    shape = read_shape(
        source, kv_heads=None if source.gguf else 4, tied=True, max_position=None if source.gguf else 32_768
    )
    bias = "qkvo" if fields.boolean("attention_bias", default=False) else ""
    mlp_bias = fields.boolean("mlp_bias", default=False)
    windows: tuple[int | None, ...] = (None,) * shape.layer_count
    if fields.boolean("use_sliding_window", default=False):
        fields.integer("sliding_window", high=MAX_CONTEXT)
        windows = read_windows(source, shape.layer_count, lambda _: True)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index, window in enumerate(windows)],
        tensors=plain_tensors(source, shape, biases=bias, mlp_bias=mlp_bias).found,
        features=("layers without rotary positions",),
    )
