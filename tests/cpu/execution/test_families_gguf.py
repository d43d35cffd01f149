"""The same families from GGUF files, as llama.cpp's converter writes them: tokens equal those of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_gguf import KINDS, STILL_GRANITE, write_family_gguf
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.8],
    "long_factor": [1.5, 2.2, 2.9, 3.1, 4.0, 4.5],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "SeedOss": {"head_dim": 16, "attention_bias": True},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 24,  # GGUF keeps none: it goes by the width of a head
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3": {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 7},
    "Phi3": {"partial_rotary_factor": 0.75, "rope_parameters": LONG, "original_max_position_embeddings": 24},
    "Olmo2": {"num_key_value_heads": 4},
    "Granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.7,
    },
    "SmolLM3": {"num_hidden_layers": 5},
    "Starcoder2": {"norm_epsilon": 1e-4},
    "StableLm": {"use_qkv_bias": True},
}


class FromGguf:
    """What `driver_for` needs of a model, from a GGUF file of it."""

    def __init__(self, path: Path) -> None:
        self._files = locate(str(path), revision=None)
        self.spec = spec_of(self._files)

    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self._files)


@functools.cache
def written(folder: Path, family: str, oracle: Any) -> Path:
    path = folder / f"{family}.gguf"
    write_family_gguf(path, family, oracle.model)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("family", KINDS)
def test_a_gguf_gives_the_tokens_of_transformers(
    family: str, folder: Path, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles(family, **SETTINGS[family])
    driver = driver_for(FromGguf(written(folder, family, oracle)))
    prompt = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    driver.start(0, prompt)
    driver.step({0: 11})
    driver.generate(0, 8)
    oracle.assert_greedy(driver.tokens[0], 40)


def test_a_granite_may_not_rotate(tmp_path: Path, oracles: Callable[..., Any], driver_for: Callable[..., Any]) -> None:
    oracle = oracles("SmolLM3", num_hidden_layers=2, no_rope_layers=[0, 0])
    write_family_gguf(tmp_path / "still.gguf", STILL_GRANITE, oracle.model)
    driver = driver_for(FromGguf(tmp_path / "still.gguf"))
    driver.start(0, list(range(40, 70)))
    driver.generate(0, 8)
    oracle.assert_greedy(driver.tokens[0], 30)


def test_blocks_of_layers_that_do_not_rotate_are_fused_too(tmp_path: Path, driver_for: Callable[..., Any]) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model = FromGguf(tmp_path / "tiny.gguf")
    still = [replace(layer, rotates=False) for layer in model.spec.layers]
    model.spec = replace(model.spec, layers=tuple(still))
    answers = []
    for reference in (True, False):
        driver = driver_for(model, reference=reference)
        driver.start(0, list(range(40, 70)))
        answers.append(driver.generate(0, 8))
    assert answers[0] == answers[1]
