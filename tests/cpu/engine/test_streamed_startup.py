"""A start with streamed layers that was planned holds, with what an H200 was seen to take of it; and what a second plan
counts with after a start that failed."""

from __future__ import annotations

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.startup import build_gpu
from holdfast.hardware import Memory, gpus
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import catalogue
from holdfast.planner import Plan, settle_pool
from holdfast.planner.models.variants import planned
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.units import GIB, MIB

KERNELS = 163 * MIB
"""Loaded by the profile run of a 70B model in int4, and counted by no term."""
ACTIVATIONS, LOGITS = 10 * MIB, -22 * MIB
"""What these took beyond their plan."""


def served(vram: str, **settings: object) -> Plan:
    total = 141 * GIB
    card = NvidiaGpu(
        index=0,
        uuid="GPU-0",
        name="H200",
        total_bytes=total,
        free_bytes=total,
        capability=(9, 0),
        known=gpus.find("h200"),
    )
    model = planned(catalogue.find("llama-3.1-70b-awq"))
    assert model is not None
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", vram=vram, **settings)
    host = Memory(total_bytes=256 * GIB, available_bytes=256 * GIB, limited_by="machine")
    return make_gpu_plan(model.spec, None, config, [card], name="model", host=host)


def started(plan: Plan, kernels: int) -> Plan:
    """With its pool as it would be after the profile run."""
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"} | {"graphs": 0}
    measured["activations"] += ACTIVATIONS
    measured["logits"] += LOGITS
    taken = build_gpu._taken(plan, measured, sum(measured.values()) + kernels)
    return settle_pool(plan, 141 * GIB, taken)


@pytest.mark.parametrize("kernels", [144 * MIB, KERNELS, 217 * MIB])
def test_a_context_that_was_set_and_planned_holds(kernels: int) -> None:
    for length in range(4096, 32257, 1536):
        plan = served("22.93GiB", max_model_len=length)
        assert plan.engine.streamed is not None
        assert started(plan, kernels).limits.max_model_len == length


def test_kernels_that_are_loaded_are_not_to_come() -> None:
    plan = served("22.93GiB", max_model_len=8192)
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"} | {"graphs": 0}
    held = sum(measured.values())
    assert build_gpu._taken(plan, measured, held)["graphs"] == plan.terms["graphs"] > 0
    assert build_gpu._taken(plan, measured, held + 100 * MIB)["graphs"] == plan.terms["graphs"] - 100 * MIB
    assert build_gpu._taken(plan, measured, held + KERNELS)["graphs"] == 0
