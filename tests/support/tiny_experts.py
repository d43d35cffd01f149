"""A tiny model with experts: a config for dummy weights, with the built-in model's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "norm_topk_prob": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip


def write_tiny_experts(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
