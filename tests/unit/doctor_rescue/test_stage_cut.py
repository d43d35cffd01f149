"""Commands whose engine cuts layers into stages: evenly unless a variable before them says otherwise, whatever a plan
would have chosen."""

from __future__ import annotations

import pytest

from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.check_command.to_question import question_for
from holdfast.doctor.command.parse import parse_command
from holdfast.doctor.findings import Diagnosis
from holdfast.planner.report.answer import answer

MODEL = "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"
STAGED = f"vllm serve {MODEL} --pipeline-parallel-size 2 --max-model-len 8192"
SGLANG = f"python -m sglang.launch_server --model-path {MODEL} --pp-size 2 --context-length 8192"
VARIABLE = "VLLM_PP_LAYER_PARTITION"


def _judged(command: str, gpu: str = "l40s,l4") -> Diagnosis:
    return judge_command(command, machine=CommandMachine(gpu=gpu))


def test_a_command_without_the_variable_is_cut_evenly() -> None:
    """As vLLM cuts it: the L4 would have 40 layers, which it does not hold."""
    found = _judged(STAGED)
    [finding] = found.findings
    assert "it does not fit" in finding.what
    assert "idle" not in finding.what
    assert finding.fix is not None
    assert finding.fix.command == f"{VARIABLE}=56,24 {STAGED}"
    assert _judged(finding.fix.command).healthy
    assert not _judged(SGLANG).healthy
    assert _judged(f"SGLANG_PP_LAYER_PARTITION=56,24 {SGLANG}").healthy


@pytest.mark.parametrize(("cut", "fits"), [("56,24", True), ("40,40", False), ("30,50", False), (" 54 , 26 ", True)])
def test_a_command_with_the_variable_is_cut_as_it_says(cut: str, fits: bool) -> None:
    text = f"{VARIABLE}='{cut}' {STAGED}"
    assert _judged(text).healthy == fits
    assert _judged(f"env {VARIABLE}='{cut}' {STAGED}").healthy == fits
    command = parse_command(text)
    assert command is not None
    told = answer(question_for(command, CommandMachine(gpu="l40s,l4"), None), engine="vllm")
    layers = [int(word) for word in cut.split(",")]
    assert [len(one) for one in told.fit.stage_layers] == layers


def test_the_variable_that_is_offered_shows_the_gpus_in_the_order_of_its_stages() -> None:
    [finding] = _judged(STAGED, gpu="l4,l40s").findings
    assert finding.fix is not None
    assert finding.fix.command == f"CUDA_VISIBLE_DEVICES=1,0 CUDA_DEVICE_ORDER=PCI_BUS_ID {VARIABLE}=56,24 {STAGED}"
    shown = _judged(f"CUDA_VISIBLE_DEVICES=4,2 {STAGED}", gpu="l4,l40s")
    assert all(VARIABLE not in (fix.command or "") for fix in [shown.findings[0].fix] if fix is not None)


@pytest.mark.parametrize("cut", ["56,25", "40,20,20", "80", "80,0", "most,few", ""])
def test_a_variable_that_is_no_cut_of_the_model_is_refused(cut: str) -> None:
    found = _judged(f"{VARIABLE}={cut} {STAGED}", gpu="l40sx2")
    [finding] = found.findings
    assert finding.cause == "bad_flag"
    assert "80 layers together" in finding.why
    assert finding.fix is not None
    assert finding.fix.command == STAGED
    assert _judged(STAGED, gpu="l40sx2").healthy


def test_a_change_of_the_stages_leaves_the_variable_out() -> None:
    """Of another number of stages, or of a model with other layers, it is no cut."""
    [finding] = _judged(f"{VARIABLE}=30,50 {STAGED}").findings
    changes = [fix.changes for fix in (finding.fix, *finding.alternatives) if fix is not None and fix.command]
    other = [one for one in changes if "--pipeline-parallel-size" in one or "--model" in one]
    assert other
    assert all(one.get(VARIABLE, "kept") is None for one in other)


def test_holdfast_finds_its_own_cut() -> None:
    assert _judged(STAGED.replace("vllm", "holdfast")).healthy
