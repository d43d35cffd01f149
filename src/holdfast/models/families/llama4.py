"""Llama 4 Scout and Maverick: three of four layers attend within chunks, experts with one shared, a vision tower."""

from __future__ import annotations

from holdfast.models.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import EncoderSpec, ExpertsSpec, LayerSpec, ModelSpec, TensorSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "llama4"
TILES = 16 + 1
"""Of the largest image, by its processor's default, and one of the whole in small; each has a class token."""


def describe(source: ModelDescription) -> ModelSpec:
    whole = source.architecture == "Llama4ForConditionalGeneration"
    names: dict[str, str | tuple[str, ...]] = {
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "intermediate_size": "intermediate_size_mlp",
    }
    text = (source.within("text_config") if whole else source).called(names)
    fields = text.fields
    # What transformers' class says: the table within published configs may name only what differs from it.
    shape = read_shape(
        text,
        heads=None if source.gguf else 40,
        kv_heads=None if source.gguf else 8,
        head_dim=128,
        vocab=None if source.gguf else 202_048,
        inner=None if source.gguf else 16_384,
        max_position=None if source.gguf else 131_072,
    )
    count = fields.integer("num_experts", high=MAX_EXPERTS, default=16)
    inner = fields.integer("moe_intermediate_size", high=MAX_WIDTH, default=8192)
    experts = ExpertsSpec(
        count=count,
        per_token=fields.integer("num_experts_per_tok", high=count, default=1),
        intermediate_size=inner,
        shared_intermediate_size=inner,
    )
    sparse, chunks = _sparse(text, shape.layer_count), _chunks(text, shape.layer_count)
    outer = "language_model." if whole else ""
    tensors = TensorList(f"{outer}model.")
    tensors.embed(shape)
    for index in range(shape.layer_count):
        _layer(tensors.block(index), text, shape, experts if sparse[index] else None)
    tensors.end(shape, head=f"{outer}lm_head")
    found = tensors.found
    if source.has_tensor("rope_freqs.weight"):
        tensors.add("rope_freqs", (shape.rope.dim // 2,), "", "rope_freqs.weight", optional=True)
    if whole:
        found = [*found, *_vision(source, shape)]
    return build_spec(
        text,
        shape,
        family=FAMILY,
        layers=[
            LayerSpec(index=index, window=chunk, chunked=chunk is not None, experts=experts if sparse[index] else None)
            for index, chunk in enumerate(chunks)
        ],
        tensors=found,
        features=("norms on queries and keys", "layers without rotary positions"),
        encoder=_encoder(source) if whole else None,
    )


def _sparse(source: ModelDescription, count: int) -> list[bool]:
    listed = source.fields.integers("moe_layers", low=0, high=count - 1, most=count)
    if listed:
        return [index in listed for index in range(count)]
    step = source.fields.integer("interleave_moe_layer_step", high=MAX_LAYERS, default=1)
    return [(index + 1) % step == 0 for index in range(count)]


def _chunks(source: ModelDescription, count: int) -> list[int | None]:
    """Layers that rotate attend within chunks; the others, every fourth, to everything."""
    fields = source.fields
    width = fields.integer("attention_chunk_size", low=0, high=MAX_CONTEXT, default=8192) or None
    kinds = fields.texts("layer_types", count=count, allowed=("full_attention", "chunked_attention"))
    if kinds is not None:
        return [width if kind == "chunked_attention" else None for kind in kinds]
    rotates = fields.integers("no_rope_layers", low=0, high=1, most=count)
    if rotates and len(rotates) != count:
        raise fields.wrong("no_rope_layers", f"a 0 or 1 for each of {count} layers", f"{len(rotates)} of them")
    step = fields.integer("no_rope_layer_interval", high=MAX_LAYERS, default=4)
    return [width if (rotates[i] if rotates else (i + 1) % step) else None for i in range(count)]


def _layer(block: LayerTensors, source: ModelDescription, shape: DecoderShape, experts: ExpertsSpec | None) -> None:
    hidden, bias = shape.hidden, source.fields.boolean("attention_bias", default=False)
    block.norm("attn_norm", hidden, "input_layernorm", "attn_norm")
    block.attention(shape, bias="qkv" if bias else "", out_bias=bias, turned=True)
    block.norm("mlp_norm", hidden, "post_attention_layernorm", "ffn_norm")
    if experts is None:
        block.gated_mlp(hidden, shape.inner, "feed_forward")
        return
    count, inner = experts.count, experts.intermediate_size
    block.router(count, hidden, "feed_forward.router")
    if source.gguf:
        block.experts(count, hidden, inner, "", "gate", "up", "down")
    else:
        both, down, stem = (count, 2 * inner, hidden), (count, hidden, inner), "feed_forward.experts"
        block.stacked("experts.gate_up", both, f"{stem}.gate_up_proj", axis=1, hf_shape=(count, hidden, 2 * inner))
        block.stacked("experts.down", down, f"{stem}.down_proj", axis=2, hf_shape=(count, inner, hidden))
    block.shared_expert(hidden, experts.shared_intermediate_size, "feed_forward.shared_expert")


def _encoder(source: ModelDescription) -> EncoderSpec:
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    image = config.integer("image_size", high=1 << 16, default=448)
    patches = (image // config.integer("patch_size", high=image, default=min(14, image))) ** 2
    ratio = config.number("pixel_shuffle_ratio", low=0.01, high=1.0, default=0.5)
    return EncoderSpec(
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH, default=768),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=5632),
        gated=False,
        patches=TILES * (patches + 1),
        tokens=max(1, int(TILES * patches * ratio**2)),
    )


def _vision(source: ModelDescription, shape: DecoderShape) -> list[TensorSpec]:
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=768)
    inner = config.integer("intermediate_size", high=MAX_WIDTH, default=5632)
    image = config.integer("image_size", high=1 << 16, default=448)
    patch = config.integer("patch_size", high=image, default=min(14, image))
    channels = config.integer("num_channels", high=64, default=3)
    middle = config.integer("projector_input_dim", high=MAX_WIDTH, default=4096)
    out = config.integer("projector_output_dim", high=MAX_WIDTH, default=4096)
    final = config.integer("vision_output_dim", high=MAX_WIDTH, default=7680)
    ratio = config.number("pixel_shuffle_ratio", low=0.01, high=1.0, default=0.5)
    stem = "vision_model."
    tensors = TensorList(stem, part="vision")
    tensors.add("vision.class", (hidden,), f"{stem}class_embedding")
    tensors.add("vision.position", ((image // patch) ** 2 + 1, hidden), f"{stem}positional_embedding_vlm")
    _linear(tensors, "patch_embedding.linear", hidden, channels * patch * patch, bias=False)
    for name in ("layernorm_pre", "layernorm_post"):
        tensors.norm(f"vision.{name}", hidden, name, bias=True)
    for layer in range(config.integer("num_hidden_layers", high=MAX_LAYERS, default=34)):
        hf = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _linear(tensors, f"{hf}.self_attn.{name}", hidden, hidden)
        _linear(tensors, f"{hf}.mlp.fc1", inner, hidden)
        _linear(tensors, f"{hf}.mlp.fc2", hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors.norm(f"vision.{hf}.{name}", hidden, f"{hf}.{name}", bias=True)
    _linear(tensors, "vision_adapter.mlp.fc1", middle, int(hidden // ratio**2), bias=False)
    _linear(tensors, "vision_adapter.mlp.fc2", out, out, bias=False)
    projector = "multi_modal_projector.linear_1.weight"
    tensors.add("vision.projector", (shape.hidden, final), projector, linear=True)
    return tensors.found


def _linear(tensors: TensorList, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
    tensors.add(f"vision.{name}", (rows, columns), f"{tensors.stem}{name}.weight", linear=True)
    if bias:
        tensors.add(f"vision.{name}_bias", (rows,), f"{tensors.stem}{name}.bias")
