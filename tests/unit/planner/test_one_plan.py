"""What is printed of a model that runs with layers in RAM is one plan, and of one that does not run there no speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.models import catalogue
from holdfast.planner.api import plan
from holdfast.planner.report.text import lines

NOT_OF_IT = ("holds 0 tokens", "not even 1", "max_model_len = 0", "HFW28", "no throughput estimate")


@pytest.mark.parametrize("brief", [True, False])
def test_the_plan_is_of_the_layers_in_ram(brief: bool) -> None:
    found = plan("llama-3.1-8b", gpu="rtx3060", ram="64GiB")
    assert found.runs
    assert found.offload is not None
    text = "\n".join(lines(found, width=300, brief=brief))
    assert not [said for said in NOT_OF_IT if said in text]
    placed = found.offload.placement.plan
    assert f"the pool holds {placed.kv_tokens:,} tokens" in text
    assert {one.field: str(one.value) for one in found.decisions}["max_num_seqs"] == str(placed.limits.max_num_seqs)
    assert not [one for one in found.warnings if one.code == "HFW28"]


def test_what_does_not_run_has_no_speed() -> None:
    found = plan("llama-3.1-8b", gpu="rtx3060", ram="2GiB")
    assert not found.runs
    assert found.offload is not None
    assert found.offload.throughput is None
    text = "\n".join(lines(found, width=300))
    section = text.partition("With layers in RAM")[2].partition("Decisions")[0]
    assert "pinned of 0 B that layers may take" in section
    assert "tokens/s" not in section
    assert [one for one in found.warnings if one.code == "HFW28"]


def test_a_folder_without_weights_has_no_command_yet(tmp_path: Path) -> None:
    """And no other model is served instead."""
    (tmp_path / "config.json").write_text(json.dumps(catalogue.find("llama-3.1-8b").config, default=dict))
    found = plan(str(tmp_path), gpu="rtx3060", ram="64GiB")
    assert found.best is not None
    assert found.ways_out[found.best].fit.question.model.name == str(tmp_path)
    command = found.commands["holdfast"]
    assert not command.available
    assert str(tmp_path) in command.text
    said = f"{tmp_path} has a config but no weights: add them first"
    assert f"no command runs yet: {said}" in lines(found, width=400, brief=True)
    assert said in "\n".join(lines(found, width=400))
    assert "no command runs yet" not in "\n".join(lines(plan("llama-3.1-8b", gpu="rtx3060"), brief=True))
