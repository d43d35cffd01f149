"""Command-R, R+ (cohere), R7B and A (cohere2): attention and MLP side by side after one norm, tied embeddings."""

from __future__ import annotations

from dataclasses import replace

from holdfast.models.fields import MAX_CONTEXT, MAX_LAYERS
from holdfast.models.source import ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "cohere"


def describe(source: ModelDescription) -> ModelSpec:
    fields = source.fields
    second = source.architecture in ("Cohere2ForCausalLM", "cohere2")
    shape = read_shape(source, tied=True, eps="layer_norm_eps", max_position=None if source.gguf else 8192)
    # Their max_position_embeddings are those of the first training; servers go by the longer one where it is given.
    context = fields.integer("model_max_length", high=MAX_CONTEXT, default=shape.max_position)
    shape = replace(shape, max_position=context)
    bias = not source.gguf and fields.boolean("attention_bias", default=False)
    normed = not second and (
        source.has_tensor("blk.0.attn_q_norm.weight") or fields.boolean("use_qk_norm", default=False)
    )
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "", out_bias=bias)
        if normed:
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads)):
                width = (heads, shape.head_dim)
                block.add(
                    f"{name}_norm", width, f"self_attn.{name}_norm.weight", f"attn_{name}_norm.weight", shard_axis=0
                )
        block.gated_mlp(shape.hidden, shape.inner)
    tensors.end(shape)
    windows: tuple[int | None, ...] = (None,) * shape.layer_count
    if second:
        pattern = 4 if source.gguf else fields.integer("sliding_window_pattern", high=MAX_LAYERS, default=4)
        windows = read_windows(source, shape.layer_count, lambda index: (index + 1) % pattern != 0, window=4096)
    features = ["attention and MLP side by side", "LayerNorm", "scaled logits"]
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, window=window) for index, window in enumerate(windows)],
        tensors=tensors.found,
        features=[*features, *(["norms on queries and keys"] if normed else [])],
    )
