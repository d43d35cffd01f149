"""Layers and experts that were set by hand to wait in RAM, where the planner would place them faster by itself."""

from __future__ import annotations

import pytest

from holdfast.planner import api
from holdfast.planner.fit.placement import Placement


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
