"""Which device a server runs on, and the messages before anything is loaded. Machines and builds are made up: what is
really here has tests of its own."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import ConfigurationError
from holdfast.hardware import filesystem_type
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.hardware.torch_build import TorchBuild
from holdfast.planner.serve import streamed
from holdfast.planner.serve.gpu_plan import choose_gpu
from holdfast.units import GIB

CUDA_BUILD, CPU_BUILD = TorchBuild("2.12.0+cu130", "13.0"), TorchBuild("2.12.0+cpu", None)


def gpu(index: int = 0, *, free: int = 40, capability: tuple[int, int] | None = (9, 0)) -> NvidiaGpu:
    return NvidiaGpu(
        index=index,
        uuid=f"GPU-{index}",
        name=f"GPU {index}",
        total_bytes=48 * GIB,
        free_bytes=free * GIB,
        capability=capability,
    )


def machine(*gpus: NvidiaGpu, cuda: tuple[int, int] | None = (13, 0)) -> NvidiaMachine:
    return NvidiaMachine(gpus=gpus, driver="580.1", cuda=cuda, reason="" if gpus else "CUDA_VISIBLE_DEVICES hides all")


def settled(here: NvidiaMachine, build: TorchBuild = CUDA_BUILD, **settings: Any) -> str:
    return settle_device(EngineConfig.from_arguments(**settings), here=here, build=build).device


def test_a_gpu_is_used_where_there_is_one() -> None:
    assert settled(machine(gpu())) == "cuda"
    assert settled(machine(gpu()), vram="4GiB") == "cuda"
    assert settled(machine(gpu(), cuda=None)) == "cuda"
    assert settled(machine(gpu(capability=None))) == "cuda"
    assert settled(machine(gpu()), device="cpu") == "cpu"
    assert settled(machine(gpu()), ram="4GiB") == "cpu"
    assert settled(machine(gpu()), ram="4GiB", vram="4GiB") == "cuda"
    assert settled(machine(gpu()), ram="4GiB", gpu_layers="3") == "cuda"
    assert settled(machine(gpu()), ram="4GiB", device="cuda") == "cuda"
    assert settled(machine()) == "cpu"


@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_half_is_advised_against_on_a_cpu_alone(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """As commands for AWQ have it, which were written for GPUs."""
    settled(machine(gpu()), dtype=dtype)
    settled(machine(), dtype="float32")
    assert "dtype float16" not in caplog.text
    settled(machine(), dtype=dtype)
    assert "dtype float16: on a CPU" in caplog.text


def test_a_backend_that_nothing_is_offloaded_with_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settled(machine(gpu()), offload_backend="uva", cpu_offload_gb=4)
    assert "offload_backend" not in caplog.text
    settled(machine(gpu()), offload_backend="uva")
    assert caplog.text.count("offload_backend uva has no effect without --cpu-offload-gb") == 1
    with pytest.raises(ConfigurationError, match="HF120"):
        settled(machine(), offload_backend="uva")


def test_a_gpu_tells_no_whole_vocabulary() -> None:
    asked = EngineConfig.from_arguments(max_logprobs=-1)
    assert settle_device(asked, here=machine(gpu()), build=CUDA_BUILD).max_logprobs == 20
    assert settle_device(asked, here=machine(), build=CUDA_BUILD).max_logprobs == -1


PROBLEMS = {
    "HF121": (machine(), CUDA_BUILD, "hides all"),
    "HF122": (machine(gpu(capability=(7, 5)), gpu(1, capability=(6, 1))), CUDA_BUILD, "7.5"),
    "HF123": (machine(gpu()), CPU_BUILD, "2.12.0+cpu"),
    "HF124": (machine(gpu(), cuda=(12, 8)), CUDA_BUILD, "CUDA 12.8"),
}


@pytest.mark.parametrize("code", PROBLEMS)
def test_one_that_is_asked_for_and_cannot_be_had_is_refused(code: str) -> None:
    here, build, found = PROBLEMS[code]
    with pytest.raises(ConfigurationError) as refusal:
        settled(here, build, device="cuda")
    assert refusal.value.code == code
    assert found in str(refusal.value.found)
    assert "--device cpu" in str(refusal.value.fix)


@pytest.mark.parametrize("code", ["HF122", "HF123", "HF124"])
def test_one_that_is_left_aside_is_spoken_of(code: str, caplog: pytest.LogCaptureFixture) -> None:
    here, build, found = PROBLEMS[code]
    with caplog.at_level(logging.WARNING):
        assert settled(here, build) == "cpu"
    assert code in caplog.text
    assert found in caplog.text
    with pytest.raises(ConfigurationError, match=code):
        settled(here, build, vram="4GiB")


def test_a_gpu_that_is_left_aside_for_a_budget_of_ram_is_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(machine(gpu()), ram="4GiB", device="cpu") == "cpu"
    assert settled(machine(), ram="4GiB") == "cpu"
    assert settled(machine(gpu(capability=(7, 5))), ram="4GiB") == "cpu"  # It could not be used anyway.
    assert caplog.text == ""
    assert settled(machine(gpu()), ram="4GiB") == "cpu"
    assert "using the CPU, and not GPU 0: --ram alone" in caplog.text
    assert "--device cuda" in caplog.text


def test_an_older_program_runs_on_a_newer_driver() -> None:
    assert settled(machine(gpu(), cuda=(13, 0)), TorchBuild("2.11.0+cu126", "12.6")) == "cuda"
    assert settled(machine(gpu(), cuda=(13, 0)), TorchBuild("2.13.0+cu132", "13.2")) == "cuda"


def test_of_several_the_one_with_most_memory_free_is_chosen() -> None:
    chosen, decision = choose_gpu([gpu(0, free=10), gpu(1, free=40), gpu(2, free=44, capability=(7, 5)), gpu(3)])
    assert chosen.index == 1
    assert "GPU 1" in decision.line()
    assert "40.00 GiB of 48.00 GiB free" in decision.line()
    assert "CUDA_VISIBLE_DEVICES=GPU-1" in decision.line()


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def refused_folder(folder: Path) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        settle_device(EngineConfig(device="cpu", nvme_path=str(folder)))
    assert caught.value.field == "nvme_path"
    return caught.value


def test_a_folder_for_layers_is_looked_at_before_anything_is_fetched(tmp_path: Path) -> None:
    assert settle_device(EngineConfig(device="cpu", nvme_path=str(tmp_path))).nvme_path == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert refused_folder(tmp_path / "none").fix == f"--nvme-path /var/tmp, or first: mkdir -p {tmp_path / 'none'}"
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/nope")):
        assert refused_folder(folder).fix == "--nvme-path /var/tmp"


NO_OTHER = "--nvme-path with a folder of a disk that can be written to, or leave it out"


def test_no_folder_is_advised_that_does_not_do_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    in_memory = [Path("/dev/shm")] if filesystem_type(Path("/dev/shm")) == "tmpfs" else []
    for usual in (tmp_path / "file", tmp_path / "none", *in_memory):
        monkeypatch.setattr(streamed, "USUAL_FOLDER", usual)
        assert refused_folder(tmp_path / "file").fix == NO_OTHER
        assert refused_folder(tmp_path / "none").fix == f"{NO_OTHER}, or first: mkdir -p {tmp_path / 'none'}"
    monkeypatch.setattr(streamed, "USUAL_FOLDER", tmp_path)
    assert refused_folder(tmp_path / "file").fix == f"--nvme-path {tmp_path}"


def test_a_folder_for_layers_on_a_read_only_disk_is_refused(read_only_disk: Path) -> None:
    assert "Read-only file system" in refused_folder(read_only_disk).message


@pytest.mark.skipif(filesystem_type(Path("/dev/shm")) != "tmpfs", reason="no tmpfs there")
def test_a_folder_for_layers_in_memory_is_refused() -> None:
    assert refused_folder(Path("/dev/shm")).found == "tmpfs"
