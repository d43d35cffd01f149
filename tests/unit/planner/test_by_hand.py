"""Layers and experts that were set by hand to wait in RAM, where the planner would place them faster by itself."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigurationError
from holdfast.planner import api
from holdfast.planner.fit.placement import Placement
from holdfast.units import format_bytes


@pytest.mark.parametrize(
    "by_hand",
    [{"gpu_layers": 20}, {"cpu_offload_gb": 10}, {"n_cpu_moe": 30}, {"override_tensor": ("exps=CPU",)}],
    ids=str,
)
def test_what_is_faster_left_out_is_said_with_its_speed(by_hand: dict[str, object]) -> None:
    machine = {"gpu": "rtx3060", "ram": "32GiB"}
    found, left = (api.plan("qwen3-30b-a3b-gptq-int4", **machine, **one) for one in (by_hand, {}))
    assert left.offload is not None
    assert left.offload.throughput is not None
    speed = f"{left.offload.throughput.one.estimate.tokens_per_s:.0f}"
    said = " ".join(str(found).split())
    flag = found.question.settings.offload.flag
    assert f"leave {flag} out: about {speed} tokens/s of one sequence, with a context of 8,208" in said
    assert "with RAM for the experts alone" not in said


def test_what_is_as_fast_by_hand_is_left() -> None:
    machine = {"gpu": "rtx4090", "ram": "64GiB"}
    left = api.plan("llama-3.1-70b-awq", **machine)
    assert left.offload is not None
    assert isinstance(left.offload.placement, Placement)
    most = left.offload.placement.resident
    slow, fast = (api.plan("llama-3.1-70b-awq", **machine, gpu_layers=count) for count in (20, most))
    assert "leave --gpu-layers 20 out: about 1.3 tokens/s" in " ".join(str(slow).split())
    assert "leave --gpu-layers" not in str(fast)


@pytest.mark.parametrize(
    ("model", "gpu", "needed", "found"),
    [
        ("gpt-oss-120b", "rtx4090", "a model that Holdfast runs", "it lacks a decoder of the gpt_oss family"),
        ("qwen3-30b-a3b", "mi300x", "a GPU that Holdfast runs on", "Holdfast has kernels for NVIDIA GPUs only"),
        ("qwen3-30b-a3b", "rtx4090x2", "one GPU with memory of its own", "2 x rtx4090"),
    ],
)
def test_what_keeps_experts_out_of_ram_is_named(model: str, gpu: str, needed: str, found: str) -> None:
    with pytest.raises(ConfigurationError, match="experts cannot wait in RAM here") as caught:
        api.plan(model, gpu=gpu, ram="128GiB", n_cpu_moe=30)
    assert caught.value.code == "HF136"
    assert caught.value.needed == needed
    assert found in str(caught.value.found)


def test_ram_that_llama_cpp_takes_for_layers_is_said() -> None:
    found = api.plan("gpt-oss-120b", engine="llama.cpp", gpu="rtx4090", ram="128GiB")
    assert found.partly is not None
    takes = f"{format_bytes(found.partly.ram_bytes)} of it for the layers that the CPU computes"
    assert f"RAM: 128.00 GiB free, {takes}" in str(found)
