"""Gemma 4: wider heads in full layers than in windows, layers that share KV, per-layer embeddings, experts in one size.

The vision tower is counted, the audio tower of the smallest sizes is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.models.families.gemma3n import per_layer_inputs, per_layer_tensors, shared_from
from holdfast.models.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import EncoderSpec, ExpertsSpec, LayerSpec, ModelSpec, TensorSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "gemma4"


def describe(source: ModelDescription) -> ModelSpec:
    whole = source.architecture == "Gemma4ForConditionalGeneration"
    text = source.within("text_config") if whole else source
    fields = text.fields
    shape = read_shape(
        text,
        heads=8,
        kv_heads=4,
        head_dim=256,
        vocab=262_144,
        inner=9216,
        tied=True,
        act="hidden_activation",
        act_default="gelu_pytorch_tanh",
        max_position=131_072,
        stretch=False,
        layers_alike=False,
    )
    windows = read_windows(text, shape.layer_count, lambda index: (index + 1) % 6 != 0, window=512)
    sources = shared_from(text, windows)
    shapes = _shapes(text, shape, windows)
    experts = _experts(text)
    extra = fields.integer("hidden_size_per_layer_input", low=0, high=MAX_WIDTH, default=256)
    wide = fields.boolean("use_double_wide_mlp", default=False)
    tensors = TensorList("model.language_model." if whole else "model.")
    tensors.embed(shape)
    layers = []
    for index, window in enumerate(windows):
        here = shapes[index]
        inner = shape.inner * (2 if wide and sources[index] is not None else 1)
        keyless = window is None and fields.boolean("attention_k_eq_v", default=False)
        block = tensors.block(index)
        _layer(block, here, inner, experts, keys=sources[index] is None, values=not keyless)
        if extra:
            per_layer_tensors(block, shape.hidden, extra)
        layers.append(
            LayerSpec(
                index=index,
                window=window,
                kv_heads=None if here.kv_heads == shape.kv_heads else here.kv_heads,
                head_dim=None if here.head_dim == shape.head_dim else here.head_dim,
                shares_kv_of=sources[index],
                intermediate_size=None if inner == shape.inner else inner,
                experts=experts,
            )
        )
    if extra:
        per_layer_inputs(tensors, text, shape, extra)
    tensors.end(shape)
    return build_spec(
        text,
        shape,
        family=FAMILY,
        layers=layers,
        tensors=[*tensors.found, *(_vision(source, shape) if whole else ())],
        features=("norms on queries and keys", "norms after attention and MLP", "scaled layers", "logit soft caps"),
        attention_scale=1.0,
        not_counted=("audio tower",) if whole and source.fields.table("audio_config") else (),
        encoder=_encoder(source) if whole else None,
    )


def _shapes(source: ModelDescription, shape: DecoderShape, windows: Sequence[int | None]) -> list[DecoderShape]:
    """Heads of each layer: as newer configs list them, or one kind for windows and one for full layers."""
    table = source.fields.table("per_layer_config")
    if table is None:
        full = _full_shape(source, shape)
        return [full if window is None else shape for window in windows]
    found = [shape] * len(windows)
    for key in table.values:
        layer = table.table(key)
        if layer is None or key not in {str(index) for index in range(len(windows))}:
            raise table.wrong(key, f"a layer from 0 to {len(windows) - 1}", key)
        if unknown := set(layer.values) - {"head_dim", "num_key_value_heads"}:
            raise layer.wrong(min(unknown), "head_dim or num_key_value_heads", min(unknown))
        dim = layer.integer("head_dim", high=MAX_HEAD_DIM, default=shape.head_dim)
        kv_heads = layer.integer("num_key_value_heads", high=MAX_HEADS, default=shape.kv_heads)
        if shape.heads % kv_heads:
            raise layer.wrong("num_key_value_heads", f"a divisor of the {shape.heads} attention heads", kv_heads)
        found[int(key)] = replace(shape, head_dim=dim, kv_heads=kv_heads)
    return found


def _full_shape(source: ModelDescription, shape: DecoderShape) -> DecoderShape:
    fields = source.fields
    dim = fields.integer("global_head_dim", high=MAX_HEAD_DIM, default=512)
    kv_heads = shape.kv_heads
    if fields.boolean("attention_k_eq_v", default=False):
        kv_heads = fields.integer("num_global_key_value_heads", high=MAX_HEADS, default=kv_heads)
    if shape.heads % kv_heads:
        raise fields.wrong("num_global_key_value_heads", f"a divisor of the {shape.heads} attention heads", kv_heads)
    return replace(shape, head_dim=dim, kv_heads=kv_heads)


def _experts(source: ModelDescription) -> ExpertsSpec | None:
    fields = source.fields
    if not fields.boolean("enable_moe_block", default=False):
        return None
    count = fields.integer("num_experts", high=MAX_EXPERTS)
    return ExpertsSpec(
        count=count,
        per_token=fields.integer("top_k_experts", high=count),
        intermediate_size=fields.integer("moe_intermediate_size", high=MAX_WIDTH),
    )


def _layer(
    block: LayerTensors, shape: DecoderShape, inner: int, experts: ExpertsSpec | None, *, keys: bool, values: bool
) -> None:
    hidden = shape.hidden
    block.add("scale", (1,), "layer_scalar")
    block.norm("attn_norm", hidden, "input_layernorm")
    block.linear("q", shape.query, hidden, "self_attn.q_proj", axis=0)
    block.norm("q_norm", shape.head_dim, "self_attn.q_norm")
    if keys:
        block.linear("k", shape.key, hidden, "self_attn.k_proj", axis=0)
        block.norm("k_norm", shape.head_dim, "self_attn.k_norm")
        if values:
            block.linear("v", shape.key, hidden, "self_attn.v_proj", axis=0)
    block.linear("o", hidden, shape.query, "self_attn.o_proj", axis=1)
    block.norm("post_attn_norm", hidden, "post_attention_layernorm")
    block.norm("mlp_norm", hidden, "pre_feedforward_layernorm")
    block.gated_mlp(hidden, inner)
    block.norm("post_mlp_norm", hidden, "post_feedforward_layernorm")
    if experts is None:
        return
    count, size = experts.count, experts.intermediate_size
    block.add("router_scale", (hidden,), "router.scale")
    block.add("router_expert_scale", (count,), "router.per_expert_scale")
    block.router(count, hidden, "router.proj")
    block.stacked("experts.gate_up", (count, 2 * size, hidden), "experts.gate_up_proj", axis=1)
    block.stacked("experts.down", (count, hidden, size), "experts.down_proj", axis=2)
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        block.norm(name, hidden, name)


def _encoder(source: ModelDescription) -> EncoderSpec | None:
    """At the usual size of images; None: the config does not tell it."""
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    tokens = config.integer("default_output_length", high=MAX_CONTEXT, default=None)
    pooled = config.integer("pooling_kernel_size", high=64, default=None)
    if tokens is None or pooled is None:
        return None
    return EncoderSpec(
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH, default=768),
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH, default=3072),
        gated=True,
        patches=tokens * pooled**2,
        tokens=tokens,
    )


def _vision(source: ModelDescription, shape: DecoderShape) -> list[TensorSpec]:
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=768)
    inner = config.integer("intermediate_size", high=MAX_WIDTH, default=3072)
    heads = config.integer("num_attention_heads", high=MAX_HEADS, default=12)
    kv_heads = config.integer("num_key_value_heads", high=MAX_HEADS, default=heads)
    dim = config.integer("head_dim", high=MAX_HEAD_DIM, default=64)
    patch = config.integer("patch_size", high=1 << 12, default=16)
    places = config.integer("position_embedding_size", high=1 << 24, default=10_240)
    clipped = config.boolean("use_clipped_linears", default=False)
    stem = "model.vision_tower."
    tensors = TensorList(stem, part="vision")
    tensors.add("vision.position", (2, places, hidden), f"{stem}patch_embedder.position_embedding_table")
    tensors.add("vision.patch", (hidden, 3 * patch * patch), f"{stem}patch_embedder.input_proj.weight", linear=True)
    sizes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config.integer("num_hidden_layers", high=MAX_LAYERS, default=16)):
        here, hf = f"vision.layers.{layer}", f"{stem}encoder.layers.{layer}"
        for name, size in sizes.items():
            tensors.add(f"{here}.{name}", size, f"{hf}.{name}.linear.weight", linear=True)
            for bound in ("input_min", "input_max", "output_min", "output_max") if clipped else ():
                tensors.add(f"{here}.{name}.{bound}", (), f"{hf}.{name}.{bound}")
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors.add(f"{here}.{name}", (dim,), f"{hf}.{name}.weight")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            tensors.add(f"{here}.{name}_norm", (hidden,), f"{hf}.{name}_layernorm.weight")
    for name in ("std_bias", "std_scale") if config.boolean("standardize", default=False) else ():
        tensors.add(f"vision.{name}", (hidden,), f"{stem}{name}")
    projection = "model.embed_vision.embedding_projection.weight"
    tensors.add("vision.projector", (shape.hidden, hidden), projection, linear=True)
    return tensors.found
