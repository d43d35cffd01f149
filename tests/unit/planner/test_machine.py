"""From what a user writes about a machine to devices, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.hardware import Memory
from holdfast.hardware.gpus import find
from holdfast.hardware.nvidia import GpuProcess, NvidiaGpu, NvidiaMachine
from holdfast.planner.inputs.machine import Asked, Found, machine_of

GIB = 1 << 30
RAM = Memory(total_bytes=64 * GIB, available_bytes=50 * GIB, limited_by="control group")
NO_GPUS = NvidiaMachine(reason="no NVIDIA driver answers")
ONE = NvidiaGpu(
    index=0,
    uuid="GPU-1",
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24 * GIB,
    free_bytes=20 * GIB,
    known=find("rtx4090"),
    processes=tuple(GpuProcess(pid, "python", GIB) for pid in range(6)),
)
TWO_GPUS = NvidiaMachine(gpus=(ONE, ONE), driver="580", hidden=1, reason="CUDA_VISIBLE_DEVICES is '0,1'")


def made(here: NvidiaMachine = NO_GPUS, **asked: Any) -> Found:
    return machine_of(Asked(**asked), here=here, ram=RAM)


def test_a_gpu_of_the_catalogue() -> None:
    (device,) = made(gpu="rtx4090").machine.devices
    assert (device.kind, device.name, device.budget_bytes) == ("gpu", "rtx4090", None)
    assert device.total_bytes == device.free_bytes == find("rtx4090").usable_bytes
    assert not device.measured


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"gpu": "h100-80x2"}, ["h100-80"] * 2),
        ({"gpu": "rtx4090, l4x2"}, ["rtx4090", "l4", "l4"]),
        ({"gpu": ["rtx4090", "l4"]}, ["rtx4090", "l4"]),
        ({"gpu": "h100-80", "ranks": 4}, ["h100-80"] * 4),
        ({"gpu": "h100-80x2", "ranks": 4}, ["h100-80"] * 2),
        ({"vram": "22GiBx3"}, ["gpu"] * 3),
        ({"vram": "22GiB", "ranks": 2}, ["gpu"] * 2),
    ],
)
def test_how_many(asked: dict[str, Any], names: list[str]) -> None:
    assert [device.name for device in made(**asked).machine.devices] == names


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpu": "rtx4090", "ranks": 5}, ("5", "-tp x -pp needs 5: planned for 5")),
        ({"vram": "22GiB", "ranks": 2}, ("2", "-tp x -pp needs 2: planned for 2")),
        ({"gpu": "rtx4090", "ranks": 8, "replicas": 2}, ("8", "-tp x -pp x -dp needs 8: planned for 8")),
        ({"gpu": "rtx4090", "ranks": 8, "nodes": 4}, ("8 of each node", "needs 8 on each of 4 nodes: planned for 8")),
        ({"gpu": "rtx4090", "ranks": 1}, None),
        ({"gpu": "rtx4090x5", "ranks": 5}, None),
        ({"gpu": "rtx4090,rtx4090", "ranks": 2}, None),
        ({"vram": "22GiBx2", "ranks": 2}, None),
    ],
)
def test_gpus_that_a_split_adds_to_the_one_that_was_named_are_said(
    asked: dict[str, Any], told: tuple[str, str] | None
) -> None:
    said = [decision for decision in made(**asked).decisions if decision.field == "gpus"]
    assert [decision.value for decision in said] == ([] if told is None else [told[0]])
    assert all(told is not None and told[1] in decision.reason for decision in said)


def test_vram_beside_a_gpu_is_its_budget() -> None:
    for device in made(gpu="rtx4090x2", vram="20GiB").machine.devices:
        assert device.budget_bytes == 20 * GIB
        assert device.total_bytes > 20 * GIB


def test_more_than_a_gpu_has_is_answered_with_a_size_that_it_has() -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(gpu="l4", vram="24GiB")
    size = str(caught.value.fix).split()[1].rstrip(",")
    assert size.endswith("MiB")
    (device,) = made(gpu="l4", vram=size).machine.devices
    assert 0 <= device.total_bytes - (device.budget_bytes or 0) < 1 << 20


def test_vram_alone_is_a_gpu_of_no_kind_even_where_there_is_one() -> None:
    (device,) = made(TWO_GPUS, vram="22GB", ram="100GiB", nvme="1TB").machine.devices
    assert device.total_bytes == device.budget_bytes == 22 * 10**9
    assert device.gpu is None


def test_tiers_beside_gpus() -> None:
    machine = made(gpu="l4", ram="100GiB", nvme="1TiB").machine
    assert (machine.ram_bytes, machine.nvme_bytes) == (100 * GIB, 1024 * GIB)


def test_this_machine_with_gpus() -> None:
    found = made(TWO_GPUS)
    assert [device.free_bytes for device in found.machine.devices] == [20 * GIB] * 2
    assert found.machine.devices[0].measured
    assert found.machine.devices[0].name == "rtx4090"
    assert found.machine.ram_bytes == 50 * GIB
    assert found.machine.devices[0].held_by[0] == "python (pid 0): 1.00 GiB"
    assert found.machine.devices[0].held_by[-1] == "and 2 more"
    said = [decision.line() for decision in found.decisions]
    assert any("CUDA_VISIBLE_DEVICES" in line and "1 not seen" in line for line in said)


def test_this_machine_without_a_gpu_is_its_ram() -> None:
    found = made()
    (device,) = found.machine.devices
    assert (device.kind, device.total_bytes, device.free_bytes) == ("cpu", 64 * GIB, 50 * GIB)
    assert "no NVIDIA driver" in found.decisions[0].reason
    assert found.machine.cpu_features


def test_ram_is_the_budget_where_there_is_no_gpu_and_for_tiers_where_there_is() -> None:
    (device,) = made(ram="16GiB").machine.devices
    assert (device.kind, device.budget_bytes) == ("cpu", 16 * GIB)
    assert made(TWO_GPUS, ram="16GiB").machine.ram_bytes == 16 * GIB
    (device,) = made(TWO_GPUS, ram="16GiB", device="cpu").machine.devices
    assert (device.kind, device.budget_bytes) == ("cpu", 16 * GIB)


def test_unified_memory_is_said() -> None:
    spark = NvidiaGpu(index=0, uuid="u", name="GB10", total_bytes=GIB, free_bytes=GIB // 2, unified=True)
    found = made(NvidiaMachine(gpus=(spark,), driver="580"))
    assert found.machine.devices[0].unified
    assert "of the machine's RAM" in found.decisions[0].reason


@pytest.mark.parametrize(
    ("asked", "field", "code"),
    [
        ({"vram": "1e30"}, "vram", "HF100"),
        ({"vram": "9" * 500}, "vram", "HF100"),
        ({"vram": "99999999TiB"}, "vram", "HF100"),
        ({"vram": "0"}, "vram", "HF100"),
        ({"vram": -5}, "vram", "HF100"),
        ({"vram": "lots"}, "vram", "HF100"),
        ({"vram": "22GiBx0"}, "vram", "HF141"),
        ({"vram": "22GiBx99999"}, "vram", "HF141"),
        ({"ram": "0GiB"}, "ram", "HF100"),
        ({"ram": "1e9"}, "ram", "HF100"),
        ({"nvme": "-1TB"}, "nvme", "HF100"),
        ({"gpu": "rtx409"}, "gpu", "HF140"),
        ({"gpu": ""}, "gpu", "HF140"),
        ({"gpu": "h100-80x0"}, "gpu", "HF141"),
        ({"gpu": "h100-80", "ranks": 5000}, "gpu", "HF141"),
        ({"gpu": "rtx4090", "vram": "30GiB"}, "vram", "HF143"),
        ({"gpu": "rtx4090x2", "vram": "20GiBx3"}, "vram", "HF143"),
        ({"gpu": "rtx4090", "device": "cpu"}, "gpu", "HF143"),
        ({"vram": "4GiB", "device": "cpu"}, "vram", "HF143"),
        ({"device": "cuda"}, "device", "HF143"),
        ({"device": "tpu"}, "device", "HF100"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(asked: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(**asked)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert len(str(caught.value)) < 600
