"""This machine's facts and what is made of them; several sources judged as one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.cli import main as cli
from holdfast.doctor.build_finding import Confidence, found
from holdfast.doctor.combine import together
from holdfast.doctor.findings import Diagnosis, Fix
from holdfast.doctor.probe.machine import Disk, MachineFacts, cards, document, lines_of, look, read_topology
from holdfast.doctor.probe.machine_rules import diagnose_machine
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import GpuProcess, NvidiaGpu, NvidiaMachine
from holdfast.units import GIB, MIB

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tSYS\t0-15\t0
GPU1\tSYS\t X \t16-31\t1

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def _gpu(index: int, free: int = 23 * GIB, *processes: GpuProcess) -> NvidiaGpu:
    return NvidiaGpu(
        index=index, uuid=f"GPU-{index}", name="RTX", total_bytes=24 * GIB, free_bytes=free, processes=processes
    )


def _facts(*gpus: NvidiaGpu, **changes: object) -> MachineFacts:
    machine = NvidiaMachine(gpus=gpus, driver="550.1", cuda=(12, 4))
    facts = MachineFacts(
        nvidia=machine,
        every=machine,
        cores=8,
        shm_bytes=8 * GIB,
        shm_free_bytes=8 * GIB,
        memory=Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="machine"),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def _causes(facts: MachineFacts) -> list[str]:
    return [finding.cause for finding in diagnose_machine(facts).findings]


def test_a_machine_with_room_is_healthy() -> None:
    facts = _facts(_gpu(0), _gpu(1))
    assert diagnose_machine(facts).healthy
    assert any("GPU 1" in line and "23.00 GiB of 24.00 GiB free" in line for line in lines_of(facts))


def test_a_card_without_a_driver_is_a_finding_and_no_card_is_none(tmp_path: Path) -> None:
    places = {"0000:01:00.0": "0x10de", "0000:01:00.1": "0x10de", "0000:02:00.0": "0x1af4", "0000:03:00.0": "0x1002"}
    for place, vendor in places.items():
        kind = "0x040300" if place.endswith(".1") else "0x030000"
        device = tmp_path / place
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    none = NvidiaMachine(reason="no NVIDIA driver answers")
    without = _facts(nvidia=none, every=none)
    assert diagnose_machine(without).healthy
    assert "models run on the CPU" in lines_of(without)[0]
    assert document(without)["kind"] == "cpu"
    there = replace(without, cards=cards(tmp_path), others=cards(tmp_path, vendor="0x1002"))
    assert (there.cards, there.others) == (("0000:01:00.0",), ("0000:03:00.0",))
    assert any("0000:01:00.0" in line for line in lines_of(there))
    assert document(there)["kind"] == "gpu_without_driver"
    library = NvidiaMachine(
        reason="no NVIDIA driver answers (NVMLError_LibraryNotFound: NVML Shared Library Not Found)"
    )
    loaded = "NVRM version: 550"
    for changes, command in (
        ({}, "sudo modprobe nvidia"),
        ({"module": loaded}, "sudo reboot"),
        ({"module": loaded, "every": library}, "ldconfig -p | grep -E 'libnvidia-ml|libcuda'"),
        ({"module": loaded, "every": library, "container": True}, "docker run --gpus all IMAGE ..."),
    ):
        [finding] = diagnose_machine(replace(there, **changes)).findings
        assert (finding.cause, finding.cause_confidence) == ("driver_too_old", "high")
        assert finding.fix is not None
        assert finding.fix.command == command


def test_who_holds_a_gpu_is_named_with_what_is_left() -> None:
    facts = _facts(_gpu(0, 12 * GIB, GpuProcess(4321, "python notebook", 11 * GIB)))
    [finding] = diagnose_machine(facts).findings
    assert finding.cause == "other_process_on_gpu"
    assert "4321" in finding.what
    assert finding.fix == Fix(command="kill 4321", why="stop it, if it is not needed", basis="stated")
    assert finding.alternatives[0].changes == {"--gpu-memory-utilization": "0.49"}
    assert any("pid 4321" in line for line in lines_of(facts))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"torch_cuda": "13.0"}, "driver_too_old"),
        ({"shm_bytes": 64 * MIB}, "shm_too_small"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "gpu_topology"),
        ({"links": read_topology(TOPOLOGY)}, "gpu_topology"),
        ({"memory": Memory(total_bytes=4 * GIB, available_bytes=GIB, limited_by="control group")}, "host_ram_oom"),
        ({"disks": (Disk("/models", "Hugging Face models", 100 * GIB, GIB),)}, "other"),
    ],
)
def test_what_is_wrong_before_anything_is_started(changes: dict[str, object], cause: str) -> None:
    assert _causes(_facts(_gpu(0), _gpu(1), **changes)) == [cause]


def test_torch_of_an_older_cuda_runs() -> None:
    assert _causes(_facts(_gpu(0), torch_cuda="11.8")) == []
    assert _causes(_facts(_gpu(0), torch_cuda="12.8")) == []


def test_hidden_gpus_are_told() -> None:
    facts = _facts(_gpu(0), _gpu(1), environment={"CUDA_VISIBLE_DEVICES": "5"})
    facts = replace(facts, nvidia=NvidiaMachine(driver="550.1", reason="CUDA_VISIBLE_DEVICES is '5', and names no GPU"))
    [finding] = diagnose_machine(facts).findings
    assert (finding.cause, finding.confidence) == ("tensor_parallel_unused", "high")
    assert any("hidden by CUDA_VISIBLE_DEVICES" in line for line in lines_of(facts))


def test_the_square_of_links_is_read() -> None:
    assert read_topology(TOPOLOGY) == (("X", "SYS"), ("SYS", "X"))
    assert read_topology("nonsense") == ()


def test_a_program_whose_version_is_not_in_files_is_told_with_how_to_ask_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert f"version    nvcc at {program} (version: run nvcc --version)" in lines_of(look({"HOME": "/"}))


def test_this_machine_is_looked_at_without_telling_secrets() -> None:
    given = {"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "secret2", "NCCL_DEBUG": "INFO", "VLLM_MY_TOKEN": "secret3"}
    facts = look({**given, "HOME": "/"})
    said = "\n".join(lines_of(facts)) + json.dumps(document(facts))
    assert "secret" not in said
    assert "NCCL_DEBUG=INFO" in said
    assert facts.memory.total_bytes > 0


def _said(
    confidence: Confidence, *fixes: Fix, cause: str = "preemption_thrash", command: str | None = None
) -> Diagnosis:
    finding = found(cause, "concurrency_misjudged", confidence, what=confidence, why="", fixes=fixes)
    return Diagnosis(
        engine=None,
        engine_version=None,
        command=command,
        phase=None,
        healthy=False,
        findings=[finding],
        missing=["a log"],
    )


def test_two_that_agree_are_one_surer_finding_written_as_the_command_that_is_known() -> None:
    seen = _said("medium", Fix(why="fewer"))
    eight = Fix(changes={"--max-num-seqs": "8"}, basis="computed")
    told = _said("low", eight, command="vllm serve m --max-num-seqs 64")
    both = together([seen, told])
    [finding] = both.findings
    assert (finding.confidence, finding.cause_confidence) == ("high", "high")
    assert finding.fix is not None
    assert finding.fix.command == "vllm serve m --max-num-seqs 8"
    assert both.command == "vllm serve m --max-num-seqs 64"
    assert both.missing == ["a log"]
    guessed = together([seen, _said("low", msgspec.structs.replace(eight, basis="first_try"))]).findings[0]
    assert (guessed.confidence, guessed.cause_confidence) == ("medium", "high")


def test_causes_that_differ_stay_apart_and_one_alone_stays_as_it_is() -> None:
    one, other = _said("high"), _said("low", cause="shm_too_small")
    assert [finding.cause for finding in together([one, other]).findings] == ["preemption_thrash", "shm_too_small"]
    assert together([one]) is one


def test_the_doctor_takes_a_command_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    command = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len"
    assert cli.main(["doctor", "--command", f"{command} 8192", "--gpu", "rtx4090"]) == 0
    assert cli.main(["doctor", "--command", f"{command} 131072", "--gpu", "rtx4090", "--json"]) == 1
    said = capsys.readouterr().out
    document = json.loads(said[said.index("{") :])
    assert document["findings"][0]["cause"] == "kv_cache_too_small_for_max_len"
    assert document["findings"][0]["code"] == "HFD01"
    assert cli.main(["doctor", "--json", "--here", "--command", f"{command} 8192", "--gpu", "rtx4090"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["machine"]["ram"]["total_bytes"] > 0
    assert cli.main(["doctor", "--command", "ollama serve"]) == 3
    assert "server is well" not in capsys.readouterr().out
    assert cli.main(["doctor", "--gpu", "rtx4090"]) == 2
    assert cli.main(["doctor", "127.0.0.1:9", "--seconds", "0"]) == 1
