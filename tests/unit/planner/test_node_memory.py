"""What a plan over several nodes means for each of them: no torch, no processes."""

from __future__ import annotations

import pytest
from planned_llama import LLAMA_3_8B

from holdfast import plan as ask
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.hardware import Memory, Processor
from holdfast.models import from_config
from holdfast.planner import Plan, make_cpu_plan
from holdfast.planner.report.text import lines
from holdfast.planner.serve.shares.nodes import (
    NodeMemory,
    available_everywhere,
    fit_nodes,
    node_loading,
    node_terms,
    page_bytes,
)
from holdfast.units import GIB

SPEC = from_config(LLAMA_3_8B)
FREE = 24 * GIB


def settings(**changed) -> EngineConfig:
    given = {"device": "cpu", "pipeline_parallel_size": 2, "nnodes": 2, "dtype": "float32", "load_format": "dummy"}
    return EngineConfig(**given | changed)


def planned(config: EngineConfig) -> Plan:
    machine = Memory(total_bytes=FREE, available_bytes=FREE, limited_by="machine")
    processor = Processor(model="one", cores=8, features=frozenset({"avx2"}))
    return make_cpu_plan(SPEC, None, config, machine, processor, compiled_kernels=True)


def test_a_model_that_one_machine_does_not_hold_is_planned_over_two() -> None:
    with pytest.raises(DoesNotFitError):
        planned(settings(nnodes=1))
    plan = planned(settings())
    assert plan.weights_bytes > FREE
    assert any("on each of 2 nodes" in decision.reason for decision in plan.decisions)


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 4}])
def test_what_nodes_take_is_what_all_ranks_take(sizes: dict[str, int]) -> None:
    plan = planned(settings(**sizes))
    parts = [node_terms(plan, node, 2) for node in (0, 1)]
    assert sum(part["weights"] for part in parts) == sum(plan.engine.rank_weights)
    assert sum(page_bytes(plan, node, 2) for node in (0, 1)) == plan.engine.layout.page_bytes
    for name, size in plan.terms.items():
        if name != "kv_pool":
            assert sum(part[name] for part in parts) >= size - 2


def test_staging_is_counted_where_ranks_read() -> None:
    """The first and the last stage have a matrix of the vocabulary, which is the largest that is read."""
    plan = planned(settings(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3))
    first, middle, last = (node_loading(plan, node, 3)["staging"] for node in range(3))
    assert middle < first / 3
    assert middle < last / 3
    assert first + middle + last == next(term.nbytes for term in plan.ranks[0].loading if term.name == "staging")
    activations = [node_terms(plan, node, 3)["activations"] for node in range(3)]
    assert activations[2] > activations[1]  # It has the logits of its part of the vocabulary.
    assert sum(activations) == plan.terms["activations"]


def test_a_node_that_cannot_hold_what_its_ranks_read_is_named_before_they_load() -> None:
    config = settings(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3, max_model_len=512)
    plan = planned(config)
    serving = sum(node_terms(plan, 2, 3).values()) + plan.engine.blocks * page_bytes(plan, 2, 3)
    small = NodeMemory(int(serving / config.gpu_memory_utilization) + GIB, "small")
    fit_nodes(plan, config, [NodeMemory(FREE), small, NodeMemory(FREE)])
    with pytest.raises(DoesNotFitError, match=r"node 2 \(small\) cannot hold ranks 4 to 5 while they load") as refused:
        fit_nodes(plan, config, [NodeMemory(FREE), NodeMemory(FREE), small])
    assert "of staging (what is read at a time)" in str(refused.value)


def test_equal_nodes_hold_what_was_planned() -> None:
    config = settings(max_model_len=4096)
    plan = planned(config)
    assert fit_nodes(plan, config, [NodeMemory(FREE), NodeMemory(FREE, "other")]).limits == plan.limits


def test_a_smaller_node_makes_the_pool_smaller() -> None:
    config = settings()
    plan = planned(config)
    whole = fit_nodes(plan, config, [NodeMemory(FREE), NodeMemory(FREE, "other")])
    room = sum(node_terms(plan, 1, 2).values())
    small = int((room + plan.engine.blocks // 2 * page_bytes(plan, 1, 2)) / config.gpu_memory_utilization)
    found = fit_nodes(plan, config, [NodeMemory(FREE), NodeMemory(small, "other")])
    assert 1 < found.engine.blocks < whole.engine.blocks
    assert any("node 1 (other) holds no more" in decision.reason for decision in found.decisions)
    assert found.engine.blocks * page_bytes(plan, 1, 2) + room <= small * config.gpu_memory_utilization + 1


@pytest.mark.parametrize("changed", [{}, {"max_model_len": 8192}, {"ram": FREE}])
def test_a_node_that_cannot_hold_its_ranks_is_named(changed: dict[str, int]) -> None:
    config = settings(tensor_parallel_size=2, **changed)
    plan = planned(config)
    with pytest.raises(DoesNotFitError, match=r"node 1 \(other\) cannot hold ranks 2 to 3") as refused:
        fit_nodes(plan, config, [NodeMemory(FREE), NodeMemory(GIB, "other")])
    assert "1.00 GiB free there" in str(refused.value)


def test_after_loading_the_node_with_least_room_decides() -> None:
    config = settings(ram=FREE)
    plan = planned(config)
    page = plan.engine.layout.page_bytes
    parts = [page_bytes(plan, node, 2) for node in (0, 1)]
    assert available_everywhere(plan, config, [100 * parts[0], 60 * parts[1]], [0, 10 * parts[1]]) == 50 * page


def test_plan_counts_the_memory_of_all_nodes_and_names_the_node_of_each_rank() -> None:
    asked = {"model": "llama-3-8b", "device": "cpu", "ram": "12GiB", "dtype": "bfloat16", "max_model_len": 4096}
    alone = ask(**asked)
    found = ask(**asked, pipeline_parallel_size=2, nnodes=2)
    assert (alone.fits, found.fits) == (False, True)
    assert [row["node"] for row in found.to_json()["ranks"]] == [0, 1]
    assert "--nnodes 2" in "\n".join(lines(found))
    with pytest.raises(ConfigurationError, match=r"1 rank \(-tp 1 x -pp 1\) cannot be on 2 nodes"):
        ask(**asked, nnodes=2)
