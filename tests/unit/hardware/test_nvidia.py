"""NVIDIA GPUs as a program would see them, against a fake NVML: no GPU is needed, and none was asked."""

from __future__ import annotations

from typing import Any

import pytest
from fake_nvml import FakeDevice, FakeNvml

from holdfast.hardware import Memory, gpus
from holdfast.hardware.nvidia import NvidiaMachine, device_use, probe, process_bytes

GIB = 1 << 30
RAM = Memory(total_bytes=128 * GIB, available_bytes=100 * GIB, limited_by="machine")
FOUR = [FakeDevice("NVIDIA GeForce RTX 4090", f"GPU-{letter}bcd-0000") for letter in "abcd"]
DIVIDED = FakeDevice(
    "NVIDIA H100 80GB HBM3",
    "GPU-ffff-1111",
    total=80 * GIB,
    reserved=0,
    slices=[
        FakeDevice("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-aaaa-1", total=10 * GIB, reserved=0, instance=(7, 0)),
        None,
        FakeDevice("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-aaab-2", total=40 * GIB, reserved=0, instance=(1, 0)),
    ],
)

WHOLE = FakeDevice("NVIDIA H100 80GB HBM3", "GPU-eeee", total=80 * GIB, reserved=0)
NOT_YET = FakeDevice("NVIDIA H100 80GB HBM3", "GPU-dddd", total=80 * GIB, slices=[None])


def look(*devices: FakeDevice, visible: str | None = None, **more: Any) -> NvidiaMachine:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return probe(environment, FakeNvml(*devices, **more), RAM)


def uuids(found: NvidiaMachine) -> list[str]:
    return [gpu.uuid[4] for gpu in found.gpus]


def test_memory_is_without_what_the_driver_keeps() -> None:
    (gpu,) = look(FakeDevice("NVIDIA H200", "GPU-1", total=140 * GIB, used=30 * GIB)).gpus
    assert gpu.total_bytes == 140 * GIB - GIB // 2
    assert gpu.free_bytes == 110 * GIB - GIB // 2
    assert gpu.known is not None
    assert gpu.known.key.startswith("h200")
    assert not gpu.unified


def test_an_old_driver_does_not_tell_them_apart() -> None:
    (gpu,) = look(FakeDevice("NVIDIA L4", "GPU-1"), new_memory=False).gpus
    assert gpu.total_bytes == 24 * GIB


def test_who_holds_memory() -> None:
    device = FakeDevice(
        "NVIDIA L4", "GPU-1", used=9 * GIB, processes=[(7, GIB), (404, None), (9, 8 * GIB)], desktop=[(3, GIB // 4)]
    )
    (gpu,) = look(device).gpus
    assert [(process.pid, process.name, process.nbytes) for process in gpu.processes] == [
        (9, "program9", 8 * GIB),
        (7, "program7", GIB),
        (3, "program3", GIB // 4),
        (404, "unknown", None),
    ]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "abcd"), ("2,0", "ca"), ("", ""), ("-1", ""), ("1,-1,2", "b"), ("0,9,1", "a"), ("3, 1", "db"),
        ("GPU-bbcd-0000", "b"), ("GPU-c", "c"), ("gpu-C,0", "ca"), ("GPU-", ""), ("GPU-zz", ""), ("0,0", ""),
        ("1,GPU-b", ""), ("cuda", ""), ("99999999999999999999", ""), ("MIG-aaaa-1", ""),
    ],
)  # fmt: skip
def test_cuda_visible_devices(visible: str | None, seen: str) -> None:
    found = look(*FOUR, visible=visible)
    assert "".join(uuids(found)) == seen
    assert found.hidden == 4 - len(seen)
    assert found.driver == "580.12"
    if visible is not None:
        assert "CUDA_VISIBLE_DEVICES" in found.reason


def test_an_entry_that_names_nothing_is_said() -> None:
    assert "'9' names no GPU" in look(*FOUR, visible="0,9,1").reason
    assert "twice" in look(*FOUR, visible="0,0").reason


MIXED = (
    FakeDevice("Tesla T4", "GPU-t"),
    FakeDevice("NVIDIA H100 80GB HBM3", "GPU-h"),
    FakeDevice("NVIDIA L4", "GPU-l"),
)


@pytest.mark.parametrize(
    ("visible", "order", "seen"),
    [
        (None, None, "htl"), ("0", None, "h"), ("1,0", None, "th"), ("GPU-l", None, "l"), ("0", "FASTEST_FIRST", "h"),
        (None, "PCI_BUS_ID", "thl"), ("0", "PCI_BUS_ID", "t"),
    ],
)  # fmt: skip
def test_cuda_counts_the_fastest_of_different_kinds_first(visible: str | None, order: str | None, seen: str) -> None:
    given = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    found = probe({name: value for name, value in given.items() if value is not None}, FakeNvml(*MIXED), RAM)
    assert "".join(uuids(found)) == seen
    assert found.hidden == 3 - len(seen)
    assert ("PCI_BUS_ID" in found.reason) is (order != "PCI_BUS_ID"), "a guess is said to be one"


def test_the_order_of_unknown_gpus_is_not_guessed() -> None:
    found = look(FakeDevice("NVIDIA L4", "GPU-l"), FakeDevice("NVIDIA Nonesuch 9", "GPU-n"))
    assert uuids(found) == ["l", "n"]
    assert "may count them otherwise" in found.reason


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "MIG 1g.10gb"), ("0", "MIG 1g.10gb"), ("MIG-aaab-2", "MIG 3g.40gb"), ("MIG-aaaa", "MIG 1g.10gb"),
        ("MIG-GPU-ffff-1111/1/0", "MIG 3g.40gb"), ("MIG-aaa", None), ("MIG-GPU-ffff-1111/9/0", None),
    ],
)  # fmt: skip
def test_slices(visible: str | None, name: str | None) -> None:
    found = look(DIVIDED, visible=visible)
    assert [gpu.name.partition("HBM3 ")[2] for gpu in found.gpus] == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("devices", "visible", "seen", "hidden"),
    [
        ([DIVIDED], "MIG-aaaa-1,MIG-aaab-2", ["MIG-aaaa-1"], 1),
        ([DIVIDED], "MIG-aaab-2,MIG-aaaa-1", ["MIG-aaab-2"], 1),
        ([DIVIDED], None, ["MIG-aaaa-1"], 1),
        ([DIVIDED, WHOLE], None, ["MIG-aaaa-1"], 2),
        ([DIVIDED, WHOLE], "1,0", ["MIG-aaaa-1"], 2),
        ([DIVIDED, WHOLE], "1", ["GPU-eeee"], 2),
        ([NOT_YET, WHOLE], None, ["GPU-eeee"], 1),
        ([NOT_YET], "0", [], 1),
    ],
)
def test_a_process_sees_one_slice_and_nothing_beside_it(
    devices: list[FakeDevice], visible: str | None, seen: list[str], hidden: int
) -> None:
    found = look(*devices, visible=visible)
    assert [gpu.uuid for gpu in found.gpus] == seen
    assert found.hidden == hidden
    asked = len(devices) if visible is None else len(visible.split(","))
    assert ("one MIG slice" in found.reason) is (asked > 1 and any(gpu.mig for gpu in found.gpus))


def test_a_slice_has_its_share_of_the_rates() -> None:
    (whole,) = look(FakeDevice("NVIDIA H100 80GB HBM3", "GPU-1", total=80 * GIB, reserved=0)).gpus
    (part,) = look(DIVIDED, visible="MIG-aaab-2").gpus
    assert whole.known is not None
    assert part.known is not None
    assert part.mig
    assert part.total_bytes == 40 * GIB
    assert part.known.bandwidth_gb_s == pytest.approx(whole.known.bandwidth_gb_s / 2)
    assert part.known.half_tflops == pytest.approx(whole.known.half_tflops * 3 / 7)


@pytest.mark.parametrize(
    "device",
    [
        FakeDevice("NVIDIA GB10", "GPU-1", has_memory=False),
        FakeDevice("Orin (nvgpu)", "GPU-1", has_memory=False),
    ],
)
def test_unified_memory_is_what_the_machine_has_free(device: FakeDevice) -> None:
    (gpu,) = look(device).gpus
    assert gpu.unified
    assert (gpu.total_bytes, gpu.free_bytes) == (RAM.total_bytes, RAM.available_bytes)


def test_a_gh200_has_memory_of_its_own() -> None:
    (gpu,) = look(FakeDevice("NVIDIA GH200 480GB", "GPU-1", total=96 * GIB)).gpus
    assert not gpu.unified
    assert gpu.total_bytes < 96 * GIB


def test_no_driver_no_gpus_and_the_reason() -> None:
    found = probe({}, FakeNvml(broken="NVML Shared Library Not Found"))
    assert found.gpus == ()
    assert "Not Found" in found.reason
    assert "knows no GPU" in probe({}, FakeNvml()).reason


def test_a_driver_that_fails_midway_is_left_in_order() -> None:
    nvml = FakeNvml(*FOUR)
    nvml.nvmlDeviceGetName = None  # type: ignore[assignment, method-assign]
    found = probe({}, nvml)
    assert found.gpus == ()
    assert "error" in found.reason
    assert nvml.open == 0


def test_this_machine_answers_whatever_it_has() -> None:
    found = probe()
    assert found.gpus or found.reason


class InASlot(FakeNvml):
    """Of four lanes, which an RTX 4090 has sixteen of."""

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeDevice) -> int:
        return 3

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: FakeDevice) -> int:
        return 4


def test_the_link_to_the_host_is_that_of_the_slot() -> None:
    (of_slot,), (stated,) = probe({}, InASlot(FOUR[0])).gpus, probe({}, FakeNvml(FOUR[0])).gpus
    assert of_slot.known is not None
    assert stated.known is not None
    assert (of_slot.known.host_link.name, of_slot.known.host_link.gb_s) == ("PCIe 3.0 x4", 3.94)
    assert stated.known.host_link == gpus.find("rtx4090").host_link
    assert gpus.pcie_link(4, 16) == stated.known.host_link
    assert gpus.pcie_link(9, 16) is gpus.pcie_link(4, 0) is None


def test_what_is_free_and_what_one_process_holds_are_told_together() -> None:
    one = FakeDevice("NVIDIA H200", "GPU-1", total=100 * GIB, used=30 * GIB, reserved=GIB, processes=[(7, 20 * GIB)])
    nvml = FakeNvml(FakeDevice("NVIDIA L4", "GPU-0"), one)
    found = device_use("GPU-1", 7, nvml)
    assert found is not None
    assert (found.total_bytes, found.own_bytes) == (99 * GIB, 20 * GIB)
    assert found.free_bytes == probe({}, nvml).gpus[0].free_bytes
    other = device_use("GPU-1", 8, nvml)
    assert other is not None
    assert other.own_bytes is None, "as in a container"
    assert device_use("GPU-2", 7, nvml) is None
    assert nvml.open == 0
    assert device_use("GPU-1", 7, FakeNvml(one, broken="nvmlInit")) is None


def test_what_a_process_holds_is_told_of_a_gpu_without_memory_of_its_own() -> None:
    """What is free of such a GPU is the machine's RAM, and not the driver's to tell."""
    shared = FakeDevice("NVIDIA GB10", "GPU-1", processes=[(7, 3 * GIB), (8, None)], has_memory=False)
    nvml = FakeNvml(shared)
    assert process_bytes("GPU-1", 7, nvml) == 3 * GIB
    assert process_bytes("GPU-1", 8, nvml) is process_bytes("GPU-1", 9, nvml) is process_bytes("GPU-2", 7, nvml) is None
    assert device_use("GPU-1", 7, nvml) is None
    assert nvml.open == 0
    assert process_bytes("GPU-1", 7, FakeNvml(shared, broken="nvmlInit")) is None
