"""A command of Holdfast is refused by the doctor where `serve` would refuse its settings, in the same words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.config.plan import PlanConfig
from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.findings import Diagnosis
from holdfast.errors import ConfigurationError
from holdfast.planner.api import plan, question_of
from holdfast.planner.serve.ranks import refuse_with_ranks

DENSE, EXPERTS = "qwen3-8b", "qwen3-30b-a3b"


def _judged(words: str, gpu: str | None = "h100-80x2") -> Diagnosis:
    return judge_command(f"holdfast serve {words}", machine=CommandMachine(gpu=gpu))


def _serve_refuses(**settings: object) -> str:
    model = question_of(PlanConfig.from_arguments(model=DENSE, gpu="h100-80x2")).model
    with pytest.raises(ConfigurationError) as caught:
        refuse_with_ranks(
            EngineConfig.from_arguments(device="cuda", **settings), model.spec, None, compiled_kernels=True
        )
    return caught.value.message


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--kv-store /tmp/x", {"kv_store": "/tmp/x"}),
        ("--idle-release 60", {"idle_release": 60}),
        ("--yield-to-neighbours", {"yield_to_neighbours": True}),
        ("--kv-ram 40GiB", {"kv_ram": "40GiB"}),
        ("--enable-sleep-mode", {"enable_sleep_mode": True}),
    ],
)
def test_what_ranks_on_gpus_cannot_do_is_found_as_serve_says_it(flags: str, settings: dict[str, object]) -> None:
    [finding] = _judged(f"{DENSE} -tp 2 {flags}").findings
    assert finding.what == _serve_refuses(tensor_parallel_size=2, **settings)
    assert finding.evidence[0].line.endswith("[HF138]")
    assert finding.fix is not None
    assert finding.fix.command == f"holdfast serve {DENSE} -tp 2"
    assert _judged(f"{DENSE} -tp 2").healthy
    assert _judged(f"{DENSE} {flags}", gpu="h100-80").healthy  # Of one rank nothing is refused.


def test_all_that_is_refused_is_found_at_once_with_one_command_without_it() -> None:
    found = _judged(f"{DENSE} -tp 2 --kv-store /x --kv-ram 4GiB --enable-sleep-mode --yield-to-neighbours")
    assert len(found.findings) == 4
    assert {one.fix.command for one in found.findings if one.fix is not None} == {f"holdfast serve {DENSE} -tp 2"}


@pytest.mark.parametrize(
    ("words", "gpu", "code"),
    [
        (f"{DENSE} -tp 2 -pp 2 --disable-custom-all-reduce", "h100-80x4", "HF138"),
        (f"{DENSE} -tp 2 -ep", "h100-80x2", "HF138"),
        (f"{EXPERTS} -tp 2 -q fp8", "h100-80x2", "HF138"),
        (f"{DENSE} -tp 2", "h100-80,a100-80", "HF138"),
        (f"{EXPERTS} -tp 2", "h100-80,h200", "HF138"),
        (f"{DENSE} -tp 4 --nnodes 2", "h100-80x2", "HF138"),
        (f"{DENSE} -pp 2 --nnodes 2 --node-rank 3", "h100-80", "HF139"),
        (f"{DENSE} -tp 4", "h100-80x2", "HF133"),
        (f"{DENSE} -tp 3", "h100-80x3", "HF131"),
        (f"{DENSE} --kv-store /x --no-enable-prefix-caching", "h100-80", "HF100"),
        (f"{DENSE} --max-num-seqs 64 --max-num-batched-tokens 16", "h100-80", "HF100"),
        ("gemma-2-9b --dtype float16", "h100-80", "HF129"),
    ],
)
def test_every_refusal_that_needs_no_count_of_memory_is_found(words: str, gpu: str, code: str) -> None:
    assert any(f"[{code}]" in one.evidence[0].line for one in _judged(words, gpu).findings)


def test_ranks_on_the_cpu_of_this_machine_are_asked_too() -> None:
    found = _judged("smollm2 -tp 2 --idle-release 60", gpu=None)
    assert "does not give memory up by itself" in found.findings[0].what


def test_gpus_of_each_node_are_counted_and_not_of_one() -> None:
    assert _judged(f"{DENSE} -tp 2 -pp 2 --nnodes 2").healthy


def test_variables_of_the_command_and_files_of_this_machine_count_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_KV_STORE", "/of/this/shell")
    assert _judged(f"{DENSE} -tp 2").healthy
    found = judge_command(f"HOLDFAST_KV_STORE=/x holdfast serve {DENSE} -tp 2", machine=CommandMachine(gpu="h100-80x2"))
    assert "a store of KV pages" in found.findings[0].what
    file = tmp_path / "settings.toml"
    file.write_text("idle-release = 60\n")
    assert "does not give memory up" in _judged(f"smollm2 -tp 2 --config {file}", gpu=None).findings[0].what
    assert _judged(f"{DENSE} -tp 2 --config /of/that/machine").healthy


def test_what_only_a_shell_knows_is_not_refused() -> None:
    assert not _judged(f"{DENSE} -tp $RANKS --kv-store /x").findings


def test_a_plan_prints_no_command_that_unlike_gpus_would_refuse() -> None:
    command = plan(DENSE, gpu="h100-80,a100-80", tensor_parallel_size=2).commands["holdfast"]
    assert not command.available
    assert "the same kernels do not run on both" in command.lacks[0]
    assert plan(DENSE, gpu="h100-80x2", tensor_parallel_size=2).commands["holdfast"].available


def test_what_a_plan_takes_of_these_it_refuses_itself() -> None:
    for settings in ({"cpu_offload_gb": 4}, {"gpu_layers": 4}, {"enable_expert_parallel": True}):
        with pytest.raises(ConfigurationError):
            plan(DENSE, gpu="h100-80x2", tensor_parallel_size=2, **settings)
    taken = {field.name for field in fields(PlanConfig)}
    assert not taken & {"kv_store", "kv_ram", "idle_release", "yield_to_neighbours", "enable_sleep_mode"}
