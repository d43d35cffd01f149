"""Dense Qwen: 1.5, 2, 2.5 (biases on q, k and v), 3 (norms on queries and keys), 2.5-VL, 3-VL, and Seed-OSS."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.models.families.qwen_vision import qwen25_encoder, qwen25_vision, qwen_encoder, qwen_vision
from holdfast.models.fields import MAX_LAYERS
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import DecoderSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "qwen"


WITH_VISION = "Qwen3VLForConditionalGeneration"
OLDER_WITH_VISION = "Qwen2_5_VLForConditionalGeneration"


def describe(source: ModelDescription) -> ModelSpec:
    whole, outer = source.architecture == WITH_VISION, source
    older = source.architecture == OLDER_WITH_VISION
    # Published configs have the text model's fields at their top, those that newer libraries write have not.
    nested = whole or (older and source.fields.table("text_config") is not None)
    source = source.within("text_config") if nested else source
    fields = source.fields
    third = source.architecture in ("Qwen3ForCausalLM", "qwen3", WITH_VISION)
    seed = source.architecture == "SeedOssForCausalLM"
    shape = read_shape(
        source,
        kv_heads=8 if seed else None,
        head_dim=None if source.gguf or source.architecture in ("Qwen2ForCausalLM", OLDER_WITH_VISION) else 128,
        max_position=None if source.gguf else 524_288 if seed else 32_768,
    )
    bias, out_bias = _biases(source, third)
    tensors = TensorList("model.language_model." if whole else "model.")
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias=bias, out_bias=out_bias)
        if third:
            block.norm("q_norm", shape.head_dim, "self_attn.q_norm", "attn_q_norm")
            block.norm("k_norm", shape.head_dim, "self_attn.k_norm", "attn_k_norm")
        mlp_norm = "post_attention_norm" if source.architecture == "seed_oss" else "ffn_norm"
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", mlp_norm)
        block.gated_mlp(shape.hidden, shape.inner, bias=fields.boolean("mlp_bias", default=False))
    tensors.end(shape)
    windows = qwen_windows(source, shape)
    tower = qwen_vision(outer) if whole else qwen25_vision(outer) if older else []
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index, window in enumerate(windows)],
        tensors=[*tensors.found, *tower],
        decoder=DecoderSpec(query_key_norm="head" if third else "none"),
        encoder=qwen_encoder(outer) if whole else qwen25_encoder(outer) if older else None,
    )


def _biases(source: ModelDescription, third: bool) -> tuple[str, bool]:
    if source.gguf:
        return ("qkv" if source.has_tensor("blk.0.attn_q.bias") else ""), source.has_tensor("blk.0.attn_output.bias")
    fields = source.fields
    if source.architecture == "SeedOssForCausalLM":
        given = fields.boolean("attention_bias", default=True)
        return ("qkv" if given else ""), fields.boolean("attention_out_bias", default=False)
    if third:
        given = fields.boolean("attention_bias", default=False)
        return ("qkv" if given else ""), given
    return "qkv", False


def qwen_windows(source: ModelDescription, shape: DecoderShape) -> tuple[int | None, ...]:
    """Configs name a window that is not used unless use_sliding_window says so, and then above max_window_layers."""
    first = source.fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return windows_if_used(source, shape.layer_count, lambda index: index >= first)


def windows_if_used(source: ModelDescription, count: int, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """`slides`: of which layers, where use_sliding_window says that there are any."""
    fields = source.fields
    # Silence means the class's width; a null, that there is none.
    width = None if fields.key("sliding_window") in fields.values else 4096
    used = fields.boolean("use_sliding_window", default=False)
    used = used and (width is not None or fields.has("sliding_window"))
    return read_windows(source, count, lambda index: used and slides(index), window=width)
