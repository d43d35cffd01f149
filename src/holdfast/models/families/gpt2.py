"""GPT-2: learned positions, LayerNorm with biases, matrices stored [in, out]."""

from __future__ import annotations

from holdfast.models.fields import MAX_WIDTH
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "gpt2"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    "num_key_value_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}


def describe(source: ModelDescription) -> ModelSpec:
    source = source.called(_NAMES)
    shape = read_shape(
        source,
        inner=4 * source.fields.integer("hidden_size", high=MAX_WIDTH),
        tied=True,
        eps="layer_norm_eps",
        act="activation_function",
        act_default="gelu_new",
        rotary=0.0,
    )
    tensors = TensorList("transformer.", "h")
    tensors.embed(shape, "wte")
    tensors.add("positions", (shape.max_position, shape.hidden), "transformer.wpe.weight", "position_embd.weight")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "ln_1", "attn_norm", bias=True)
        rows = 3 * shape.query
        block.linear("qkv", rows, shape.hidden, "attn.c_attn", "attn_qkv", axis=0, bias=True, transposed=True)
        block.linear("o", shape.hidden, shape.query, "attn.c_proj", "attn_output", axis=1, bias=True, transposed=True)
        block.norm("mlp_norm", shape.hidden, "ln_2", "ffn_norm", bias=True)
        block.plain_mlp(shape.hidden, shape.inner, "mlp.c_fc", "mlp.c_proj", bias=True, transposed=True)
    tensors.end(shape, "ln_f", bias=True)
    features = ("learned positions", "norms with biases", "an MLP without a gate", "q, k and v in one matrix")
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
