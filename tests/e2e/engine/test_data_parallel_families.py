"""Two engines behind one API of models with experts and with windows: 32 streams say what one engine says, and both
engines have a part in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import PATIENCE_S
from story_streams import all_streams, told_by_one
from tiny_experts import CONFIG

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=["qwen3-moe", "gemma3"])
async def test_streams_of_two_engines_say_what_one_says(
    config: dict[str, Any], start_server: Callable[..., Any], tiny_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = start_server(str(tmp_path), *tiny_arguments[1:], "-dp", "2").wait_ready()
    assert await all_streams(server.url) == told_by_one(tmp_path)
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    counts = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert len(counts) == 2
    assert all(float(line.rpartition(" ")[2]) > 0 for line in counts), counts
