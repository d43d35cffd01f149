"""GLM-4 in transformers' form: 4-9B-hf (glm), 4-0414 (glm4), and the mixtures 4.5, 4.6 and Air (glm4_moe)."""

from __future__ import annotations

from dataclasses import replace

from holdfast.models.families.deepseek import draft_ends, read_shared_experts, shared_experts
from holdfast.models.fields import MAX_LAYERS
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "glm"


def describe(source: ModelDescription) -> ModelSpec:
    if source.architecture in ("Glm4MoeForCausalLM", "glm4moe"):
        return _mixture(source)
    shape = read_shape(
        source, head_dim=None if source.gguf else 128, max_position=None if source.gguf else 131_072, rotary=0.5
    )
    fourth = source.architecture in ("Glm4ForCausalLM", "glm4")
    bias = source.has_tensor("blk.0.attn_q.bias") if source.gguf else _bias(source, default=fourth is False)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias="qkv" if bias else "")
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        if fourth:
            block.norm("post_attn_norm", shape.hidden, "post_self_attn_layernorm", "post_attention_norm")
            block.norm("post_mlp_norm", shape.hidden, "post_mlp_layernorm", "post_ffw_norm")
        # Gate and up in one; GGUF keeps them so, under the name of up.
        block.linear("gate_up", 2 * shape.inner, shape.hidden, "mlp.gate_up_proj", "ffn_up", axis=0)
        block.linear("down", shape.hidden, shape.inner, "mlp.down_proj", "ffn_down", axis=1)
    tensors.end(shape)
    features = ("gate and up in one matrix", *(("norms after attention and MLP",) if fourth else ()))
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)


def _bias(source: ModelDescription, *, default: bool) -> bool:
    return source.fields.boolean("attention_bias", default=default)


def _mixture(source: ModelDescription) -> ModelSpec:
    source = source.called({"num_experts": "n_routed_experts"})
    fields = source.fields
    shape = read_shape(source, max_position=None if source.gguf else 131_072, rotary=0.5)
    drafts = fields.integer("num_nextn_predict_layers", low=0, high=64, default=0)
    if source.gguf:  # counted among the blocks there
        if drafts >= shape.layer_count:
            raise fields.wrong("num_nextn_predict_layers", f"less than the {shape.layer_count} blocks", drafts)
        shape = replace(shape, layer_count=shape.layer_count - drafts)
    experts = read_shared_experts(source)
    dense = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    bias = source.has_tensor("blk.0.attn_q.bias") if source.gguf else _bias(source, default=False)
    normed = (
        source.has_tensor("blk.0.attn_q_norm.weight") if source.gguf else fields.boolean("use_qk_norm", default=False)
    )
    chosen = [experts if index >= dense else None for index in range(shape.layer_count)]
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        _layer(tensors.block(index), shape, chosen[index], bias=bias, normed=normed)
    tensors.end(shape)
    extra = TensorList(part="draft")
    for number in range(drafts):
        block = extra.draft_block(shape.layer_count + number, number)
        draft_ends(block, shape)
        _layer(block, shape, experts, bias=bias, normed=normed)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, experts=found) for index, found in enumerate(chosen)],
        tensors=[*tensors.found, *extra.found],
        features=("norms on queries and keys",) if normed else (),
    )


def _layer(block: LayerTensors, shape: DecoderShape, experts: ExpertsSpec | None, *, bias: bool, normed: bool) -> None:
    block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
    block.attention(shape, bias="qkv" if bias else "")
    if normed:
        block.norm("q_norm", shape.head_dim, "self_attn.q_norm", "attn_q_norm")
        block.norm("k_norm", shape.head_dim, "self_attn.k_norm", "attn_k_norm")
    block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "post_attention_norm")
    if experts is None:
        block.gated_mlp(shape.hidden, shape.inner)
    else:
        shared_experts(block, shape.hidden, experts, correction=True)
