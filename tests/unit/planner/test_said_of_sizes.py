"""What a plan says of -tp, -pp, -dp, -ep and --nnodes, alone and together."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import plan
from holdfast.errors import ConfigurationError
from holdfast.observability.decisions import said_at_start
from holdfast.planner.advice.throughput import EXPECTED, step_seconds
from holdfast.planner.report.answer import PlanAnswer

DENSE, EXPERTS = "llama-3.1-8b", "qwen3-30b-a3b"


def said(found: PlanAnswer, field: str) -> list[str]:
    return [f"{one.value}: {one.reason}" for one in found.decisions if one.field == f"{field}_parallel_size"]


@pytest.mark.parametrize(
    ("gpus", "sizes", "tensor", "pipeline"),
    [
        (8, (8, 1), "8: all GPUs", None),
        (8, (4, 1), "4: as set: 4 of 8 GPUs are unused", None),
        (8, (4, 2), "4: 4 GPUs in each of 2 stages: all 8 GPUs",
         "2: layers 0 to 15 on GPUs 0, 1, 2, 3; layers 16 to 31 on GPUs 4, 5, 6, 7"),
        (5, (2, 2), "2: 2 GPUs in each of 2 stages: 1 of 5 GPUs is unused",
         "2: layers 0 to 15 on GPUs 0, 1; layers 16 to 31 on GPUs 2, 3"),
        (2, (1, 2), "1: 1 GPU in each of 2 stages: all 2 GPUs",
         "2: layers 0 to 15 on GPU 0; layers 16 to 31 on GPU 1"),
    ],
)  # fmt: skip
def test_gpus_are_those_of_a_stage(gpus: int, sizes: tuple[int, int], tensor: str, pipeline: str | None) -> None:
    found = plan(DENSE, gpu=f"h100-80x{gpus}", tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    assert said(found, "tensor") == [tensor]
    assert said(found, "pipeline") == ([] if pipeline is None else [pipeline])


def test_stages_that_were_left_to_the_plan_are_said_once() -> None:
    found = plan("llama-3.1-405b", gpu="h100-80x12")
    assert found.fit.pipeline_parallel > 1
    assert len(said(found, "pipeline")) == 1


def test_gpus_of_replicas_and_those_that_none_has() -> None:
    found = plan(DENSE, gpu="h100-80x8", tensor_parallel_size=2, data_parallel_size=3)
    assert said(found, "tensor") == ["2: the 2 GPUs of each replica"]
    assert said(found, "data")[0].endswith("2 of 8 GPUs are unused")
    found = plan(DENSE, gpu="h100-80x8", tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert said(found, "tensor") == ["2: 2 GPUs in each of 2 stages: the 4 GPUs of each replica"]


def test_the_warning_of_idle_gpus_names_both_sizes() -> None:
    found = plan(DENSE, gpu="h100-80x8", tensor_parallel_size=2, pipeline_parallel_size=2)
    (warning,) = [one.message for one in found.warnings if one.code == "HFW27"]
    assert warning == "tensor_parallel_size is 2 and pipeline_parallel_size 2 on a machine with 8 GPUs: 4 are unused"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu": "h100-80x2"}, "without effect: experts are dealt out among the GPUs of -tp, and one has all of them"),
        ({"gpu": "h100-80x2", "pipeline_parallel_size": 2}, "-pp divides layers, and no experts"),
        ({"gpu": "h100-80x2", "tensor_parallel_size": 2}, "64: each of 2 GPUs has 64 of the 128 experts of a layer"),
        ({"gpu": "h100-80x4", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
         "64: each of the 2 GPUs of a stage has 64 of the 128 experts"),
        ({"gpu": "h100-80x2", "data_parallel_size": 2}, "64: each of the 2 GPUs of 2 replicas has 64 of the 128"),
        ({"device": "cpu", "ram": "200GiB"}, "without effect: experts are dealt out among the ranks of -tp"),
        ({"device": "cpu", "ram": "200GiB", "data_parallel_size": 2}, "engines of -dp share nothing"),
        ({"device": "cpu", "ram": "200GiB", "tensor_parallel_size": 2}, "64, 64: linear: ranks have 64, 64 whole"),
    ],
)  # fmt: skip
def test_what_whole_experts_come_to_is_said(asked: dict[str, Any], words: str) -> None:
    found = plan(EXPERTS, enable_expert_parallel=True, **asked)
    (line,) = [f"{one.value}: {one.reason}" for one in found.decisions if one.field == "enable_expert_parallel"]
    assert words in line


def test_one_gpu_has_no_flag_for_whole_experts() -> None:
    found = plan(EXPERTS, enable_expert_parallel=True, gpu="h100-80x2")
    assert not [name for name, command in found.commands.items() if "--enable-expert-parallel" in command.text]


def test_a_model_without_experts_is_refused_as_the_server_does() -> None:
    with pytest.raises(ConfigurationError, match="this model has no experts") as refused:
        plan(DENSE, gpu="h100-80", enable_expert_parallel=True)
    assert refused.value.code == "HF138"


def test_a_server_says_at_start_what_whole_experts_come_to() -> None:
    assert said_at_start("enable_expert_parallel = without effect (set): one rank has all of them")


def test_gpus_of_nodes_are_of_each_and_what_crosses_the_network_is_in_the_time_of_a_step() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    spread, together = plan(DENSE, gpu="h100-80x2", nnodes=2, **sizes), plan(DENSE, gpu="h100-80x4", **sizes)
    assert [rank.device.index for rank in spread.fit.ranks] == [0, 1, 2, 3]
    assert spread.fit.ranks[0].terms == together.fit.ranks[0].terms
    spec, size = spread.question.model.spec, 2
    [said] = [one for one in spread.decisions if one.field == "network"]
    assert said.value == "25 Gbit/s"
    assert not [one for one in together.decisions if one.field == "network"]
    more_s = step_seconds(spread.fit, 8, 2048, EXPECTED) - step_seconds(together.fit, 8, 2048, EXPECTED)
    crossing = 8 * (2 * spec.hidden_size * size + spec.vocab_size * size)
    assert more_s == pytest.approx(crossing / 3.125e9)
    holdfast = spread.commands["holdfast"]
    assert len(holdfast.nodes) == 2
    assert holdfast.nodes[1].endswith("--nnodes 2 --node-rank 1 --master-addr HEAD --headless")


def test_remedies_of_several_nodes_name_no_gpus() -> None:
    """--gpu is of each node there, and remedies count all of them."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    spread = plan("llama-3.1-405b", gpu="h100-80x2", nnodes=2, **sizes)
    assert not spread.fits
    assert spread.ways_out
    assert not [way for way in spread.ways_out if "gpu" in way.settings]
    assert [way for way in plan("llama-3.1-405b", gpu="h100-80x4", **sizes).ways_out if "gpu" in way.settings]


def test_gpus_and_ranks_that_do_not_divide_are_refused_in_whole_words() -> None:
    with pytest.raises(ConfigurationError, match=r"the GPUs of a stage \(-tp 2\) would not be on one node") as refused:
        plan(DENSE, gpu="h100-80x2", tensor_parallel_size=2, nnodes=2)
    assert refused.value.code == "HF138"
    assert len(plan(DENSE, gpu="h100-80", tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2).fit.ranks) == 4
    with pytest.raises(ConfigurationError, match="each of 2 nodes needs 4 GPUs") as refused:
        plan(DENSE, gpu="h100-80x2", tensor_parallel_size=2, pipeline_parallel_size=4, nnodes=2)
    assert refused.value.code == "HF133"
    with pytest.raises(ConfigurationError, match=r"3 ranks \(-tp 1 x -pp 3\) cannot be on 2 nodes"):
        plan(DENSE, device="cpu", ram="100GiB", pipeline_parallel_size=3, nnodes=2)


def test_layers_are_not_spread_over_more_gpus_than_machines_have_where_stages_do() -> None:
    found = plan("llama-3.1-405b", gpu="h100-80x32")
    assert (found.fit.tensor_parallel, found.fit.pipeline_parallel) == (8, 2)
    as_set = plan("llama-3.1-405b", gpu="h100-80x32", tensor_parallel_size=16)
    assert found.fit.limits.max_model_len == as_set.fit.limits.max_model_len
    said = {one.field: one.reason for one in found.decisions if one.field.endswith("_parallel_size")}
    assert said == {
        "tensor_parallel_size": "of 32, as many as most machines have; each layer over 16 would fit too",
        "pipeline_parallel_size": "the fewest stages of 8 GPUs that leave as long a context",
    }
    assert len(found.commands["holdfast"].nodes) == 2
    [taken] = [one for one in found.to_json()["warnings"] if one["code"] == "HFW41"]
    assert taken["message"].startswith("16 GPUs are taken as 2 machines with 8 GPUs each")
    assert taken["fix"].startswith("--gpu h100-80x8 --nnodes 2 ")
    [untried] = [one for one in as_set.warnings if one.code == "HFW41"]
    assert untried.message.startswith("16 ranks on one machine: ")
    assert untried.fix == "-tp 8 -pp 2"
    assert "HFW41" not in {one.code for one in plan("llama-3.1-405b", gpu="h100-80x8").warnings}
    of_vllm = plan("llama-3.1-405b", engine="vllm", gpu="h100-80x32", tensor_parallel_size=16)
    assert "HFW41" not in {one.code for one in of_vllm.warnings}, "it is of our ranks"


@pytest.mark.parametrize(
    ("gpu", "nodes", "sizes"), [("h100-80x8", 2, (8, 2)), ("h100-80x8", 4, (8, 4)), ("h100-80x6", 2, (2, 6))]
)
def test_sizes_of_several_nodes_are_left_to_the_plan(gpu: str, nodes: int, sizes: tuple[int, int]) -> None:
    found = plan("llama-3.1-405b", gpu=gpu, nnodes=nodes)
    assert (found.fit.tensor_parallel, found.fit.pipeline_parallel) == sizes
    assert f"--tensor-parallel-size {sizes[0]} --pipeline-parallel-size {sizes[1]}" in found.commands["holdfast"].text
    [said] = [one for one in found.decisions if one.field == "sizes"]
    assert said.value == f"-tp {sizes[0]} -pp {sizes[1]}"


def test_gpus_of_all_machines_together_are_named_as_many_as_there_are() -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan("llama-3.1-405b", gpu="h100-80x8", tensor_parallel_size=8, nnodes=4)
    assert str(refused.value.fix).endswith("name the GPUs of all machines together: --gpu h100-80x32")
