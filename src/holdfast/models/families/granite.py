"""IBM's Granite 3 (dense) and its mixtures: llama's tensors with scales on embedding, residuals and logits."""

from __future__ import annotations

from holdfast.models.families.llama import plain_tensors
from holdfast.models.fields import MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "granite"


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called({"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"})
    fields = source.fields
    shape = read_shape(source, max_position=None if source.gguf else 2048)
    biased = source.has_tensor("blk.0.attn_q.bias") or fields.boolean("attention_bias", default=False)
    bias = "qkvo" if biased else ""
    # GGUF leaves out what is as ever; config.json says one.
    usual = shape.head_dim**-0.5 if source.gguf else 1.0
    scale = fields.number("attention_multiplier", low=1e-6, high=1e6, default=usual)
    decoder = _decoder(source)
    # llama.cpp takes this, which elsewhere only tells of a model's past, for whether a Granite rotates at all.
    rotates = not source.gguf or fields.boolean("rope.scaling.finetuned", default=True)
    if source.architecture in ("GraniteForCausalLM", "granite"):
        mlp_bias = source.has_tensor("blk.0.ffn_up.bias") or fields.boolean("mlp_bias", default=False)
        found = plain_tensors(source, shape, biases=bias, mlp_bias=mlp_bias).found
        layers = [LayerSpec(index=index, rotates=rotates) for index in range(shape.layer_count)]
        return build_spec(
            source, shape, family=FAMILY, layers=layers, tensors=found, attention_scale=scale, decoder=decoder
        )
    count = fields.integer("num_experts", high=MAX_EXPERTS, default=... if source.gguf else 8)  # type: ignore[arg-type]
    used = fields.integer("num_experts_per_tok", high=count, default=min(2, count))
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "input_layernorm", "attn_norm")
        block.attention(shape, bias=bias, out_bias=bool(bias), turned=True)
        block.norm("mlp_norm", shape.hidden, "post_attention_layernorm", "ffn_norm")
        block.router(count, shape.hidden, "block_sparse_moe.router.layer")
        if source.gguf:
            block.experts(count, shape.hidden, shape.inner, "", "gate", "up", "down")
        else:
            stem = "block_sparse_moe"
            both = (count, 2 * shape.inner, shape.hidden)
            block.stacked("experts.gate_up", both, f"{stem}.input_linear.weight", axis=1)
            block.stacked("experts.down", (count, shape.hidden, shape.inner), f"{stem}.output_linear.weight", axis=2)
    tensors.end(shape)
    experts = ExpertsSpec(count=count, per_token=used, intermediate_size=shape.inner)
    layers = [LayerSpec(index=index, experts=experts, rotates=rotates) for index in range(shape.layer_count)]
    return build_spec(
        source, shape, family=FAMILY, layers=layers, tensors=tensors.found, attention_scale=scale, decoder=decoder
    )


def _decoder(source: ModelDescription) -> DecoderSpec:
    def factor(name: str) -> float:
        return source.fields.number(name, low=1e-6, high=1e6, default=1.0)

    return DecoderSpec(
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logits_scale=1.0 / factor("logits_scaling"),
    )
