"""Gemma 3n: per-layer embeddings, several residual streams (AltUp), low-rank shortcuts, layers that share KV.

The text model is counted; the vision and audio towers of the published checkpoints are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.models.fields import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import LayerSpec, ModelSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "gemma3n"


def describe(source: ModelDescription) -> ModelSpec:
    whole = source.architecture == "Gemma3nForConditionalGeneration"
    text = source.within("text_config") if whole else source
    fields = text.fields
    widths = _widths(text)
    shape = read_shape(
        text.holding({**fields.values, "intermediate_size": max(widths)}),
        heads=8,
        kv_heads=2,
        head_dim=256,
        vocab=262_400,
        tied=True,
        act="hidden_activation",
        act_default="gelu_pytorch_tanh",
        max_position=32_768,
    )
    shape = replace(shape, inner=max(widths))
    windows = read_windows(text, shape.layer_count, lambda index: (index + 1) % 5 != 0, window=512)
    sources = shared_from(text, windows)
    extra = fields.integer("hidden_size_per_layer_input", high=MAX_WIDTH, default=256)
    streams = fields.integer("altup_num_inputs", high=64, default=4)
    rank = fields.integer("laurel_rank", high=MAX_WIDTH, default=64)
    tensors = TensorList("model.language_model." if whole else "model.")
    tensors.embed(shape)
    per_layer_inputs(tensors, text, shape, extra)
    for name in ("altup_projections", "altup_unembed_projections"):
        for stream in range(streams - 1):
            size = (shape.hidden, shape.hidden)
            tensors.add(f"{name}.{stream}", size, f"{tensors.stem}{name}.{stream}.weight", linear=True)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        _layer(block, shape, widths[index % len(widths)], keys=sources[index] is None)
        _streams(block, shape.hidden, streams, rank)
        per_layer_tensors(block, shape.hidden, extra)
    tensors.end(shape)
    layers = [
        LayerSpec(
            index=index,
            window=window,
            shares_kv_of=sources[index],
            intermediate_size=None if len(set(widths)) == 1 else widths[index % len(widths)],
        )
        for index, window in enumerate(windows)
    ]
    return build_spec(
        text,
        shape,
        family=FAMILY,
        layers=layers,
        tensors=tensors.found,
        features=("norms on queries and keys", "per-layer embeddings", "several residual streams"),
        attention_scale=1.0,
        not_counted=("vision tower", "audio tower") if whole else (),
    )


def _widths(source: ModelDescription) -> tuple[int, ...]:
    """One for all layers, or a list with one for each."""
    fields = source.fields
    if not isinstance(fields.raw("intermediate_size"), list):
        return (fields.integer("intermediate_size", high=MAX_WIDTH, default=16_384),)
    count = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    widths = fields.integers("intermediate_size", low=1, high=MAX_WIDTH, most=count) or ()
    if len(widths) != count:
        raise fields.wrong("intermediate_size", f"one for each of {count} layers", f"{len(widths)} of them")
    return widths


def shared_from(source: ModelDescription, windows: Sequence[int | None]) -> list[int | None]:
    """The last layers read the keys and values of the last layer of their kind before them."""
    count = len(windows)
    shared = source.fields.integer("num_kv_shared_layers", low=0, high=MAX_LAYERS, default=0)
    first = count - shared
    if shared and first <= 0:
        raise source.fields.wrong("num_kv_shared_layers", f"less than the {count} layers", shared)
    found: list[int | None] = [None] * count
    for index in range(first, count):
        alike = [before for before in range(first) if windows[before] == windows[index]]
        if not alike:
            raise source.fields.wrong("num_kv_shared_layers", "a layer of each kind before those that share", shared)
        found[index] = alike[-1]
    return found


def per_layer_inputs(tensors: TensorList, source: ModelDescription, shape: DecoderShape, extra: int) -> None:
    vocabulary = source.fields.integer("vocab_size_per_layer_input", high=MAX_VOCABULARY, default=262_144)
    width, stem = shape.layer_count * extra, tensors.stem
    tensors.add("embed_per_layer", (vocabulary, width), f"{stem}embed_tokens_per_layer.weight", shard_axis=0)
    projection = f"{stem}per_layer_model_projection.weight"
    tensors.add("per_layer_projection", (width, shape.hidden), projection, linear=True)
    tensors.norm("per_layer_norm", extra, "per_layer_projection_norm")


def per_layer_tensors(block: LayerTensors, hidden: int, extra: int) -> None:
    block.linear("per_layer.gate", extra, hidden, "per_layer_input_gate", axis=None)
    block.linear("per_layer.out", hidden, extra, "per_layer_projection", axis=None)
    block.norm("per_layer.norm", hidden, "post_per_layer_input_norm")


def _layer(block: LayerTensors, shape: DecoderShape, inner: int, *, keys: bool) -> None:
    hidden = shape.hidden
    block.norm("attn_norm", hidden, "input_layernorm")
    block.linear("q", shape.query, hidden, "self_attn.q_proj", axis=0)
    block.norm("q_norm", shape.head_dim, "self_attn.q_norm")
    if keys:
        block.linear("k", shape.key, hidden, "self_attn.k_proj", axis=0)
        block.linear("v", shape.key, hidden, "self_attn.v_proj", axis=0)
        block.norm("k_norm", shape.head_dim, "self_attn.k_norm")
    block.linear("o", hidden, shape.query, "self_attn.o_proj", axis=1)
    block.norm("post_attn_norm", hidden, "post_attention_layernorm")
    block.norm("mlp_norm", hidden, "pre_feedforward_layernorm")
    block.gated_mlp(hidden, inner)
    block.norm("post_mlp_norm", hidden, "post_feedforward_layernorm")


def _streams(block: LayerTensors, hidden: int, streams: int, rank: int) -> None:
    block.add("altup.scale", (hidden,), "altup.correct_output_scale")
    block.linear("altup.correct", streams, streams, "altup.correction_coefs", axis=None)
    block.linear("altup.predict", streams * streams, streams, "altup.prediction_coefs", axis=None)
    block.linear("altup.router", streams, hidden, "altup.modality_router", axis=None)
    block.norm("altup.norm", hidden, "altup.router_norm")
    block.linear("laurel.left", rank, hidden, "laurel.linear_left", axis=None)
    block.linear("laurel.right", hidden, rank, "laurel.linear_right", axis=None)
    block.norm("laurel.norm", hidden, "laurel.post_laurel_norm")
