"""config.json and GGUF headers of the llama family become ModelSpecs, or errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import CheckpointError, UnknownArchitectureError
from holdfast.models import ModelSpec, from_config, from_gguf

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": [str(number) for number in range(100)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
GGUF_NAMES = ("token_embd.weight", "output.weight", "blk.0.attn_q.weight")


def config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **changes}


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in spec.tensors}


def test_a_plain_config() -> None:
    spec = from_config(TINY)
    assert (spec.family, spec.architecture) == ("llama", "LlamaForCausalLM")
    assert (spec.heads, spec.kv_heads, spec.head_dim, len(spec.layers)) == (4, 2, 16, 2)
    assert spec.rope.theta == 10_000.0
    assert spec.rope.dim == 16
    assert spec.attention_scale == 0.25
    assert spec.stored_dtype == "float32"
    assert all(layer.window is None for layer in spec.layers)


def test_every_tensor_has_its_names_shape_and_shard_axis() -> None:
    spec = from_config(TINY)
    by_name = {tensor.name: tensor for tensor in spec.tensors}
    assert len(by_name) == len(spec.tensors) == 3 + 2 * 9
    assert shapes(spec)["embed"] == shapes(spec)["head"] == (100, 64)
    assert shapes(spec)["layers.1.k"] == (32, 64)
    assert shapes(spec)["layers.1.down"] == (64, 96)
    query = by_name["layers.1.q"]
    assert query.hf_name == "model.layers.1.self_attn.q_proj.weight"
    assert query.gguf_name == "blk.1.attn_q.weight"
    assert (query.gguf_turn, query.heads, query.layer) == ("unpermute_rope", 4, 1)
    assert (by_name["layers.0.k"].gguf_turn, by_name["layers.0.k"].heads) == ("unpermute_rope", 2)
    assert by_name["layers.0.v"].gguf_turn == "none"
    axes = {name.removeprefix("layers.0."): tensor.shard_axis for name, tensor in by_name.items()}
    assert [axes[name] for name in ("embed", "q", "k", "v", "gate", "up", "head")] == [0] * 7
    assert [axes[name] for name in ("o", "down")] == [1, 1]
    assert axes["attn_norm"] is axes["mlp_norm"] is axes["final_norm"] is None
    assert spec.parameters == 2 * 100 * 64 + 64 + 2 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 128)


def test_tied_embeddings_have_no_head() -> None:
    spec = from_config(config(tie_word_embeddings=True))
    assert spec.tied_embeddings
    assert "head" not in shapes(spec)


def test_attention_bias_adds_four_biases_a_layer() -> None:
    by_name = {tensor.name: tensor for tensor in from_config(config(attention_bias=True)).tensors}
    assert by_name["layers.0.k_bias"].shape == (32,)
    assert by_name["layers.0.k_bias"].shard_axis == 0
    assert by_name["layers.0.q_bias"].gguf_turn == "unpermute_rope"
    assert by_name["layers.0.o_bias"].shard_axis is None
    assert by_name["layers.0.o_bias"].hf_name == "model.layers.0.self_attn.o_proj.bias"


def test_head_dim_given_or_derived() -> None:
    assert from_config(config(head_dim=32)).head_dim == 32
    assert shapes(from_config(config(head_dim=32)))["layers.0.o"] == (64, 128)
    assert from_config(config(head_dim=None)).head_dim == 16


def test_kv_heads_default_to_heads() -> None:
    assert from_config(config(num_key_value_heads=None)).kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": 128}, 128), ({"sliding_window": None}, None), ({}, 4096)],
)
def test_mistral_windows(changes: dict[str, Any], window: int | None) -> None:
    spec = from_config(config(architectures=["MistralForCausalLM"], max_position_embeddings=8192, **changes))
    assert [layer.window for layer in spec.layers] == [window, window]


def test_a_window_as_long_as_the_context_is_none() -> None:
    spec = from_config(config(architectures=["MistralForCausalLM"], sliding_window=512))
    assert [layer.window for layer in spec.layers] == [None, None]


def test_llama_ignores_a_window_it_does_not_have() -> None:
    assert from_config(config(sliding_window=128)).layers[0].window is None


def test_model_type_stands_in_for_a_missing_architecture() -> None:
    bare = {key: value for key, value in TINY.items() if key != "architectures"}
    assert from_config({**bare, "model_type": "mistral"}).architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, None, (2,)), ([2, 3], None, (2, 3)), (2, [3, 2], (2, 3)), (None, 5, (5,)), (None, None, ())],
)
def test_ends_are_merged(own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert from_config(config(eos_token_id=own), {"eos_token_id": generation}).eos_token_ids == expected


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 500_000.0, **LLAMA3}},
        {"rope_theta": 500_000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
    ],
)
def test_llama3_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    spec = from_config(config(max_position_embeddings=131_072, **spelling))
    assert (spec.rope.scaling, spec.rope.theta, spec.rope.factor) == ("llama3", 500_000.0, 8.0)
    assert spec.rope.original_max_position == 8192
    assert spec.max_position == 131_072


def test_linear_scaling_stretches_the_context() -> None:
    spec = from_config(config(rope_scaling={"type": "linear", "factor": 4.0}))
    assert (spec.rope.scaling, spec.max_position) == ("linear", 2048)


def test_yarn() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    spec = from_config(config(rope_scaling=scaling))
    assert spec.max_position == 1024
    assert spec.rope.attention_factor == pytest.approx(1.1386294361)
    given = from_config(config(rope_scaling={**scaling, "attention_factor": 0.5, "beta_fast": 16}))
    assert (given.rope.attention_factor, given.rope.beta_fast) == (0.5, 16.0)
    balanced = from_config(config(rope_scaling={**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}))
    assert balanced.rope.attention_factor == 1.0


def test_default_rope_type_is_no_scaling() -> None:
    spec = from_config(config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert (spec.rope.scaling, spec.rope.theta) == ("none", 5e5)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("dynamic", "dynamic"), ("longrope", "longrope"), ("su", "longrope"), ("mrope", "mrope"), ("spiral", "spiral")],
)
def test_other_scalings_are_refused_by_name(kind: str, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        from_config(config(rope_scaling={"rope_type": kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", 1 << 40),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", 66),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("vocab_size", None),
        ("vocab_size", 1 << 60),
        ("intermediate_size", []),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "small"),
        ("hidden_act", "swish9000"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 100),
        ("eos_token_id", ["2"]),
        ("bos_token_id", -1),
        ("rope_theta", 0),
        ("rope_scaling", "linear"),
        ("torch_dtype", "float8"),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_config(config(**{field: value}))
    assert field in str(caught.value)
    assert caught.value.needed


def test_contradicting_rope_tables_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_scaling"):
        from_config(config(rope_parameters=LLAMA3, rope_scaling={"type": "linear", "factor": 2.0}))


@pytest.mark.parametrize("named", [["Qwen17ForCausalLM"], [], None])
def test_unknown_architectures_are_refused_with_where_the_known_ones_are(named: Any) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        from_config(config(architectures=named, model_type="qwen17"))
    assert "qwen17" in str(caught.value).lower()
    assert "holdfast models" in (caught.value.fix or "")


def test_a_gguf_header() -> None:
    spec = from_gguf(GGUF, GGUF_NAMES)
    plain = from_config(TINY)
    assert spec.tensors == plain.tensors
    assert (spec.architecture, spec.vocab_size, spec.max_position) == ("llama", 100, 512)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.rope == plain.rope


def test_gguf_without_output_is_tied() -> None:
    assert from_gguf(GGUF, ("token_embd.weight",)).tied_embeddings


def test_gguf_rope_freqs_and_biases_are_found_by_their_tensors() -> None:
    names = (*GGUF_NAMES, "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias")
    found = shapes(from_gguf(GGUF, names))
    assert found["rope_freqs"] == (8,)
    assert found["layers.1.v_bias"] == (32,)
    assert "layers.1.o_bias" not in found


def test_gguf_scalings_windows_and_further_ends() -> None:
    more = {
        "llama.vocab_size": 120,
        "llama.rope.freq_base": 500_000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.attention.sliding_window": 64,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 0xFFFFFFFF,
    }
    spec = from_gguf({**GGUF, **more}, GGUF_NAMES)
    assert (spec.rope.scaling, spec.rope.theta, spec.max_position) == ("yarn", 500_000.0, 512)
    assert (spec.vocab_size, spec.layers[0].window) == (120, 64)
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, (2, 7))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama.block_count", 0),
        ("llama.embedding_length", None),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count_kv", 3),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.attention.value_length", 32),
        ("tokenizer.ggml.eos_token_id", 5000),
    ],
)
def test_a_bad_gguf_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field):
        from_gguf({**GGUF, field: value}, GGUF_NAMES)


@pytest.mark.parametrize("name", ["gemma17", None, 7])
def test_unknown_gguf_architecture(name: Any) -> None:
    with pytest.raises(UnknownArchitectureError, match="holdfast models"):
        from_gguf({**GGUF, "general.architecture": name}, GGUF_NAMES)
