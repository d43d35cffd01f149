"""Bad configs of every family are refused by the field's name; what the engine lacks, by the feature's."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from examples import examples
from whole_tables import check_rows

from holdfast.errors import CheckpointError, ModelError, UnknownArchitectureError
from holdfast.models import describe_config, from_config, known_architectures, runnable_architectures

CONFIG: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    # Mixtures, in every spelling.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    # Hybrids.
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "hybrid_override_pattern": "M*-E",
    "moe_shared_expert_intermediate_size": 40,
    # Older names.
    "padded_vocab_size": 300,
    "ffn_hidden_size": 96,
    "num_layers": 4,
    "kv_channels": 16,
    "seq_length": 512,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "ffn_dim": 96,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 512,
}
FLAT = "ChatGLMForConditionalGeneration"
WRAPPED = tuple(name for name in known_architectures() if name.endswith("ForConditionalGeneration") and name != FLAT)
PLAIN = tuple(name for name in known_architectures() if name not in WRAPPED)


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    shape = {**CONFIG, **changes}
    if architecture == "MiniCPMForCausalLM":
        shape["num_experts"] = 0
    if architecture in PLAIN:
        return {"architectures": [architecture], **shape}
    return {"architectures": [architecture], "text_config": shape, "vision_config": {"num_hidden_layers": 1}}


def test_every_architecture_can_be_described() -> None:
    def check(architecture: str) -> None:
        spec = describe_config(config(architecture))
        assert spec.architecture == architecture
        assert spec.parameters >= spec.active_parameters > 0
        assert len({tensor.name for tensor in spec.tensors}) == len(spec.tensors)
        assert all(tensor.layer is None or tensor.layer < len(spec.layers) for tensor in spec.tensors)
        for tensor in spec.tensors:
            assert tensor.shard_axis is None or tensor.shard_axis < len(tensor.shape)
            assert sum(1 for _ in tensor.in_safetensors()) == (tensor.experts if "{expert}" in tensor.hf_name else 1)

    check_rows(known_architectures(), check, str)


def test_the_engine_says_what_it_lacks_for_others() -> None:
    def check(architecture: str) -> None:
        if architecture in runnable_architectures():
            assert from_config(config(architecture)).runnable
            return
        with pytest.raises(UnknownArchitectureError) as caught:
            from_config(config(architecture))
        assert architecture in str(caught.value)
        assert "LlamaForCausalLM" in str(caught.value)
        assert describe_config(config(architecture)).unsupported[0] in str(caught.value)

    check_rows(known_architectures(), check, str)


WORDS = [
    ("DbrxForCausalLM", "clipped q, k and v"),
    ("DeepseekV3ForCausalLM", "latent attention"),
    ("Qwen3NextForCausalLM", "recurrent layers"),
    ("Llama4ForCausalLM", "layers without rotary positions"),
    ("GptOssForCausalLM", "attention sinks"),
    ("Gemma3ForConditionalGeneration", "images"),
    ("CohereForCausalLM", "attention and MLP side by side"),
    ("BloomForCausalLM", "ALiBi positions"),
    ("BaichuanForCausalLM", "q, k and v in one matrix"),
]


@pytest.mark.parametrize(("architecture", "words"), WORDS)
def test_what_is_lacking_is_named(architecture: str, words: str) -> None:
    assert words in describe_config(config(architecture)).unsupported


BAD: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", "4"),
    ("hidden_size", 0),
    ("hidden_size", 1 << 60),
    ("hidden_size", 64.5),
    ("hidden_size", [64]),
    ("num_attention_heads", 10**12),
    ("num_attention_heads", True),
    ("vocab_size", -300),
    ("vocab_size", 10**18),
    ("tie_word_embeddings", "maybe"),
]
OLDER = {
    "GPT2LMHeadModel": {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "BloomForCausalLM": {"num_hidden_layers": "n_layer"},
    "ExaoneForCausalLM": {"num_hidden_layers": "num_layers"},
    "ChatGLMModel": {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size"},
    "ChatGLMForConditionalGeneration": {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size"},
    "DbrxForCausalLM": {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
}


def test_absurd_fields_are_named() -> None:
    def check(architecture: str) -> None:
        for field, value in BAD:
            name = OLDER.get(architecture, {}).get(field, field)
            with pytest.raises(CheckpointError) as caught:
                describe_config(config(architecture, **{name: value}))
            assert name in str(caught.value)
            assert caught.value.code == "HF230"

    check_rows(known_architectures(), check, str)


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("Qwen3ForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Gemma2ForCausalLM", {"layer_types": ["round_attention"] * 4}, "layer_types"),
        ("Gemma2ForCausalLM", {"layer_types": "full_attention"}, "layer_types"),
        ("Gemma2ForCausalLM", {"sliding_window": -5}, "sliding_window"),
        ("Gemma3ForCausalLM", {"head_dim": 7}, "head_dim"),
        ("MixtralForCausalLM", {"num_local_experts": 10**9}, "num_local_experts"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0] * 100}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("Exaone4ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": "LLX"}, "sliding_window_pattern"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "spiral"}}, "rope_scaling"),
        ("DbrxForCausalLM", {"ffn_config": [1]}, "ffn_config"),
        ("LlamaForCausalLM", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"7": {"head_dim": 32}}}, "per_layer_config"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"taste": 32}}}, "taste"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ("Gemma3nForCausalLM", {"intermediate_size": [96, 96]}, "intermediate_size"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-Q"}, "hybrid_override_pattern"),
        ("NemotronHForCausalLM", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("StableLmForCausalLM", {"num_attention_heads": 1024, "qk_layernorm": True}, "num_attention_heads"),
        ("DeepseekV32ForCausalLM", {"indexer_types": ["full", "shared", "full", "full"]}, "indexer_types"),
        ("MiniCPMForCausalLM", {"hidden_size": 63, "head_dim": None}, "hidden_size"),
    ],
)
def test_contradictions_name_the_field(architecture: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        describe_config(config(architecture, **changes))
    assert field in str(caught.value)


JUNK: list[Any] = [
    None, 0, 1, -1, 3, 10**9, 1 << 62, 1.5, float("nan"), float("inf"), "", "x", "auto", True, False,
    [], [1], [0] * 5, ["full_attention"] * 4, {}, {"a": 1}, {"1": {"head_dim": 3}}, [[[]]],
]  # fmt: skip
RARE = (
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "sliding_window_pattern",
    "quantization_config", "text_config", "vision_config", "ffn_config", "attn_config", "no_rope_layers", "moe_layers",
    "mlp_only_layers", "decoder_sparse_step", "per_layer_config", "num_kv_shared_layers", "partial_rotary_factor",
    "q_lora_rank", "first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers", "torch_dtype", "eos_token_id",
)  # fmt: skip


@pytest.mark.parametrize("architecture", known_architectures())
def test_junk_is_read_or_refused_and_nothing_else(architecture: str) -> None:
    random = Random(architecture)
    for _ in range(examples(120)):
        changed = config(architecture)
        target = changed.get("text_config", changed) if random.random() < 0.8 else changed
        for _ in range(random.choice((1, 1, 2, 4))):
            target[random.choice((*target, *RARE))] = random.choice(JUNK)
        try:
            spec = describe_config(changed)
        except ModelError:
            continue
        assert spec.parameters > 0
        assert min(map(spec.kv_elements, spec.layers)) >= 0


@pytest.mark.parametrize("architecture", WRAPPED)
def test_a_wrapper_without_its_text_model_is_refused(architecture: str) -> None:
    # Qwen2.5-VL's fields may be at the top, where the first of them is missing.
    named = "hidden_size" if architecture.startswith("Qwen2_5") else "text_config"
    with pytest.raises(CheckpointError, match=named):
        describe_config({"architectures": [architecture]})


def test_model_types_stand_in_for_missing_architectures() -> None:
    for model_type, architecture in (
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
    ):
        assert describe_config({**CONFIG, "model_type": model_type}).architecture == architecture
