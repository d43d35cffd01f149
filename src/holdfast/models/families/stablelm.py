"""StableLM 3B, 1.6B and 12B: LayerNorm with biases, part of each head rotates, norms a head in the largest."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import DecoderSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "stablelm"

_MAX_NORMED_HEADS = 512
"""Every one of them is a tensor."""


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(
        {
            "layer_norm_eps": ("layer_norm_eps", "norm_eps"),
            "partial_rotary_factor": ("partial_rotary_factor", "rope_pct"),
        }
    )
    fields = source.fields
    shape = read_shape(
        source, eps="layer_norm_eps", max_position=None if source.gguf else 4096, rotary=0.25, eps_default=1e-5
    )
    if source.gguf:
        bias, normed = source.has_tensor("blk.0.attn_q.bias"), source.has_tensor("blk.0.attn_q_norm.weight")
        parallel = not source.has_tensor("blk.0.ffn_norm.weight")
    else:
        bias, normed = fields.boolean("use_qkv_bias", default=False), fields.boolean("qk_layernorm", default=False)
        parallel = fields.boolean("use_parallel_residual", default=False)
    if normed and shape.heads > _MAX_NORMED_HEADS:
        raise fields.wrong(
            "num_attention_heads", f"at most {_MAX_NORMED_HEADS} heads with norms of their own", shape.heads
        )
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm", bias=True)
        block.attention(shape, bias="qkv" if bias else "")
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads)) if normed else ():
            if source.gguf:
                block.add(f"{name}_norm", (heads, shape.head_dim), "", f"attn_{name}_norm.weight", shard_axis=0)
                continue
            for head in range(heads):
                block.norm(f"{name}_norm.{head}", shape.head_dim, f"self_attn.{name}_layernorm.norms.{head}")
        if not parallel:
            block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm", bias=True)
        block.gated_mlp(shape.hidden, shape.inner)
    tensors.end(shape, bias=True)
    lacking = {"qk_layernorm: a norm for every head": normed, "attention and MLP side by side": parallel}
    return build_spec(
        source,
        shape,
        family=FAMILY,
        tensors=tensors.found,
        features=[words for words, needed in lacking.items() if needed],
        decoder=DecoderSpec(norm="layer"),
    )
