"""EXAONE 3 and 3.5 (llama's build under GPT-2's names) and 4 (norms after attention and MLP, windows in the 32B)."""

from __future__ import annotations

from holdfast.models.source import ModelDescription, build_spec, read_shape, read_windows
from holdfast.models.spec import LayerSpec, ModelSpec
from holdfast.models.tensors import TensorList

FAMILY = "exaone"

_NAMES: dict[str, str | tuple[str, ...]] = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),
    "rms_norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
    "hidden_act": ("activation_function", "hidden_act"),
}


def describe(source: ModelDescription) -> ModelSpec:
    if source.architecture in ("ExaoneForCausalLM", "exaone"):
        return _third(source.called(_NAMES))
    shape = read_shape(source, max_position=None if source.gguf else 2048)
    tensors = TensorList()
    tensors.embed(shape)
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.attention(shape)
        block.norm("q_norm", shape.head_dim, "self_attn.q_norm", "attn_q_norm")
        block.norm("k_norm", shape.head_dim, "self_attn.k_norm", "attn_k_norm")
        block.norm("post_attn_norm", shape.hidden, "post_attention_layernorm", "post_attention_norm")
        block.gated_mlp(shape.hidden, shape.inner)
        block.norm("post_mlp_norm", shape.hidden, "post_feedforward_layernorm", "post_ffw_norm")
    tensors.end(shape)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[
            LayerSpec(index=index, window=window) for index, window in enumerate(_windows(source, shape.layer_count))
        ],
        tensors=tensors.found,
        features=("norms on queries and keys", "norms after attention and MLP"),
    )


def _windows(source: ModelDescription, count: int) -> tuple[int | None, ...]:
    """The pattern is a period, or one letter a layer of it: LLLG."""
    fields = source.fields
    if not fields.has("sliding_window"):
        return (None,) * count
    pattern = 4 if source.gguf else fields.get("sliding_window_pattern", "a period or letters", 4)
    if isinstance(pattern, str) and 0 < len(pattern) <= count and set(pattern) <= {"L", "G"}:
        # The last layer attends to everything whatever the letters say.
        return read_windows(source, count, lambda index: pattern[index % len(pattern)] == "L" and index != count - 1)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or not 0 <= pattern <= count + 4:
        raise fields.wrong("sliding_window_pattern", "a period, or letters L and G", pattern)
    return read_windows(source, count, lambda index: pattern > 0 and (index + 1) % pattern != 0)


def _third(source: ModelDescription) -> ModelSpec:
    shape = read_shape(source, max_position=None if source.gguf else 2048)
    tensors = TensorList("transformer.", "h")
    tensors.embed(shape, "wte")
    for index in range(shape.layer_count):
        block = tensors.block(index)
        block.norm("attn_norm", shape.hidden, "ln_1", "attn_norm")
        block.attention(shape, "attn.attention", out="out_proj", turned=True)
        block.norm("mlp_norm", shape.hidden, "ln_2", "ffn_norm")
        block.gated_mlp(shape.hidden, shape.inner, "mlp", gate="c_fc_0", up="c_fc_1", down="c_proj")
    tensors.end(shape, "ln_f")
    if source.has_tensor("rope_freqs.weight"):
        tensors.add("rope_freqs", (shape.rope.dim // 2,), "", "rope_freqs.weight", optional=True)
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found)
