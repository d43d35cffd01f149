"""The command that a plan prints for layers or experts in RAM: planned again, it is that plan."""

from __future__ import annotations

import pytest

from holdfast.doctor.command.parse import parse_command
from holdfast.planner import api
from holdfast.planner.fit.expert_placement import ExpertPlacement
from holdfast.planner.fit.placement import SPARE_BYTES
from holdfast.planner.report.answer import PlanAnswer

CARDS = {"rtx4090": {"ram": "64GiB"}, "rtx3060": {"ram": "32GiB"}, "rtx3090": {"ram": "16GiB", "nvme": "1TB"}}
LARGER = (
    ("llama-3.1-70b-awq", "rtx4090"), ("llama-3.1-70b-awq", "rtx3090"), ("qwen3-30b-a3b-gptq-int4", "rtx3060"),
    ("qwen3-30b-a3b", "rtx4090"), ("qwen3-30b-a3b", "rtx3090"), ("llama-3.1-8b", "rtx3060"),
    ("qwen3-32b-awq", "rtx3060"),
)  # fmt: skip
"""Than the GPU, not than GPU, RAM and disk together."""
FLAGS = ("max-model-len", "max-num-seqs", "max-num-batched-tokens")


def _placed(found: PlanAnswer) -> tuple[int, ...]:
    assert found.offload is not None
    placed = found.offload.placement
    if isinstance(placed, ExpertPlacement):
        return placed.places.resident
    return (*placed.streamed.layers, *placed.streamed.on_disk)


@pytest.mark.parametrize(("model", "gpu"), LARGER)
def test_a_printed_command_is_the_plan_that_was_printed(model: str, gpu: str) -> None:
    machine = {"gpu": gpu, **CARDS[gpu]}
    found = api.plan(model, **machine)
    assert found.offload is not None
    assert found.offload.runs
    command = parse_command(found.offload.command.text)
    assert command is not None
    flags = {flag.replace("-", "_"): value for flag in FLAGS if (value := command.value(flag)) is not None}
    assert set(flags) == {flag.replace("-", "_") for flag in FLAGS}
    again = api.plan(model, **machine, **flags)
    assert _placed(again) == _placed(found)
    assert again.offload is not None
    before, after = found.offload.placement.plan, again.offload.placement.plan
    # Tables of a shorter context leave a little more.
    assert before.ranks[0].pool_bytes <= after.ranks[0].pool_bytes < 1.02 * before.ranks[0].pool_bytes
    assert after.ranks[0].pool_bytes - after.needed_bytes(after.ranks[0]) >= SPARE_BYTES
    assert f"--max-model-len {flags['max_model_len']} " in again.offload.command.text


def test_a_context_that_is_shorter_in_the_command_is_said() -> None:
    found = api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="64GiB")
    assert found.offload is not None
    planned = found.offload.placement.plan.limits.max_model_len
    assert f"--max-model-len left out is what memory holds, {planned:,} here" in " ".join(str(found).split())
    kept = api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="64GiB", max_model_len=8192)
    assert kept.offload is not None
    assert "--max-model-len 8192" in kept.offload.command.text
    assert "left out is what memory holds" not in str(kept)
