"""What a plan over several nodes means for each of them: no torch, no processes."""

from __future__ import annotations

import shlex

import pytest
from planned_llama import LLAMA_3_8B

from holdfast import plan as ask
from holdfast.cli.fatal import say_fatal
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint.cpu import FRAMEWORK_BYTES
from holdfast.footprint.lora import held_bytes
from holdfast.hardware import Memory, Processor
from holdfast.models import from_config
from holdfast.models.stages import rank_spec
from holdfast.planner import Plan, make_cpu_plan
from holdfast.planner.report.text import lines
from holdfast.planner.serve.refusals import changed as changed_settings
from holdfast.planner.serve.shares.nodes import (
    NodeMemory,
    NodeRefusal,
    available_everywhere,
    fit_nodes,
    node_loading,
    node_terms,
    page_bytes,
    ranks_of,
    with_node_remedies,
)
from holdfast.units import GIB, format_bytes

SPEC = from_config(LLAMA_3_8B)
FREE = 24 * GIB


def settings(**changed) -> EngineConfig:
    given = {"device": "cpu", "pipeline_parallel_size": 2, "nnodes": 2, "dtype": "float32", "load_format": "dummy"}
    return EngineConfig(**given | changed)


def planned(config: EngineConfig, free_bytes: int = FREE) -> Plan:
    machine = Memory(total_bytes=free_bytes, available_bytes=free_bytes, limited_by="machine")
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


def test_places_of_adapters_are_counted_on_each_node() -> None:
    """And copies behind them, by what each rank has of every matrix."""
    plan = planned(settings(tensor_parallel_size=2, enable_lora=True, max_loras=3, max_lora_rank=32, max_cpu_loras=5))
    for node in (0, 1):
        own = [rank_spec(SPEC, *plan.engine.part_of(rank)) for rank in ranks_of(plan, node, 2)]
        held = sum(held_bytes(one, dtype="float32", places=3, max_rank=32, copies=3) for one in own)
        assert node_terms(plan, node, 2)["adapters"] == held > 0


@pytest.mark.parametrize(
    ("tensor_parallel", "stages", "nodes", "senders"),
    [(1, 2, 2, 1), (2, 2, 2, 2), (1, 4, 2, 1), (4, 2, 4, 2), (2, 1, 2, 0)],
)
def test_what_ranks_send_to_other_nodes_is_counted(tensor_parallel: int, stages: int, nodes: int, senders: int) -> None:
    """A copy of each that has to, on the node that has most of them."""
    sizes = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": stages}
    plan, alone = (planned(settings(**sizes, nnodes=count), 4 * FREE) for count in (nodes, 1))
    most = max(plan.engine.stream_bytes, plan.engine.answer_bytes)
    assert plan.terms["exchange"] - alone.terms["exchange"] == senders * most


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


def test_ranks_of_the_head_that_do_not_run_yet_bring_a_framework_each() -> None:
    config = settings(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3, max_model_len=512, ram=FREE)
    plan = planned(config)
    loading = node_loading(plan, 0, 3)
    assert loading["framework"] == 2 * FRAMEWORK_BYTES
    needed = sum(loading.values()) - loading.get("front", 0) - loading["libraries"] - FRAMEWORK_BYTES
    others = [NodeMemory(FREE), NodeMemory(FREE)]
    fit_nodes(plan, config, [NodeMemory(needed, "head"), *others])
    with pytest.raises(DoesNotFitError, match=r"node 0 \(head\) cannot hold ranks 0 to 1 while they load"):
        fit_nodes(plan, config, [NodeMemory(needed - 1, "head"), *others])


def test_ranks_of_one_machine_that_do_not_run_yet_are_kept_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.engine.startup import build

    config = settings(tensor_parallel_size=4, pipeline_parallel_size=1, nnodes=1, dtype="bfloat16")
    plan = planned(config)
    running = plan.terms.get("front", 0) + plan.terms["libraries"] + FRAMEWORK_BYTES
    pool = plan.engine.blocks * plan.engine.layout.page_bytes
    enough = sum(plan.terms.values()) - plan.terms["kv_pool"] - running + pool + plan.reserve_bytes

    def fitted(free_bytes: int) -> int:
        machine = Memory(total_bytes=FREE, available_bytes=free_bytes, limited_by="machine")
        monkeypatch.setattr(build, "memory", lambda: machine)
        return build._still_fits(config, plan).engine.blocks

    assert fitted(enough) == plan.engine.blocks
    assert fitted(enough - 1) == plan.engine.blocks - 1


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


@pytest.mark.parametrize(
    ("changed", "small_gib", "first"),
    [
        ({"max_model_len": 8192}, 18, "--max-model-len "),  # It loads, and has no room for a context as long.
        ({}, 17, "--gpu-memory-utilization "),  # It does not even load.
    ],
)
def test_what_to_set_is_planned_for_the_node_that_cannot(
    changed: dict[str, int], small_gib: int, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is printed first every node holds its part; were all as large as the head, nothing would be short."""
    config = settings(**changed)
    plan = planned(config)
    machines = [NodeMemory(FREE), NodeMemory(small_gib * GIB, "other")]
    with pytest.raises(NodeRefusal) as refused:
        fit_nodes(plan, config, machines)
    told = with_node_remedies(refused.value, plan, config, machines, planned)
    assert told.fix is not None
    assert told.fix.startswith(first)
    assert f"planned for the {format_bytes(machines[1].free_bytes)} free on node 1" in told.fix
    flag, value = told.fix.split(",")[0].split()
    other = changed_settings(config, {flag.removeprefix("--").replace("-", "_"): value})
    fit_nodes(planned(other), other, machines)
    say_fatal(told, ["serve", "llama", "--nnodes", "2", "-pp", "2"])
    assert f"run:    holdfast serve llama --nnodes 2 -pp 2 {flag} {value}\n" in capsys.readouterr().err


def test_nothing_to_set_helps_a_node_that_is_far_too_small() -> None:
    config = settings()
    plan, machines = planned(config), [NodeMemory(FREE), NodeMemory(GIB, "other")]
    with pytest.raises(NodeRefusal) as refused:
        fit_nodes(plan, config, machines)
    told = with_node_remedies(refused.value, plan, config, machines, planned)
    assert told.fix == "more nodes, or free memory there"


def test_after_loading_the_node_with_least_room_decides() -> None:
    config = settings(ram=FREE)
    plan = planned(config)
    page = plan.engine.layout.page_bytes
    parts = [page_bytes(plan, node, 2) for node in (0, 1)]
    assert available_everywhere(plan, config, [100 * parts[0], 60 * parts[1]], [0, 10 * parts[1]]) == 50 * page


ASKED = {"model": "llama-3-8b", "device": "cpu", "ram": "12GiB", "dtype": "bfloat16", "max_model_len": 4096}


def test_plan_counts_the_memory_of_all_nodes_and_names_the_node_of_each_rank() -> None:
    alone = ask(**ASKED)
    found = ask(**ASKED, pipeline_parallel_size=2, nnodes=2)
    assert (alone.fits, found.fits) == (False, True)
    assert [row["node"] for row in found.to_json()["ranks"]] == [0, 1]
    with pytest.raises(ConfigurationError, match=r"1 rank \(-tp 1 x -pp 1\) cannot be on 2 nodes"):
        ask(**ASKED, nnodes=2)


def test_plan_has_a_box_and_a_command_for_each_node() -> None:
    found = ask(**ASKED, pipeline_parallel_size=2, nnodes=2)
    printed = "\n".join(lines(found, width=300))
    assert "on 2 nodes, each with cpu: fits" in printed
    for node in ("Node 0  cpu  12.00 GiB, budget 12.00 GiB", "Node 1  cpu  12.00 GiB, budget 12.00 GiB"):
        assert node in printed
    devices = found.to_json()["devices"]
    assert [one["index"] for one in devices] == [0, 1]
    assert "front" in devices[0]["terms"]
    assert "front" not in devices[1]["terms"]
    assert sum(one["terms"]["weights"] for one in devices) == found.fit.weights_bytes
    first, second = found.commands["holdfast"].nodes
    assert "--ram 12288MiB" in first  # Of each, as `serve` takes it.
    assert "--device cpu --node-rank 0 --master-addr HEAD" in first
    assert "--headless" not in first
    assert second.endswith("--nnodes 2 --device cpu --node-rank 1 --master-addr HEAD --headless")
    assert found.commands["holdfast"].text == first
    assert found.to_json()["node_commands"]["holdfast"] == [first, second]
    for words in (first, second, "export HOLDFAST_NODE_SECRET=", "# node 0, the head: it serves the API", "# node 1"):
        assert words in printed
    assert "HEAD:" in found.commands["sglang"].nodes[1]
    assert found.commands["llama.cpp"].lacks


def test_many_nodes_are_written_once_where_only_their_number_differs() -> None:
    found = ask(**ASKED, pipeline_parallel_size=8, nnodes=8)
    printed = "\n".join(lines(found, width=300))
    assert printed.count("holdfast serve") == 4
    assert "# nodes 3 to 7, each with its own --node-rank" in printed
    assert len(found.commands["holdfast"].nodes) == 8


def test_a_printed_command_for_each_node_is_taken_by_serve() -> None:
    from holdfast.cli.commands import serve
    from holdfast.cli.main import parse_command_line

    found = ask(**ASKED, tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    for node, text in enumerate(found.commands["holdfast"].nodes):
        _, arguments = parse_command_line(shlex.split(text)[1:])
        engine, server = serve.read_settings(arguments)
        assert (engine.node_rank, engine.nnodes, engine.ram, server.headless) == (node, 2, 12 * GIB, node == 1)


def test_the_budget_of_a_printed_command_is_that_of_the_machine_with_several_engines_too() -> None:
    found = ask(**ASKED | {"ram": "48GiB"}, data_parallel_size=2)
    assert "--ram 49152MiB" in found.commands["holdfast"].text


def test_ranks_on_a_cpu_say_so_in_their_command_and_llama_cpp_splits_nothing_there() -> None:
    found = ask(**ASKED | {"ram": "48GiB"}, tensor_parallel_size=2)
    assert "--device cpu" in found.commands["holdfast"].text
    assert "-sm layer" not in found.commands["llama.cpp"].text
    assert "GPUs" not in " ".join(found.commands["llama.cpp"].notes)


def test_the_head_of_equal_nodes_has_more_to_hold_and_decides() -> None:
    """Both together hold it: the API's memory is on the first."""
    rows = ask(**ASKED, pipeline_parallel_size=2, nnodes=2).to_json()["devices"]
    taken = [sum(row["terms"].values()) - row["terms"]["kv_pool"] for row in rows]
    assert taken[0] > taken[1]
    between = (taken[0] + taken[1]) // 2 + (rows[0]["kv_needed_bytes"] + rows[1]["kv_needed_bytes"]) // 2
    small = ask(**ASKED | {"ram": str(between + (2 << 20))}, pipeline_parallel_size=2, nnodes=2)
    assert not small.fits
    assert small.fit.short_bytes > 0


OFFERED = {"ram_bytes": "ram", "max_model_len": "max_model_len"}


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        ({"ram": "8.6GiB"}, {"more_ram"}),
        ({"model": "llama-3.1-8b", "ram": "12.2GiB", "max_model_len": 65536}, {"context", "more_ram"}),
    ],
)
def test_remedies_are_what_each_node_can_hold(changed: dict[str, object], kinds: set[str]) -> None:
    """Asked again with it, as it is printed, every node holds its part; --ram is of each node, not of all together."""
    given = {**ASKED, **changed, "pipeline_parallel_size": 2, "nnodes": 2}
    small = ask(**given)
    assert not small.fits
    assert {way.kind for way in small.ways_out} >= kinds
    assert "short on node 0" in "\n".join(lines(small, width=300))
    for way in small.ways_out:
        if way.kind in kinds:
            settings = {OFFERED[name]: value for name, value in way.settings.items()}
            assert ask(**{**given, **settings}).fits, way.change
    (ram,) = [way for way in small.ways_out if way.kind == "more_ram"]
    assert ram.settings["ram_bytes"] < 13 * GIB
    assert "on each of 2 nodes" in ram.change


def test_the_pool_is_what_the_node_with_the_least_room_holds() -> None:
    found = ask(**ASKED | {"ram": "10GiB"}, pipeline_parallel_size=2, nnodes=2)
    (pool,) = [one for one in found.decisions if one.field == "kv_pool"]
    assert "node 0 holds no more; all together would hold" in pool.reason
    for row in found.to_json()["devices"]:
        assert sum(row["terms"].values()) <= row["budget_bytes"]


def test_the_books_of_a_server_are_those_of_its_own_machine() -> None:
    """Processes of others cannot be measured here: their plan beside these would look like memory that is missing."""
    from holdfast.engine.ranks.messages import Measured
    from holdfast.engine.startup.build import _settled

    plan = planned(settings(tensor_parallel_size=2))
    names = ("framework", "libraries", "weights", "activations")
    ranks = [
        Measured(dict.fromkeys(names, 100 * rank), nameless_bytes=0, given_back_bytes=rank, peak_bytes=rank)
        for rank in range(1, 5)
    ]
    _, report = _settled(plan, ranks, [], plan.device.free_bytes)
    terms = {term.term: term for term in report.terms}
    assert report.total_bytes == FREE
    assert report.budget_bytes == plan.budget_bytes // 2
    assert report.limited_by == "machine; node 0 of 2, this one"
    assert terms["weights"].planned_bytes == sum(plan.engine.rank_weights[:2])
    assert terms["weights"].measured_bytes == 100 + 200
    assert terms["libraries"].measured_bytes == 200
    assert terms["kv_pool"].planned_bytes == plan.engine.blocks * page_bytes(plan, 0, 2)
    assert report.page_bytes == page_bytes(plan, 0, 2)
    assert (report.given_back_bytes, report.loading_peak_bytes) == (3, 3)
    assert report.loading_bytes == sum(node_loading(plan, 0, 2).values())
