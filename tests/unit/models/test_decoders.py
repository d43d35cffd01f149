"""What families say of their decoders, and variants of them that nobody mapped: those are refused by the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.errors import CheckpointError
from holdfast.models import DecoderSpec, ModelSpec, describe_config, from_config

CONFIG: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def spec_of(architecture: str, **changes: Any) -> ModelSpec:
    return from_config({"architectures": [f"{architecture}ForCausalLM"], **CONFIG, **changes})


def test_llama_is_what_a_decoder_is_by_itself() -> None:
    for architecture in ("Llama", "Mistral", "Qwen2", "SmolLM3"):
        assert spec_of(architecture).decoder == DecoderSpec()


def test_a_null_takes_gemma_2_its_caps_and_silence_does_not() -> None:
    assert spec_of("Gemma2").decoder.attention_softcap == 50.0
    assert spec_of("Gemma2", final_logit_softcapping=7).decoder.logits_softcap == 7.0
    without = spec_of("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None).decoder
    assert without.attention_softcap == without.logits_softcap == 0.0
    assert without.embedding_scale == math.sqrt(64)


def test_gemma_3_rotates_windows_by_a_base_of_their_own() -> None:
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    spec = spec_of("Gemma3", sliding_window=64, sliding_window_pattern=2, **older)
    local, whole = (spec.rope_of(spec.layers[index]) for index in (0, 1))
    assert local is not None
    assert whole is not None
    assert (local.theta, local.scaling, whole.theta, whole.scaling) == (2e4, "none", 5e5, "linear")
    silent = spec_of("Gemma3", sliding_window=64, sliding_window_pattern=2)
    assert [rope.theta for layer in silent.layers if (rope := silent.rope_of(layer))] == [1e4, 1e6, 1e4, 1e6]


def test_smollm3_tells_which_layers_rotate() -> None:
    assert [layer.rotates for layer in spec_of("SmolLM3").layers] == [True, True, True, False]
    assert [layer.rotates for layer in spec_of("SmolLM3", no_rope_layer_interval=2).layers] == [True, False] * 2
    assert spec_of("SmolLM3", no_rope_layers=[0, 1, 1, 1]).rope_of(spec_of("SmolLM3").layers[3]) is None


def test_long_rope_is_sized_by_what_the_model_was_first_made_for() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"type": "su", "original_max_position_embeddings": 100, **factors}
    spec = spec_of("Phi3", original_max_position_embeddings=128, rope_scaling=scaling)
    assert (spec.rope.original_max_position, spec.rope.factor) == (128, 4.0)
    assert spec.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma3", {"use_bidirectional_attention": True}, "later tokens"),
    ("Gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
    ("Gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
    (
        "Phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
        "short_factor",
    ),
    (
        "Phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
        "long_factor",
    ),
    ("Phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor"),
    ("Qwen2", {"rope_scaling": {"type": "mrope"}}, "mrope"),
    ("Qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("Qwen3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "longrope"),
    ("Granite", {"residual_multiplier": 0}, "residual_multiplier"),
    ("Granite", {"logits_scaling": "8"}, "logits_scaling"),
    ("SmolLM3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
    ("SmolLM3", {"no_rope_layers": [1, 1, 2, 1]}, "no_rope_layers"),
    ("Starcoder2", {"hidden_act": "relu2"}, "hidden_act"),
    ("StableLm", {"use_parallel_residual": True}, "side by side"),
    ("StableLm", {"qk_layernorm": True}, "qk_layernorm"),
]


@pytest.mark.parametrize(("architecture", "changes", "words"), REFUSED)
def test_variants_that_nobody_mapped_are_refused(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        spec_of(architecture, **changes)


@pytest.mark.parametrize("architecture", ["Olmo", "Olmo3", "Olmoe", "GraniteMoe", "Cohere2", "InternLM2"])
def test_neighbours_that_do_not_run_are_still_planned(architecture: str) -> None:
    config = {"architectures": [f"{architecture}ForCausalLM"], **CONFIG, "num_experts": 4, "num_local_experts": 4}
    assert not describe_config({**config, "num_experts_per_tok": 2}).runnable
