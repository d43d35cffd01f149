"""Several engines of one server: each is planned for its part of the machine, and what one cannot hold is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.data_parallel import open as opening
from holdfast.engine.data_parallel.router import ROUTER_BYTES
from holdfast.engine.startup import build
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner.serve.shares.engines import gpus_share, threads_share
from holdfast.units import GIB, MIB

FREE = Memory(total_bytes=16 * GIB, available_bytes=8 * GIB, limited_by="machine")


@pytest.fixture
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True, device="cpu", data_parallel_size=2
    )


def gpu(index: int) -> NvidiaGpu:
    return NvidiaGpu(
        index=index, name="L40S", uuid=f"GPU-{index}", total_bytes=48 * GIB, free_bytes=47 * GIB, capability=(8, 9)
    )


def test_memory_and_cores_are_divided(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "memory", lambda: FREE)
    monkeypatch.setattr(opening, "processor", lambda: replace(build.processor(), cores=5))
    model = build.find_model(config)
    plans = opening.plan_engines(config, model, front_bytes=200 * MIB)
    assert [plan.budget_bytes for plan in plans] == [int(4 * GIB * 0.9)] * 2
    # Of the front, and of what it remembers of prompts to choose an engine by.
    assert [plan.terms["front"] for plan in plans] == [100 * MIB + ROUTER_BYTES // 2] * 2
    assert [plan.question.machine.cores for plan in plans] == [3, 2]
    assert "divided by 2 engines" in next(one.reason for one in plans[0].decisions if one.field == "budget")
    given = opening.plan_engines(replace(config, ram=6 * GIB, threads=4), model, front_bytes=0)
    assert [plan.budget_bytes for plan in given] == [3 * GIB] * 2
    assert [plan.question.machine.cores for plan in given] == [4, 4]


def test_what_one_cannot_hold_is_refused_with_how_many_can_be(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build.find_model(config)
    alone = build.plan_model(replace(config, data_parallel_size=1), model, front_bytes=64 * MIB)
    each = sum(size for name, size in alone.terms.items() if name != "kv_pool") + 64 * MIB
    monkeypatch.setattr(build, "memory", lambda: replace(FREE, available_bytes=int(3 * each / 0.9)))
    monkeypatch.setattr(build, "memory_holders", lambda: ())
    many = replace(config, max_model_len=2048)
    with pytest.raises(DoesNotFitError) as caught:
        opening.plan_engines(replace(many, data_parallel_size=8), model, front_bytes=64 * MIB)
    offered = re.search(r"--data-parallel-size (\d)", str(caught.value.fix))
    assert offered is not None
    count = int(offered[1])
    assert len(opening.plan_engines(replace(many, data_parallel_size=count), model, front_bytes=64 * MIB)) == count
    with pytest.raises(DoesNotFitError):
        opening.plan_engines(replace(many, data_parallel_size=count + 1), model, front_bytes=64 * MIB)
    with pytest.raises(DoesNotFitError, match="less is free"):
        opening.plan_engines(replace(config, ram=100 * GIB), model, front_bytes=64 * MIB)


def test_each_engine_has_gpus_of_its_own() -> None:
    asked, gpus = EngineConfig(data_parallel_size=2), [gpu(index) for index in range(3)]
    assert [[one.index for one in gpus_share(asked, gpus, number)] for number in (0, 1)] == [[0], [1]]
    assert gpus_share(EngineConfig(), gpus, 0) == gpus
    with pytest.raises(ConfigurationError, match="4 engines of 1 GPU each need 4 GPUs") as few:
        gpus_share(EngineConfig(data_parallel_size=4), gpus, 0)
    assert (few.value.code, few.value.fix) == ("HF133", "--data-parallel-size 3")
    with pytest.raises(ConfigurationError) as one:
        gpus_share(asked, gpus[:1], 0)
    assert one.value.fix == "leave -dp out"


def test_engines_on_gpus_are_planned_for_one_each(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "memory", lambda: FREE)
    monkeypatch.setattr(build, "probe", lambda: type("Found", (), {"gpus": [gpu(0), gpu(1)]})())
    model = build.find_model(config)
    plans = opening.plan_engines(replace(config, device="cuda"), model, front_bytes=0)
    assert [plan.engine.gpu.uuid for plan in plans if plan.engine.gpu is not None] == ["GPU-0", "GPU-1"]


def test_more_engines_than_cores_have_one_each() -> None:
    config = EngineConfig(data_parallel_size=4)
    assert [threads_share(config, 2, number) for number in range(4)] == [1, 1, 1, 1]
    assert [threads_share(config, 7, number) for number in range(4)] == [2, 2, 2, 1]
