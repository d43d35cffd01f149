"""A refusal names a field as the config spells it, not as most other configs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints import Checkpoint, StoredTensor, require_agreement
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, catalogue, describe_config

SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
CONFIGS = {
    "num_local_experts": {**SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "n_routed_experts": {
        **SMALL, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "first_k_dense_replace": 0,
    },
    "num_experts": {**SMALL, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
}  # fmt: skip


def stored(spec: ModelSpec) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, shape, "BF16", Path("model.safetensors"), 0, 2)
        for tensor in spec.tensors
        if not tensor.optional
        for name, shape in tensor.in_safetensors()
    }


@pytest.mark.parametrize("spelled", CONFIGS)
def test_experts(spelled: str) -> None:
    spec = describe_config(CONFIGS[spelled])
    tensors = stored(spec)
    require_agreement(spec, Checkpoint(tensors, "safetensors"))

    one = next(name for name in tensors if ".experts.3." in name)
    for changed in (
        {name: tensor for name, tensor in tensors.items() if ".experts.3." not in name},
        {**tensors, one.replace(".3.", ".4."): tensors[one]},
    ):
        with pytest.raises(CheckpointError) as caught:
            require_agreement(spec, Checkpoint(changed, "safetensors"))
        assert caught.value.field == spelled

    with pytest.raises(CheckpointError) as caught:
        describe_config({**CONFIGS[spelled], spelled: "many"})
    assert caught.value.field == spelled


@pytest.mark.parametrize(
    ("name", "field", "spelled"),
    [
        ("deepseek-v3", "num_experts", "n_routed_experts"),
        ("gpt-oss-20b", "num_experts", "num_local_experts"),
        ("mixtral-8x7b", "num_experts", "num_local_experts"),
        ("llama-4-scout", "num_experts", "num_local_experts"),
    ],
)
def test_of_known_models(name: str, field: str, spelled: str) -> None:
    assert describe_config(catalogue.find(name).config).spellings[field] == spelled
