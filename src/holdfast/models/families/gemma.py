"""Gemma 1, 2 and 3: wide heads, tied embeddings, windows in most layers from 2 on; 3 also with its vision tower.

Norms' weights are kept less one, but in GGUF. 3 rotates layers with a window by a base of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from holdfast.models.families.siglip import siglip_encoder, siglip_tensors
from holdfast.models.fields import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.rope import MAX_THETA, rope_of_windows
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import DecoderSpec, EncoderSpec, LayerSpec, ModelSpec, TensorSpec
from holdfast.models.tensors import TensorList

FAMILY = "gemma"


def describe(source: ModelDescription) -> ModelSpec:
    version = {"gemma2": 2, "gemma3": 3}.get(source.architecture.lower()[:6], 1)
    whole = source.architecture == "Gemma3ForConditionalGeneration"
    text = source.within("text_config") if whole else source
    # What transformers' classes say: the tables within published configs name only what differs from it.
    shape = read_shape(
        text,
        heads=None if source.gguf else (16, 8, 8)[version - 1],
        kv_heads=None if source.gguf else (16, 4, 4)[version - 1],
        head_dim=256,
        vocab=None if source.gguf else (256_000, 256_000, 262_208)[version - 1],
        inner=None if source.gguf else (24_576, 9216, 9216)[version - 1],
        tied=True,
        act="hidden_activation" if version > 1 or text.fields.has("hidden_activation") else "hidden_act",
        act_default="gelu_pytorch_tanh",
        max_position=None if source.gguf else (8192, 8192, 131_072)[version - 1],
        theta=1e6 if version == 3 else 10_000.0,
        stretch=version < 3,
    )
    # Published checkpoints of the whole model keep the text model under this name.
    tensors = _text_tensors(text, shape, version, stem="language_model.model." if whole else "model.")
    tensors.end(shape, head="language_model.lm_head" if whole else "lm_head")
    found = tensors.found
    if whole:
        found = [*found, *_vision(source, shape.hidden)]
    return build_spec(
        text,
        shape,
        family=FAMILY,
        layers=_layers(text, shape, version),
        tensors=found,
        features=("attention to later tokens",) if _looks_ahead(text) else (),
        attention_scale=_scale(text, shape, version),
        decoder=_decoder(text, shape, version),
        encoder=_encoder(source) if whole else None,
    )


def _text_tensors(source: ModelDescription, shape: DecoderShape, version: int, *, stem: str) -> TensorList:
    bias = source.fields.boolean("attention_bias", default=False)
    tensors = TensorList(stem, plus_one=True)
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        if version == 3:
            block.norm("q_norm", shape.head_dim, "self_attn.q_norm", "attn_q_norm")
            block.norm("k_norm", shape.head_dim, "self_attn.k_norm", "attn_k_norm")
        if version == 1:
            block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        else:
            block.norm("post_attn_norm", shape.hidden, "post_attention_layernorm", "post_attention_norm")
            block.norm("mlp_norm", shape.hidden, "pre_feedforward_layernorm", "ffn_norm")
            block.norm("post_mlp_norm", shape.hidden, "post_feedforward_layernorm", "post_ffw_norm")
        block.gated_mlp(shape.hidden, shape.inner)
    return tensors


def _windows(source: ModelDescription, count: int, version: int) -> tuple[int | None, ...]:
    if version == 1:
        return (None,) * count
    if source.gguf:
        return _gguf_windows(source.fields, count, version)
    if version == 2:
        return read_windows(source, count, lambda index: index % 2 == 0, window=4096)
    name = "sliding_window_pattern" if source.fields.has("sliding_window_pattern") else "_sliding_window_pattern"
    pattern = source.fields.integer(name, high=MAX_LAYERS, default=6)
    return read_windows(source, count, lambda index: (index + 1) % pattern != 0, window=4096)


def _gguf_windows(fields: Fields, count: int, version: int) -> tuple[int | None, ...]:
    """As llama.cpp reads them: a third without a width has no windows, and a pattern of 0 has no other layers."""
    if version == 2:
        width = fields.integer("sliding_window", high=MAX_CONTEXT, default=4096)
    else:
        width = fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=0)
    name, usual = "sliding_window_pattern", 2 if version == 2 else 6
    if isinstance(fields.raw(name), list):
        slides = list(fields.flags(name, count=count))
    else:
        pattern = fields.integer(name, low=0, high=MAX_LAYERS, default=usual)
        slides = [pattern == 0 or (index + 1) % pattern != 0 for index in range(count)]
    return tuple(width if width and slide else None for slide in slides)


def _layers(source: ModelDescription, shape: DecoderShape, version: int) -> list[LayerSpec]:
    windows, local, fields = _windows(source, shape.layer_count, version), None, source.fields
    if version == 3:
        base = 10_000.0
        if source.gguf:
            base = fields.number("rope.freq_base_swa", low=1.0, high=MAX_THETA, default=base)
        local = rope_of_windows(fields, dim=shape.rope.dim, max_position=shape.max_position, theta=base)
    elif version == 2 and fields.has("rope.freq_base_swa"):
        local = replace(shape.rope, theta=fields.number("rope.freq_base_swa", low=1.0, high=MAX_THETA))
    return [
        LayerSpec(index=index, window=window, rope=None if window is None else local)
        for index, window in enumerate(windows)
    ]


def _scale(source: ModelDescription, shape: DecoderShape, version: int) -> float:
    if source.gguf:
        # llama.cpp tells the two 27B by their depth: they are scaled by the width of a head that fills the stream.
        filled = shape.layer_count == {2: 46, 3: 62}.get(version)
        return 1.0 / math.sqrt(shape.hidden / shape.heads if filled else shape.head_dim)
    if version == 1:
        return 1.0 / math.sqrt(shape.head_dim)
    scalar = source.fields.number("query_pre_attn_scalar", low=1e-6, high=1e6, default=256.0)
    return 1.0 / math.sqrt(scalar)


def _decoder(source: ModelDescription, shape: DecoderShape, version: int) -> DecoderSpec:
    return DecoderSpec(
        norms="both" if version > 1 else "before",
        query_key_norm="head" if version == 3 else "none",
        attention_softcap=_cap(source, "attn_logit_softcapping", 50.0 if version == 2 else 0.0, version),
        logits_softcap=_cap(source, "final_logit_softcapping", 30.0 if version == 2 else 0.0, version),
        embedding_scale=math.sqrt(shape.hidden),
    )


def _cap(source: ModelDescription, name: str, default: float, version: int) -> float:
    """A null says that there is none, where nothing says that it is as ever."""
    fields = source.fields
    if version == 1 or (not source.gguf and name in fields.values and not fields.has(name)):
        return 0.0
    return fields.number(name, low=0.0, high=1e6, default=default)


def _looks_ahead(source: ModelDescription) -> bool:
    return not source.gguf and source.fields.boolean("use_bidirectional_attention", default=False)


def _tower(source: ModelDescription) -> Fields:
    tower = source.fields.table("vision_config")
    if tower is None:
        raise source.fields.wrong("vision_config", "an object: the vision tower", "nothing")
    return tower


def _encoder(source: ModelDescription) -> EncoderSpec:
    tokens = source.fields.integer("mm_tokens_per_image", high=MAX_CONTEXT, default=256)
    return siglip_encoder(_tower(source), tokens=tokens)


def _vision(source: ModelDescription, hidden: int) -> list[TensorSpec]:
    tower = _tower(source)
    tensors = TensorList("multi_modal_projector.", part="vision")
    width = tower.integer("hidden_size", high=MAX_WIDTH, default=768)
    tensors.add("vision.projector", (width, hidden), "multi_modal_projector.mm_input_projection_weight")
    tensors.norm("vision.projector_norm", width, "mm_soft_emb_norm")
    return [*siglip_tensors(tower, "vision_tower.vision_model."), *tensors.found]
