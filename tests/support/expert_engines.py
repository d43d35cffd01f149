"""Engines of dummies in float32, in this process on a GPU; and a model whose experts a small budget does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from many_streams import STREAMS

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.startup.build import build_core, find_model
from holdfast.units import MIB

LAYERS, EXPERTS = 8, 32
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "vocab_size": 102400,
    "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_experts": EXPERTS,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = 2500 * MIB
"""A budget in which some of its experts stay, and others wait."""


def built(folder: Path | str, **more: Any) -> EngineCore:
    config = EngineConfig.from_arguments(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="float32",
        max_model_len=1024, max_num_seqs=STREAMS, max_num_batched_tokens=512, **more,
    )  # fmt: skip
    return build_core(config, find_model(config), lambda stage, done, total: None)[0]
