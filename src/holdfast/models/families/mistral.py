"""Mistral's later builds: Ministral (windows by layer), Ministral 3, and Mistral 3 and Pixtral with a vision tower.

Their text model has llama's tensors. The plain MistralForCausalLM is in the llama family, which the engine runs.
"""

from __future__ import annotations

from holdfast.models.families.llama import plain_tensors
from holdfast.models.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import EncoderSpec, LayerSpec, ModelSpec, TensorSpec
from holdfast.models.tensors import TensorList

FAMILY = "mistral"
PIXTRAL = "LlavaForConditionalGeneration"
"""Under this name Pixtral is published, beside models with other towers."""


def describe(source: ModelDescription) -> ModelSpec:
    whole = source.architecture in ("Mistral3ForConditionalGeneration", PIXTRAL)
    if source.architecture == PIXTRAL:
        _require_pixtral(source)
    text = source.within("text_config") if whole else source
    shape = read_shape(
        text,
        heads=None if source.gguf else 32,
        kv_heads=None if source.gguf else 8,
        head_dim=None if source.gguf or source.architecture == "MinistralForCausalLM" else 128,
        inner=None if source.gguf else 14_336,
        vocab=None if source.gguf else 131_072,
        max_position=None if source.gguf else 131_072,
    )
    found = plain_tensors(text, shape, outer="language_model." if whole else "").found
    if whole:
        found = [*found, *_vision(source, shape)]
    windows: tuple[int | None, ...] = (None,) * shape.layer_count
    if text.fields.has("sliding_window") and not source.gguf:
        windows = read_windows(text, shape.layer_count, lambda _: True)
    return build_spec(
        text,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index, window in enumerate(windows)],
        tensors=found,
        encoder=_encoder(source) if whole else None,
    )


def _require_pixtral(source: ModelDescription) -> None:
    for part, wanted in (("text_config", "mistral"), ("vision_config", "pixtral")):
        found = (source.fields.table(part) or Fields({}, where="config.json")).text("model_type", default=wanted)
        if found != wanted:
            raise source.fields.wrong(part, f"model_type {wanted}: of this architecture only Pixtral is known", found)


def _encoder(source: ModelDescription) -> EncoderSpec:
    """Images keep their shape, up to a square of the largest size. Mistral 3 merges neighbours into one token."""
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    image = config.integer("image_size", high=1 << 16, default=1024)
    patches = (image // config.integer("patch_size", high=image, default=min(16, image))) ** 2
    merge = source.fields.integer("spatial_merge_size", high=64, default=2) if source.architecture != PIXTRAL else 1
    return EncoderSpec(
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH, default=1024),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=4096),
        gated=True,
        patches=patches,
        tokens=max(1, patches // merge**2),
    )


def _vision(source: ModelDescription, shape: DecoderShape) -> list[TensorSpec]:
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=1024)
    inner = config.integer("intermediate_size", high=MAX_WIDTH, default=4096)
    heads = config.integer("num_attention_heads", high=MAX_HEADS, default=16)
    width = heads * config.integer("head_dim", high=MAX_HEAD_DIM, default=max(1, hidden // heads))
    patch, channels = (
        config.integer("patch_size", high=1 << 12, default=16),
        config.integer("num_channels", high=64, default=3),
    )
    tensors = TensorList("vision_tower.", part="vision")
    tensors.add("vision.patch", (hidden, channels, patch, patch), "vision_tower.patch_conv.weight")
    tensors.norm("vision.first_norm", hidden, "ln_pre")
    for layer in range(config.integer("num_hidden_layers", high=MAX_LAYERS, default=24)):
        here, hf = f"vision.layers.{layer}", f"vision_tower.transformer.layers.{layer}"
        for norm in ("attention_norm", "ffn_norm"):
            tensors.add(f"{here}.{norm}", (hidden,), f"{hf}.{norm}.weight")
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors.add(f"{here}.{name}", (width, hidden), f"{hf}.attention.{name}.weight", linear=True)
        tensors.add(f"{here}.o_proj", (hidden, width), f"{hf}.attention.o_proj.weight", linear=True)
        for name, size in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            tensors.add(f"{here}.{name}", size, f"{hf}.feed_forward.{name}.weight", linear=True)
    merge = source.fields.integer("spatial_merge_size", high=64, default=2)
    merges = source.architecture != PIXTRAL
    bias = source.fields.boolean("multimodal_projector_bias", default=not merges)
    stem = "multi_modal_projector"
    if merges:
        tensors.add("vision.projector.norm", (hidden,), f"{stem}.norm.weight")
    for name, rows, columns, biased in (
        *((("patch_merger.merging_layer", hidden, merge * merge * hidden, False),) if merges else ()),
        ("linear_1", shape.hidden, hidden, bias),
        ("linear_2", shape.hidden, shape.hidden, bias),
    ):
        tensors.add(f"vision.projector.{name}", (rows, columns), f"{stem}.{name}.weight", linear=True)
        if biased:
            tensors.add(f"vision.projector.{name}_bias", (rows,), f"{stem}.{name}.bias")
    return tensors.found
