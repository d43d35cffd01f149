"""Who starts ranks: vLLM's words, and what of them is refused."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
        {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": "uni"},
        {"ray_workers_use_nsight": True, "distributed_executor_backend": "ray"},
    ],
)
def test_words_of_vllm_are_taken(settings: dict[str, object]) -> None:
    found = EngineConfig.from_arguments(**settings).distributed_executor_backend
    assert found == settings.get("distributed_executor_backend")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher is not supported"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni is one process, and there are 2"),
        ({"distributed_executor_backend": "ray", "nnodes": 2, "pipeline_parallel_size": 2}, "Ray decides itself"),
        ({"distributed_executor_backend": "ray", "data_parallel_size": 2}, "on one machine so far"),
        ({"distributed_executor_backend": OrderedDict}, "code named in a setting is never run"),
        ({"distributed_executor_backend": "slurm"}, "distributed_executor_backend"),
        ({"worker_use_ray": True}, "it is called --distributed-executor-backend ray"),
    ],
)
def test_what_contradicts_or_is_not_there_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EngineConfig.from_arguments(**settings)
