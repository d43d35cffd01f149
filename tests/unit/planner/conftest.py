"""Questions to plan: catalogue models with their real numbers, on catalogue GPUs or a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from named_gpus import device_of

from holdfast.hardware import gpus
from holdfast.models import ModelSpec, catalogue
from holdfast.models.registry import describe_config
from holdfast.planner.fit.search import Question
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.units import GIB

Ask = Callable[..., Question]


@cache
def spec_of(name: str) -> ModelSpec:
    return describe_config(catalogue.find(name).config)


@cache
def model_of(name: str, runs_here: bool) -> PlannedModel:
    """The same object for all tests: what the planner counts of a model it counts once."""
    spec = spec_of(name) if runs_here else replace(spec_of(name), unsupported=("something",))
    return PlannedModel(name=catalogue.find(name).hub_id, spec=spec, origin="catalogue")


def gpu_device(name: str, index: int = 0, **changes: Any) -> Device:
    gpu = gpus.find(name)
    given = {"index": index, "name": gpu.name, "kind": "gpu", "total_bytes": gpu.usable_bytes, "gpu": gpu}
    return Device(**{**given, "free_bytes": gpu.usable_bytes, **changes})


def cpu_device(free_gib: float, total_gib: float | None = None) -> Device:
    total = int((free_gib if total_gib is None else total_gib) * GIB)
    return Device(index=0, name="CPU", kind="cpu", total_bytes=total, free_bytes=int(free_gib * GIB), measured=True)


def make_question(
    model: str,
    gpu: str | None = None,
    *,
    count: int = 1,
    device: Device | None = None,
    traffic: tuple[int, int, int] | None = None,
    ram_bytes: int | None = None,
    runs_here: bool = True,
    **settings: Any,
) -> Question:
    """`traffic`: concurrency, prompt tokens, output tokens. `runs_here` False: this engine lacks something for it, so
    that it is counted as others allocate."""
    if device is None:
        assert gpu is not None
        device = device_of(gpu)
    devices = tuple(Device(**{**_fields(device), "index": index}) for index in range(count))
    return Question(
        model=model_of(model, runs_here),
        machine=Machine(devices=devices, ram_bytes=ram_bytes),
        settings=Settings(**settings),
        traffic=None
        if traffic is None
        else Traffic(concurrency=traffic[0], prompt_tokens=traffic[1], output_tokens=traffic[2]),
    )


def _fields(device: Device) -> dict[str, Any]:
    return {name: getattr(device, name) for name in Device.__dataclass_fields__}


@pytest.fixture(scope="session")
def ask() -> Ask:
    return make_question


@pytest.fixture(scope="session")
def gpu() -> Callable[..., Device]:
    return gpu_device


@pytest.fixture(scope="session")
def cpu() -> Callable[..., Device]:
    return cpu_device
