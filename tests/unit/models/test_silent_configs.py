"""What a config.json leaves out means what transformers' class of that model says, for every family that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, describe_config, runnable_architectures

ARCHITECTURES = [name for name in runnable_architectures() if name.endswith("ForCausalLM")]
CLASSES = {"Gemma3ForCausalLM": "Gemma3TextConfig"}
LAYERS = 8
NOT_OF_THE_MODEL = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version")
REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
}
"""A config without one of these is refused: nothing published leaves them out, so that it says that a file is torn."""


def usual(architecture: str) -> dict[str, Any]:
    """A class's own defaults, with as many layers as every pattern of layers needs to repeat; its ends may lie outside
    of its own vocabulary."""
    kind = CLASSES.get(architecture, architecture.removesuffix("ForCausalLM") + "Config")
    config: dict[str, Any] = getattr(transformers, kind)(num_hidden_layers=LAYERS).to_dict()
    return {**config, "architectures": [architecture], "bos_token_id": None, "eos_token_id": None}


def described(config: dict[str, Any]) -> ModelSpec | None:
    """None: refused."""
    try:
        return replace(describe_config(config), spellings={})
    except CheckpointError:
        return None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_silence_means_the_class_s_default(architecture: str) -> None:
    whole = usual(architecture)
    expected = described(whole)
    assert expected is not None
    assert expected.runnable
    for name in whole:
        if name in NOT_OF_THE_MODEL:
            continue
        silent = {key: value for key, value in whole.items() if key != name}
        found = described(silent)
        assert found == expected or (found is None and name in REQUIRED), name


def windows(architecture: str, **changes: Any) -> list[int | None]:
    config = {**usual(architecture), "num_hidden_layers": 4, "layer_types": None, **changes}
    return [layer.window for layer in describe_config(config).layers]


def test_a_null_is_no_window() -> None:
    used = {"use_sliding_window": True, "max_window_layers": 0}
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        assert windows(architecture, **used, sliding_window=None) == [None] * 4
        assert windows(architecture, **used, sliding_window=64) == [64] * 4
    listed = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(CheckpointError) as caught:
        windows("Qwen2ForCausalLM", **used, sliding_window=None, layer_types=listed)
    assert caught.value.field == "sliding_window"


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_windows_are_in_the_layers_where_transformers_has_them(architecture: str) -> None:
    kind = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    types = kind(num_hidden_layers=5, **changes).layer_types
    expected = [64 if one == "sliding_attention" else None for one in types]
    assert len(set(expected)) == 2
    assert windows(architecture, **{**changes, "num_hidden_layers": 5}) == expected


def test_a_third_mixture_s_window_is_in_all_layers() -> None:
    assert windows("Qwen3MoeForCausalLM", use_sliding_window=True, sliding_window=64, max_window_layers=3) == [64] * 4


def test_a_null_of_key_heads_is_as_many_as_heads_where_silence_is_not() -> None:
    for architecture, usually in (("MistralForCausalLM", 8), ("MixtralForCausalLM", 8), ("SeedOssForCausalLM", 8)):
        config = {**usual(architecture), "num_attention_heads": 16, "num_key_value_heads": None}
        assert describe_config(config).kv_heads == 16
        del config["num_key_value_heads"]
        assert describe_config(config).kv_heads == usually
