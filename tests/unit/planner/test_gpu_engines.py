"""Several engines of ranks on GPUs (-dp with -tp and -pp), several servers on one machine: who has which GPU, what is
left of one that engines share, and what is refused. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeDevice, FakeNvml

from holdfast.config import EngineConfig
from holdfast.config.unsupported import NOT_WITH_RANKS, RANK_GPUS
from holdfast.engine.data_parallel import open as opening
from holdfast.engine.startup import build
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import ConfigurationError
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine, probe
from holdfast.hardware.torch_build import TorchBuild
from holdfast.planner.serve.shares.engines import gpus_share, same_part
from holdfast.units import GIB

RAM = Memory(total_bytes=128 * GIB, available_bytes=100 * GIB, limited_by="machine")
TORCH = TorchBuild("2.13.0", "13.0")
DEVICES = [FakeDevice("NVIDIA L40S", f"GPU-{index}", total=48 * GIB) for index in range(4)]


def machine(visible: str | None = None) -> NvidiaMachine:
    found = probe({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, FakeNvml(*DEVICES), RAM)
    return replace(found, cuda=(13, 0), gpus=tuple(replace(gpu, capability=(8, 9)) for gpu in found.gpus))


def config_of(model: Path, **sizes: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16", **sizes
    )


def plans(config: EngineConfig, here: NvidiaMachine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(build, "memory", lambda: RAM)
    monkeypatch.setattr(build, "probe", lambda: here)
    monkeypatch.setattr(build, "compiled_kernels", lambda: True)
    settled = settle_device(config, here=here, build=TORCH)
    return opening.plan_engines(settled, build.find_model(settled), front_bytes=0)


def places(plan: Any) -> list[int]:
    return [gpu.index for gpu in plan.engine.rank_gpus]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_each_engine_of_ranks_has_gpus_of_its_own(
    sizes: dict[str, int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RANK_GPUS, raising=False)
    config = config_of(tiny_model, data_parallel_size=2, **sizes)
    first, second = plans(config, machine(), monkeypatch)
    assert (places(first), places(second)) == ([0, 1], [2, 3])
    assert first.budget_bytes == second.budget_bytes
    assert not any("divide a GPU" in one.line() for one in first.decisions)
    monkeypatch.setenv(RANK_GPUS, "3,2,1,0")
    assert [places(plan) for plan in plans(config, machine(), monkeypatch)] == [[3, 2], [1, 0]]


def test_engines_that_share_gpus_have_a_part_of_each(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that its ranks are of all ranks there."""
    config = config_of(tiny_model, data_parallel_size=2, tensor_parallel_size=2)
    free = machine().gpus[0].free_bytes
    monkeypatch.setenv(RANK_GPUS, "0,0,0,0")
    for plan in plans(config, machine(), monkeypatch):
        assert places(plan) == [0, 0]
        assert plan.device.free_bytes == free // 4, "of one rank"
        assert plan.budget_bytes <= free // 4
        assert [gpu.engines for gpu in plan.engine.rank_gpus] == [2, 2]
        (said,) = [one.line() for one in plan.decisions if one.field == "device"]
        assert "2 engines of this server divide a GPU" in said
    monkeypatch.setenv(RANK_GPUS, "0,0,0,1")
    parts = [gpus_share(config, machine().gpus, number) for number in (0, 1)]
    assert [[gpu.free_bytes for gpu in part] for part in parts] == [[free * 2 // 3] * 2, [free // 3, free]]
    assert [[gpu.engines for gpu in part] for part in parts] == [[2, 2], [2, 1]]


def test_engines_of_one_rank_may_share_a_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is planned again has what others left, and no more than its part."""
    monkeypatch.setenv(RANK_GPUS, "1,1")
    first, second = plans(config_of(tiny_model, data_parallel_size=2), machine(), monkeypatch)
    gpu = machine().gpus[1]
    for plan in (first, second):
        assert (plan.engine.gpu.index, plan.engine.gpu.engines) == (1, 2)
        assert plan.device.free_bytes == gpu.free_bytes // 2
        assert any("2 engines of this server divide this GPU" in one.line() for one in plan.decisions)
    again = same_part(gpu, first, own_bytes=GIB)
    assert (again.free_bytes, again.total_bytes) == (gpu.free_bytes // 2, gpu.total_bytes // 2)
    crowded = same_part(replace(gpu, free_bytes=2 * GIB), first, own_bytes=GIB)
    assert (crowded.free_bytes, crowded.engines) == (3 * GIB, 2)
    alone = replace(first, own=replace(first.engine, gpu=replace(first.engine.gpu, engines=1)))
    assert same_part(gpu, alone, own_bytes=GIB).free_bytes == gpu.free_bytes + GIB


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (None, "3 engines of 2 GPUs each need 6 GPUs"),
        ("0,1,2,3", "does not name the GPU of each rank"),
        ("0,1,2,3,0,4", "rank 5 has no GPU"),
    ],
)
def test_too_few_are_refused_before_a_model_is_looked_for(
    listed: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RANK_GPUS, raising=False)
    if listed is not None:
        monkeypatch.setenv(RANK_GPUS, listed)
    config = EngineConfig(device="cuda", data_parallel_size=3, tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match=said) as caught:
        settle_device(config, here=machine(), build=TORCH)
    assert caught.value.code == "HF133"


def test_ranks_of_an_engine_have_gpus_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of different engines need not."""
    monkeypatch.delenv(RANK_GPUS, raising=False)
    old: dict[str, Any] = {"name": "NVIDIA A100", "capability": (8, 0)}
    config = EngineConfig(device="cuda", data_parallel_size=2, tensor_parallel_size=2)

    def mixed(*places: int) -> list[NvidiaGpu]:
        return [replace(gpu, **old) if gpu.index in places else gpu for gpu in machine().gpus]

    assert len(gpus_share(config, mixed(2, 3), 1)) == 2
    with pytest.raises(ConfigurationError, match="rank 1 has NVIDIA A100 and rank 0 NVIDIA L40S") as caught:
        gpus_share(config, mixed(3), 1)
    assert caught.value.code == NOT_WITH_RANKS


def test_two_servers_each_with_two_gpus(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks count what is visible to their server."""
    monkeypatch.delenv(RANK_GPUS, raising=False)
    config = config_of(tiny_model, tensor_parallel_size=2)
    (here,), (there,) = (plans(config, machine(visible), monkeypatch) for visible in ("0,1", "2,3"))
    assert (places(here), places(there)) == ([0, 1], [2, 3])
    assert [gpu.uuid for gpu in there.engine.rank_gpus] == ["GPU-2", "GPU-3"]
    with pytest.raises(ConfigurationError, match="rank 2 has no GPU: 3 ranks, and 2 visible GPUs"):
        settle_device(replace(config, tensor_parallel_size=3), here=machine("2,3"), build=TORCH)
    monkeypatch.setenv(RANK_GPUS, "1,0")
    (turned,) = plans(config, machine("2,3"), monkeypatch)
    assert places(turned) == [3, 2], "by their place among the visible ones"
