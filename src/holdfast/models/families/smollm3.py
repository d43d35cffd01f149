"""SmolLM3: llama's tensors; every fourth layer does not rotate."""

from __future__ import annotations

from holdfast.models.families.llama import plain_tensors
from holdfast.models.fields import MAX_CONTEXT, MAX_LAYERS
from holdfast.models.source import ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import LayerSpec, ModelSpec

FAMILY = "smollm3"


def describe(source: ModelDescription) -> ModelSpec:
    fields = source.fields
    shape = read_shape(
        source,
        kv_heads=None if source.gguf else 4,
        tied=True,
        max_position=None if source.gguf else 32_768,
        theta=2e6,
    )
    bias = "qkvo" if fields.boolean("attention_bias", default=False) else ""
    mlp_bias = fields.boolean("mlp_bias", default=False)
    rotates = _rotating(source, shape.layer_count)
    windows: tuple[int | None, ...] = (None,) * shape.layer_count
    if fields.boolean("use_sliding_window", default=False):
        fields.integer("sliding_window", high=MAX_CONTEXT)
        windows = read_windows(source, shape.layer_count, lambda index: not rotates[index])
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window, rotates=rotates[index]) for index, window in enumerate(windows)],
        tensors=plain_tensors(source, shape, biases=bias, mlp_bias=mlp_bias).found,
    )


def _rotating(source: ModelDescription, count: int) -> list[bool]:
    """Whether each layer rotates. `no_rope_layers` has a one for those that do; GGUF says nothing."""
    step = source.fields.integer("no_rope_layer_interval", high=MAX_LAYERS, default=4)
    given = source.fields.integers("no_rope_layers", low=0, high=1, most=count)
    if given is None:
        return [(index + 1) % step != 0 for index in range(count)]
    if len(given) != count:
        raise source.fields.wrong("no_rope_layers", f"a one or a zero for each of {count} layers", len(given))
    return [bool(one) for one in given]
