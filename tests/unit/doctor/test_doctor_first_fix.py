"""Logs as people have them: the first fix is one that this server takes, and that would do."""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.diagnosis.diagnose import diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis, Fix
from holdfast.doctor.report.text import lines

VLLM = "INFO 11-17 10:02:15 [api_server.py:1839] vLLM API server version 0.11.0\nINFO 11-17 10:02:15 [utils.py:233] non-default args: {}\n"
TOO_LONG = VLLM.format("{'model': 'Qwen/Qwen3-8B'}") + (
    "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (3.12 GiB). Based on the available memory, the estimated maximum model length is 22704.\n"
)
SGLANG = """[2025-11-17 10:11:12] server_args=ServerArgs(model_path='Qwen/Qwen3-32B', tokenizer_path='Qwen/Qwen3-32B', host='0.0.0.0', port=30000, mem_fraction_static=0.88, tp_size=2, context_length=None)
[2025-11-17 10:11:30 TP0] Load weight begin. avail mem=23.10 GB
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 23.53 GiB of which 80.00 MiB is free. Process 1234 has 23.44 GiB memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 20 MiB is reserved by PyTorch but unallocated.
"""


def _read(text: str) -> Diagnosis:
    return diagnose_lines(text.splitlines(), "log")


def _first(found: Diagnosis) -> Fix:
    fix = found.findings[0].fix
    assert fix is not None
    return fix


def _files(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return [str(folder / f"{name}.log") for name in texts]


def test_logs_of_two_servers_are_judged_apart(tmp_path: Path) -> None:
    found = diagnose(_files(tmp_path, one=TOO_LONG, two=SGLANG))
    assert found.programs == {"one.log": "vllm 0.11.0, phase: profile", "two.log": "sglang, phase: load"}
    assert found.command is None
    commands = {one.what.split(":")[0]: one.fix.command for one in found.findings if one.fix is not None}
    assert commands["one.log"] == "vllm serve Qwen/Qwen3-8B --max-model-len 22704"
    assert "Qwen3-32B" in (commands["two.log"] or "")
    assert next(lines(found)).startswith("one.log: vllm")


def test_logs_of_two_models_are_judged_apart_and_of_one_together(tmp_path: Path) -> None:
    other = TOO_LONG.replace("Qwen3-8B", "Qwen3-4B")
    assert len(diagnose(_files(tmp_path, one=TOO_LONG, two=other)).findings) == 2
    joined = diagnose(_files(tmp_path, one=TOO_LONG, two=TOO_LONG))
    assert len(joined.findings) == 1
    assert not joined.programs


def test_programs_of_a_log_that_are_well_are_listed(tmp_path: Path) -> None:
    serves = "webui-1 | INFO:     Application startup complete.\nwebui-1 | INFO:     Uvicorn running on http://0.0.0.0:8080\n"
    text = "".join(f"vllm-1 | {line}\n" for line in TOO_LONG.splitlines()) + serves
    found = diagnose(_files(tmp_path, compose=text))
    assert [one.split(":")[0] for one in found.seen] == ["webui-1"]


def test_what_needs_ram_that_nobody_named_does_not_fit() -> None:
    """As `holdfast plan` says of it."""
    command = "holdfast serve llama3.3:70b"
    found = judge_command(command, machine=CommandMachine(gpu="rtx4090"))
    assert not found.healthy
    assert "GiB of free RAM" in _first(found).why
    assert judge_command(command, machine=CommandMachine(gpu="rtx4090", ram="160GiB")).healthy
