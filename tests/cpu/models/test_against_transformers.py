"""Every family's tensors, held against the model that transformers builds from the same config.

The models are small and on the meta device: names and shapes, no numbers. transformers' own way back to the names of
published checkpoints is taken, so that what is compared is what lies on disk.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from holdfast.models import ModelSpec, describe_config

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}

LAYERS = ["sliding_attention", "full_attention"] * 2
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 200,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "intermediate_size": [96, 96, 80, 80],
    "layer_types": LAYERS,
    "activation_sparsity_pattern": [0.0] * 4,
    "head_dim": 16,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": LAYERS,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 200,
}
GRANITE_HYBRID: dict[str, Any] = {
    "num_local_experts": 3,
    "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}
NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "hybrid_override_pattern": "M*-E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 20}),
    ("mistral", {}),
    ("ministral", {"head_dim": 16}),
    ("ministral3", {}),
    ("smollm3", {}),
    ("mixtral", {"num_local_experts": 3}),
    ("phimoe", {"num_local_experts": 3}),
    ("phimoe", {"num_local_experts": 3, "attention_bias": True, "lm_head_bias": True}),
    ("minimax_m2", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ("llama4_text", {"intermediate_size_mlp": 80, "num_local_experts": 3, "head_dim": 16}),
    ("llama4_text", {"num_local_experts": 3, "num_hidden_layers": 4, "interleave_moe_layer_step": 2}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 24}),
    ("seed_oss", {"head_dim": 16}),
    ("qwen2_moe", SHARED),
    ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [1]}),
    ("qwen3_moe", QWEN_EXPERTS),
    ("qwen3_moe", {**QWEN_EXPERTS, "attention_bias": True, "mlp_only_layers": [0]}),
    ("qwen3_next", {**SHARED, "num_hidden_layers": 4, "linear_num_value_heads": 32, "linear_value_head_dim": 12}),
    ("qwen3_5_text", {"num_hidden_layers": 4, "linear_value_head_dim": 12}),
    ("qwen3_5_moe_text", {**SHARED, "num_hidden_layers": 4}),
    ("gemma", {"head_dim": 20}),
    ("gemma2", {"head_dim": 20}),
    ("gemma3_text", {"head_dim": 20}),
    ("gemma3_text", {"head_dim": 20, "tie_word_embeddings": False}),
    ("gemma3n_text", GEMMA3N),
    ("gemma4_text", GEMMA4),
    ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 3,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
        },
    ),
    ("phi", {}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {}),
    ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 1, "attention_bias": True}),
    ("deepseek_v3", {**LATENT, "n_group": 2, "topk_group": 1}),
    ("deepseek_v32", {**LATENT, "index_n_heads": 3, "index_head_dim": 12, "n_group": 2, "topk_group": 1}),
    ("glm_moe_dsa", {**LATENT, "index_n_heads": 3, "index_head_dim": 12}),
    ("gpt_oss", {"num_local_experts": 3, "head_dim": 16, "num_experts_per_tok": 2}),
    ("cohere", {}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("cohere2", {"num_hidden_layers": 4}),
    ("glm", {}),
    ("glm4", {"attention_bias": True}),
    ("glm4_moe", {**LATENT, "num_key_value_heads": 2, "head_dim": 20, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {**LATENT, "num_key_value_heads": 2, "first_k_dense_replace": 0}),
    ("falcon", {}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    ("bloom", {"n_layer": 2, "n_head": 4}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False}),
    ("stablelm", {}),
    ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("olmoe", {"num_experts": 3, "num_experts_per_tok": 2}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("granitemoe", {"num_local_experts": 3}),
    ("granitemoehybrid", GRANITE_HYBRID),
    ("granitemoehybrid", {**GRANITE_HYBRID, "num_local_experts": 0}),
    (
        "jamba",
        {
            "num_experts": 3,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 6,
        },
    ),
    ("exaone4", {}),
    ("nemotron_h", NEMOTRON_H),
    ("nemotron", {}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 3, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        },
    ),
]


def on_disk(model: Any, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint; a tied head is stored once, as the embedding."""
    stored = revert_weight_conversion(model, model.state_dict())
    heads = ("lm_head.weight", "embed_out.weight")
    return {name: tuple(tensor.shape) for name, tensor in stored.items() if not (tied and name.endswith(heads))}


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    # transformers builds no draft layers.
    pairs = [pair for tensor in spec.tensors if tensor.part != "draft" for pair in tensor.in_safetensors()]
    assert len(dict(pairs)) == len(pairs), "two tensors of one name"
    assert len({tensor.name for tensor in spec.tensors}) == len(spec.tensors)
    return dict(pairs)


def described(config: Any, model: Any) -> ModelSpec:
    """By way of JSON, as a config.json is."""
    return describe_config({**json.loads(json.dumps(config.to_dict())), "architectures": [type(model).__name__]})


@pytest.mark.parametrize(
    ("model_type", "changes"), CASES, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(CASES)]
)
def test_tensors_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = described(config, model)
    assert expected(spec) == on_disk(model, spec.tied_embeddings)
    assert spec.tied_embeddings == bool(config.get_text_config().tie_word_embeddings)
    assert len(spec.layers) == config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("head", [False, True])
def test_gemma3_with_its_vision_tower(head: bool) -> None:
    text = {**SMALL, "head_dim": 20}
    config = transformers.Gemma3Config(text_config=text, vision_config={**VISION, "vision_use_head": head})
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    spec = described(config, model)
    # Published checkpoints have one more step in these names than today's transformers writes.
    ours = {
        name.replace("vision_tower.vision_model.", "vision_tower."): shape for name, shape in expected(spec).items()
    }
    assert ours == on_disk(model, spec.tied_embeddings)
    assert not spec.runnable


def test_llama4_with_its_vision_tower() -> None:
    text = {**SMALL, "intermediate_size_mlp": 80, "num_local_experts": 3, "head_dim": 16}
    more = {"intermediate_size": 128, "projector_input_dim": 48, "projector_output_dim": 40, "vision_output_dim": 40}
    config = transformers.Llama4Config(text_config=text, vision_config={**VISION, **more})
    with torch.device("meta"):
        model = transformers.Llama4ForConditionalGeneration(config)
    spec = described(config, model)
    assert expected(spec) == on_disk(model, tied=False)


def test_mistral3_with_its_vision_tower() -> None:
    text = {**SMALL, "model_type": "mistral", "head_dim": 16}
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.Mistral3ForConditionalGeneration(config)
    spec = described(config, model)
    assert expected(spec) == on_disk(model, spec.tied_embeddings)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_qwen35_with_its_vision_tower(kind: str) -> None:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
    more = SHARED if kind == "Qwen3_5Moe" else {}
    config_type, model_type = (getattr(transformers, f"{kind}{end}") for end in ("Config", "ForConditionalGeneration"))
    config = config_type(text_config={**SMALL, **more, "num_hidden_layers": 4}, vision_config=vision)
    with torch.device("meta"):
        model = model_type(config)
    spec = described(config, model)
    assert expected(spec) == on_disk(model, tied=False)


@pytest.mark.parametrize("clipped", [False, True])
def test_gemma4_with_its_vision_tower(clipped: bool) -> None:
    vision = {**VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 10}
    vision |= {"use_clipped_linears": clipped, "standardize": not clipped}
    text = {**SMALL, **GEMMA4}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    with torch.device("meta"):
        model = transformers.Gemma4ForConditionalGeneration(config)
    spec = described(config, model)
    assert expected(spec) == on_disk(model, tied=True)
