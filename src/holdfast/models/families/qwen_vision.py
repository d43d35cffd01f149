"""The vision towers of Qwen2.5-VL, and of Qwen3-VL and Qwen3.5: their tensors and largest image, for counting only.
Ranks share their matrices."""

from __future__ import annotations

from holdfast.models.fields import MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.source import ModelDescription
from holdfast.models.spec import EncoderSpec, TensorSpec
from holdfast.models.tensors import TensorList

STEM, OLDER_STEM = "model.visual.", "visual."
LARGEST_IMAGE_PIXELS = 2**24
"""longest_edge of the preprocessor_config.json that these models are published with; config.json does not say it.
vLLM tries an image of that size when it starts: 16,384 tokens, as its logs print."""
OLDER_LARGEST_IMAGE_PIXELS = 16_384 * 28**2
"""The same of Qwen2.5-VL: max_pixels."""


def qwen_vision(source: ModelDescription) -> list[TensorSpec]:
    """`source`: of the whole model. Layers in deepstack_visual_indexes hand their output to the text model too, each
    through a merger of its own."""
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=1152)
    inner = config.integer("intermediate_size", high=MAX_WIDTH, default=4304)
    patch = config.integer("patch_size", high=1 << 12, default=16)
    frames = config.integer("temporal_patch_size", high=64, default=2)
    merged = hidden * config.integer("spatial_merge_size", high=64, default=2) ** 2
    out = config.integer("out_hidden_size", high=MAX_WIDTH, default=3584)
    channels = config.integer("in_channels", high=64, default=3)
    depth = config.integer("depth", high=MAX_LAYERS, default=27)
    tensors = TensorList(STEM, part="vision")
    _linear(tensors, "patch_embed.proj", hidden, channels, frames, patch, patch)
    positions = config.integer("num_position_embeddings", high=1 << 24, default=2304)
    tensors.add("vision.position", (positions, hidden), f"{STEM}pos_embed.weight")
    for layer in range(depth):
        for name in ("norm1", "norm2"):
            tensors.norm(f"vision.layers.{layer}.{name}", hidden, f"blocks.{layer}.{name}", bias=True)
        _linear(tensors, f"blocks.{layer}.attn.qkv", 3 * hidden, hidden, axis=0)
        _linear(tensors, f"blocks.{layer}.attn.proj", hidden, hidden, axis=1)
        _linear(tensors, f"blocks.{layer}.mlp.linear_fc1", inner, hidden, axis=0)
        _linear(tensors, f"blocks.{layer}.mlp.linear_fc2", hidden, inner, axis=1)
    tensors.norm("vision.merger.norm", hidden, "merger.norm", bias=True)
    stacked = config.integers("deepstack_visual_indexes", low=0, high=depth - 1, most=depth) or ()
    mergers = [f"deepstack_merger_list.{number}" for number in range(len(stacked))]
    for name in mergers:
        tensors.norm(f"vision.{name}.norm", merged, f"{name}.norm", bias=True)
    for name in ("merger", *mergers):
        _linear(tensors, f"{name}.linear_fc1", merged, merged, axis=0)
        _linear(tensors, f"{name}.linear_fc2", out, merged, axis=1)
    return tensors.found


def qwen_encoder(source: ModelDescription) -> EncoderSpec:
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=1152)
    patch = config.integer("patch_size", high=1 << 12, default=16)
    patches = max(1, LARGEST_IMAGE_PIXELS // patch**2)
    frames, channels = (
        config.integer("temporal_patch_size", high=64, default=2),
        config.integer("in_channels", high=64, default=3),
    )
    depth = config.integer("depth", high=MAX_LAYERS, default=27)
    stacked = config.integers("deepstack_visual_indexes", low=0, high=depth - 1, most=depth) or ()
    return EncoderSpec(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=4304),
        gated=False,
        patches=patches,
        tokens=max(1, patches // config.integer("spatial_merge_size", high=64, default=2) ** 2),
        outputs=1 + len(stacked),
        # Pixels in float32, as the processor gives them, and in the compute dtype.
        kept_columns=hidden + 3 * channels * frames * patch**2,
    )


def qwen25_vision(source: ModelDescription) -> list[TensorSpec]:
    """Of Qwen2.5-VL: gated MLPs, norms without biases, no table of positions and one merger."""
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    shape = _older_shape(config)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    patch = config.integer("patch_size", high=1 << 12, default=14)
    frames = config.integer("temporal_patch_size", high=64, default=2)
    merged = hidden * config.integer("spatial_merge_size", high=64, default=2) ** 2
    tensors = TensorList(OLDER_STEM, part="vision")
    pixels = (config.integer("in_chans", high=64, default=3), frames, patch, patch)
    tensors.add("vision.patch", (hidden, *pixels), f"{OLDER_STEM}patch_embed.proj.weight")
    for layer in range(config.integer("depth", high=MAX_LAYERS, default=32)):
        for name in ("norm1", "norm2"):
            tensors.norm(f"vision.layers.{layer}.{name}", hidden, f"blocks.{layer}.{name}")
        for name, rows, columns, axis in (
            ("attn.qkv", 3 * hidden, hidden, 0),
            ("attn.proj", hidden, hidden, 1),
            ("mlp.gate_proj", inner, hidden, 0),
            ("mlp.up_proj", inner, hidden, 0),
            ("mlp.down_proj", hidden, inner, 1),
        ):
            _linear(tensors, f"blocks.{layer}.{name}", rows, columns, axis=axis)
    tensors.norm("vision.merger.norm", hidden, "merger.ln_q")
    _linear(tensors, "merger.mlp.0", merged, merged, axis=0)
    _linear(tensors, "merger.mlp.2", config.integer("out_hidden_size", high=MAX_WIDTH, default=3584), merged, axis=1)
    return tensors.found


def qwen25_encoder(source: ModelDescription) -> EncoderSpec:
    return _older_shape(source.fields.table("vision_config") or Fields({}, where="config.json"))


def _older_shape(config: Fields) -> EncoderSpec:
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=1280)
    patch = config.integer("patch_size", high=1 << 12, default=14)
    patches = max(1, OLDER_LARGEST_IMAGE_PIXELS // patch**2)
    channels = config.integer("in_chans", high=64, default=3)
    frames = config.integer("temporal_patch_size", high=64, default=2)
    return EncoderSpec(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=3420),
        gated=True,
        patches=patches,
        tokens=max(1, patches // config.integer("spatial_merge_size", high=64, default=2) ** 2),
        kept_columns=hidden + 3 * channels * frames * patch**2,
    )


def _linear(tensors: TensorList, name: str, *shape: int, axis: int | None = None) -> None:
    matrix = len(shape) == 2
    tensors.add(f"vision.{name}", shape, f"{tensors.stem}{name}.weight", linear=matrix, shard_axis=axis)
    tensors.add(f"vision.{name}_bias", shape[:1], f"{tensors.stem}{name}.bias", shard_axis=0 if axis == 0 else None)
