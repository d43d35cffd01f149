"""InternLM 2 and 2.5: llama's build with q, k and v in one matrix, under names of its own."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "internlm2"


def describe(source: ModelDescription) -> ModelSpec:
    shape = read_shape(source, max_position=None if source.gguf else 2048)
    bias = not source.gguf and source.fields.boolean("bias", default=False)
    tensors = TensorList()
    tensors.embed(shape, "tok_embeddings")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "attention_norm", "attn_norm")
        if source.gguf:  # converters take it apart
            block.attention(shape, turned=True)
        else:
            block.linear("qkv", shape.query + 2 * shape.key, shape.hidden, "attention.wqkv", axis=0, bias=bias)
            block.linear("o", shape.hidden, shape.query, "attention.wo", axis=1, bias=bias)
        block.norm("mlp_norm", shape.hidden, "ffn_norm", "ffn_norm")
        block.gated_mlp(shape.hidden, shape.inner, "feed_forward", gate="w1", up="w3", down="w2")
    tensors.end(shape, head="output")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=("q, k and v in one matrix",))
