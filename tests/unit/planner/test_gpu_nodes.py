"""Ranks on GPUs of several nodes as a server plans them: before it knows of the others, and for what they have; and
what is refused, by the node."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import plan
from holdfast.config import EngineConfig
from holdfast.config.nodes import WRONG_NODES
from holdfast.config.unsupported import NOT_WITH_RANKS, RANK_GPUS
from holdfast.engine.ranks.nodes.open import _gpus_of_all
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.footprint.gpu import line_memory_bytes, node_lines_bytes
from holdfast.footprint.lora import held_bytes
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.hardware.torch_build import TorchBuild
from holdfast.models import from_config
from holdfast.models.stages import rank_spec
from holdfast.planner.report.text import lines
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.serve.shares.gpu_ranks import gpus_of_nodes
from holdfast.units import GIB, MIB, format_bytes

SPEC = from_config({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
})  # fmt: skip


@pytest.fixture(autouse=True)
def _as_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_GPUS, raising=False)


def card(node: int, index: int = 0, free_gib: int = 23, **others: Any) -> NvidiaGpu:
    given = {"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "total_bytes": 24 * GIB}
    return NvidiaGpu(index=index, uuid=f"GPU-{node}-{index}", free_bytes=free_gib * GIB, **given | others)


def settings(sizes: tuple[int, int] = (2, 2), **more: Any) -> EngineConfig:
    return EngineConfig(device="cuda", nnodes=2, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], **more)


OWN = [card(0), card(0, 1)]


def planned(gpus: list[NvidiaGpu] = OWN, *, of_ranks: bool = False, config: EngineConfig | None = None) -> Any:
    return make_gpu_plan(SPEC, None, config or settings(), gpus, name="llama", of_ranks=of_ranks)


def test_other_nodes_are_taken_to_have_such_gpus_as_this_one_until_they_join() -> None:
    found = gpus_of_nodes(OWN, 6, 3)
    assert found[:2] == tuple(OWN)
    assert len({gpu.uuid for gpu in found}) == 6, "no two ranks share one"
    before, after = planned(), planned([*OWN, card(1), card(1, 1)], of_ranks=True)
    assert [gpu.index for gpu in before.engine.rank_gpus] == [0, 1, 0, 1]
    assert (before.limits, before.terms) == (after.limits, after.terms)


def test_the_gpu_with_the_least_decides_on_whichever_node_it_is() -> None:
    alike = planned()
    less = planned([*OWN, card(1), card(1, 1, free_gib=12)], of_ranks=True)
    assert less.engine.blocks < alike.engine.blocks
    [device] = [one.reason for one in less.decisions if one.field == "device"]
    assert "rank 3 has GPU 1 of node 1, 12.00 GiB of 24.00 GiB free; rank 3 has the least" in device
    assert less.engine.stages[0].layers > less.engine.stages[1].layers, "the other stage takes what it can"
    with pytest.raises(DoesNotFitError, match=r"does not fit on .* \(GPU 1 of node 1, stage 1\)"):
        planned([*OWN, card(1), card(1, 1, free_gib=1)], of_ranks=True)


def test_two_nodes_may_have_the_same_gpu_and_divide_it() -> None:
    one = replace(card(0), total_bytes=24 * GIB)
    found, alone = planned([one] * 4, of_ranks=True), planned()
    assert found.device.free_bytes == 23 * GIB // 4
    assert alone.device.free_bytes == 23 * GIB


def test_copies_of_adapters_are_counted_by_the_node_with_most() -> None:
    config = replace(settings((1, 6)), nnodes=3, enable_lora=True, max_lora_rank=32)
    plan = planned(config=config)
    own = [rank_spec(SPEC, *plan.engine.part_of(rank)) for rank in range(6)]
    each = [held_bytes(one, dtype="bfloat16", places=1, max_rank=32) for one in own]
    assert sum(each[2:4]) > sum(each[:2]), "whose ranks have no layers less for an embedding"
    ram = Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="machine")
    [said] = [one for one in with_host_memory(plan, config, ram, 0).decisions if one.field == "max_cpu_loras"]
    assert said.value == format_bytes(config.lora_copies * sum(each[2:4]))
    assert "of the node with most" in said.reason


def test_gpus_of_another_node_that_are_not_alike_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank 2 has NVIDIA A100 and rank 0 NVIDIA GeForce RTX 4090"):
        planned([*OWN, card(1, name="NVIDIA A100", capability=(8, 0)), card(1, 1)], of_ranks=True)


def test_a_stage_on_several_nodes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on 2 nodes the GPUs of a stage would not be on one") as refused:
        planned([card(0)], config=settings((2, 1)))
    assert refused.value.code == NOT_WITH_RANKS
    assert "-pp 2" in str(refused.value.fix)
    planned([card(0)], config=settings((1, 2)))


def test_a_node_needs_gpus_for_its_own_ranks_alone() -> None:
    build = TorchBuild("2.11", "13.0")

    def settled(count: int) -> EngineConfig:
        machine = NvidiaMachine(gpus=tuple(card(0, index) for index in range(count)), cuda=(13, 0))
        return settle_device(replace(settings(), device="auto"), here=machine, build=build)

    assert settled(2).device == "cuda"
    with pytest.raises(ConfigurationError, match="rank 1 of this node has no GPU: 2 ranks, and 1 visible GPU") as told:
        settled(1)
    assert "more nodes" in str(told.value.fix)


def test_a_node_without_gpus_is_named() -> None:
    reports = [
        SimpleNamespace(node=0, name="head", gpus=OWN),
        SimpleNamespace(node=1, name="other", gpus=[]),
    ]
    hub: Any = SimpleNamespace(reports=reports, spread=Spread(4, 2, 2))
    with pytest.raises(ConfigurationError, match=r"node 1 \(other\) has no GPUs for ranks 2 to 3") as refused:
        _gpus_of_all(hub)
    assert refused.value.code == WRONG_NODES
    reports[1].gpus = [card(1), card(1, 1)]
    assert _gpus_of_all(hub) == [*OWN, card(1), card(1, 1)]


def test_lines_between_nodes_are_in_ram_and_not_on_the_gpu() -> None:
    plan, host = planned(), Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="tests")
    engine = plan.engine
    lines = 2 * line_memory_bytes(engine.stream_bytes) + line_memory_bytes(engine.answer_bytes)
    assert node_lines_bytes(engine.stream_bytes, engine.answer_bytes, 2, 2) == lines
    config = replace(settings(), kv_ram=0)
    found = with_host_memory(plan, config, host, 0)
    [said] = [one.value for one in found.decisions if one.field == "node_lines"]
    assert said == format_bytes(lines)
    on_one = make_gpu_plan(SPEC, None, replace(config, nnodes=1), [card(0, index) for index in range(4)], name="llama")
    most = line_memory_bytes(max(engine.stream_bytes, engine.answer_bytes))
    assert on_one.terms["exchange"] - plan.terms["exchange"] == most - line_memory_bytes(0)
    with pytest.raises(DoesNotFitError, match="what stages hand on to one another through RAM does not fit"):
        with_host_memory(plan, config, replace(host, available_bytes=3 * GIB + lines - MIB), 0)


def test_a_middle_node_takes_streams_and_hands_them_on() -> None:
    assert node_lines_bytes(1000, 10, 2, 3) == 4 * line_memory_bytes(1000)
    assert node_lines_bytes(1000, 10, 2, 1) == 0


# More GPUs than ranks of one machine can be


@pytest.mark.parametrize(
    ("gpu", "sizes", "nodes", "again"),
    [
        ("h100-80x32", (8, 4), 4, "--gpu h100-80x8 --nnodes 4"),
        ("h100-80x32", (4, 8), 4, "--gpu h100-80x8 --nnodes 4"),
        ("h100-80x32", (8, 2), 2, "--gpu h100-80x8 --nnodes 2"),
        ("h100-80x12", (1, 12), 2, "--gpu h100-80x6 --nnodes 2"),
    ],
)
def test_a_plan_of_more_gpus_than_a_machine_s_is_one_of_machines(
    gpu: str, sizes: tuple[int, int], nodes: int, again: str
) -> None:
    """Holdfast's command is that of the plan that its note names; other engines have theirs of one machine."""
    split = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], "quantization": "fp8"}
    found = plan("llama-3.1-70b", gpu=gpu, **split)
    own = found.commands["holdfast"]
    assert not own.lacks
    assert any(f"{again} and these sizes plan them so" in note for note in own.notes)
    _, of_one, _, count = again.split()
    assert own.nodes == plan("llama-3.1-70b", gpu=of_one, nnodes=int(count), **split).commands["holdfast"].nodes
    assert len(own.nodes) == nodes
    assert "CUDA_VISIBLE_DEVICES" not in own.text
    assert found.commands["vllm"].nodes == ()
    printed = "\n".join(lines(found, width=160))
    assert f"# Holdfast on {nodes} nodes" in printed
    assert "Holdfast, no command" not in printed


def test_gpus_that_differ_are_not_taken_for_machines() -> None:
    found = plan("llama-3.1-8b", gpu="h100-80x8,h200x8", tensor_parallel_size=2, pipeline_parallel_size=8)
    own = found.commands["holdfast"]
    assert own.nodes == ()
    assert any("more than the 8 that map one another's memory" in one for one in own.lacks)


def test_gpus_of_nodes_stay_on_their_nodes() -> None:
    """Of a larger and a smaller one each: stages take turns as ranks do, and each node sees its own two."""
    found = plan("llama-3.1-70b", gpu="l40s,l4", pipeline_parallel_size=4, nnodes=2, quantization="awq")
    assert [rank.device.name for rank in found.fit.ranks] == ["l40s", "l4"] * 2
    first, second, third, fourth = (len(one) for one in found.fit.stage_layers)
    assert min(first, third) > 1.5 * max(second, fourth)
    assert not any("CUDA_VISIBLE_DEVICES" in text for text in found.commands["holdfast"].nodes)
