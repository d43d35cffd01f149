"""The SigLIP vision tower, as Gemma 3 and others carry it: its tensors, for counting only."""

from __future__ import annotations

from holdfast.models.fields import MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.spec import EncoderSpec, TensorSpec
from holdfast.models.tensors import TensorList


def siglip_tensors(config: Fields, stem: str) -> list[TensorSpec]:
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=768)
    inner = config.integer("intermediate_size", high=MAX_WIDTH, default=3072)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS, default=12)
    image = config.integer("image_size", high=1 << 16, default=224)
    patch = config.integer("patch_size", high=image, default=min(16, image))
    channels = config.integer("num_channels", high=64, default=3)
    tensors = TensorList(stem, part="vision")
    tensors.add("vision.patch", (hidden, channels, patch, patch), f"{stem}embeddings.patch_embedding.weight")
    tensors.add("vision.patch_bias", (hidden,), f"{stem}embeddings.patch_embedding.bias")
    tensors.add("vision.position", ((image // patch) ** 2, hidden), f"{stem}embeddings.position_embedding.weight")
    for layer in range(layers):
        here, hf = f"vision.layers.{layer}", f"encoder.layers.{layer}"
        for norm in ("layer_norm1", "layer_norm2"):
            tensors.norm(f"{here}.{norm}", hidden, f"{hf}.{norm}", bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            _linear(tensors, f"{here}.{name}", hidden, hidden, f"{hf}.self_attn.{name}")
        _linear(tensors, f"{here}.fc1", inner, hidden, f"{hf}.mlp.fc1")
        _linear(tensors, f"{here}.fc2", hidden, inner, f"{hf}.mlp.fc2")
    tensors.norm("vision.final_norm", hidden, "post_layernorm", bias=True)
    if config.boolean("vision_use_head", default=True):
        _pooling_head(tensors, hidden, inner)
    return tensors.found


def siglip_encoder(config: Fields, *, tokens: int) -> EncoderSpec:
    """`tokens`: what an image, always of one size, becomes."""
    image = config.integer("image_size", high=1 << 16, default=224)
    return EncoderSpec(
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH, default=768),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=3072),
        gated=False,
        patches=(image // config.integer("patch_size", high=image, default=min(16, image))) ** 2,
        tokens=tokens,
    )


def _pooling_head(tensors: TensorList, hidden: int, inner: int) -> None:
    stem = f"{tensors.stem}head"
    tensors.add("vision.head.probe", (1, 1, hidden), f"{stem}.probe")
    tensors.add("vision.head.qkv", (3 * hidden, hidden), f"{stem}.attention.in_proj_weight")
    tensors.add("vision.head.qkv_bias", (3 * hidden,), f"{stem}.attention.in_proj_bias")
    _linear(tensors, "vision.head.out", hidden, hidden, "head.attention.out_proj")
    tensors.norm("vision.head.norm", hidden, "head.layernorm", bias=True)
    _linear(tensors, "vision.head.fc1", inner, hidden, "head.mlp.fc1")
    _linear(tensors, "vision.head.fc2", hidden, inner, "head.mlp.fc2")


def _linear(tensors: TensorList, name: str, rows: int, columns: int, hf: str) -> None:
    tensors.add(name, (rows, columns), f"{tensors.stem}{hf}.weight", linear=True)
    tensors.add(f"{name}_bias", (rows,), f"{tensors.stem}{hf}.bias")
