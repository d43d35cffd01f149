"""Where the ranks of an engine go on a Ray cluster, and what is said where there is no room. No Ray."""

from __future__ import annotations

import pytest

from holdfast.engine.ranks.ray_cluster.placement import NodeRoom, Wanted, place
from holdfast.errors import ConfigurationError, NoResourcesError

GIB = 1 << 30


def node(name: str, cpus: float = 0, gpus: float = 0, *, free: float | None = None) -> NodeRoom:
    """`free`: of what it has; None: all."""
    return NodeRoom(
        id=name,
        address=f"10.0.0.{ord(name[0])}",
        name=name,
        cpus=cpus,
        free_cpus=cpus if free is None else free,
        gpus=gpus,
        free_gpus=gpus if free is None else free,
        memory_bytes=6 * GIB,
        free_memory_bytes=4 * GIB,
    )


@pytest.mark.parametrize(
    ("cluster", "sizes", "nodes", "amount"),
    [
        ("a2", (2, 1), 1, 2),  # Here, where there is room.
        ("a1 b1", (2, 1), 2, 1),  # The ranks of a stage apart, where it cannot be otherwise.
        ("a4 b4", (2, 2), 1, 4),
        ("a2 b2", (2, 2), 2, 2),
        ("a1 b1 c1 d1", (2, 2), 4, 1),
        ("a1 b4", (2, 1), 2, 1),
        ("a6 b6 c6", (4, 3), 3, 6),  # Two nodes would have room for six each, but cut a stage.
        ("a8 b3", (2, 2), 1, 8),
        ("a3 b8", (2, 2), 2, 3),
        ("a1", (1, 1), 1, 1),
    ],
)
def test_ranks_go_to_as_few_nodes_as_leave_stages_whole(cluster: str, sizes, nodes: int, amount: int) -> None:
    rooms = [node(one[0], int(one[1:])) for one in cluster.split()]
    placed = place(rooms, "a", Wanted(*sizes))
    assert (placed.nodes, placed.amount) == (nodes, amount)
    assert placed.each == sizes[0] * sizes[1] // nodes


def test_bundles_are_one_a_node_and_the_first_is_here() -> None:
    home, other = node("a", 2), node("b", 2)
    placed = place([other, home], "a", Wanted(2, 2))
    assert placed.bundles(home) == [{"CPU": 2.0, f"node:{home.address}": 0.001}, {"CPU": 2.0}]
    assert placed.strategy == "STRICT_SPREAD"
    alone = place([home], "a", Wanted(2, 1))
    assert (alone.bundles(home), alone.strategy) == ([{"CPU": 2.0, f"node:{home.address}": 0.001}], "STRICT_PACK")


def test_gpus_are_reserved_one_a_rank() -> None:
    home, other = node("a", 64, 8), node("b", 64, 8)
    placed = place([home, other], "a", Wanted(8, 2, "GPU"))
    assert placed.bundles(other)[1] == {"GPU": 8.0}
    assert place([home, other], "a", Wanted(2, 1, "GPU")).amount == 2  # Not all that there are.


def test_gpus_of_a_stage_are_on_one_node() -> None:
    cluster = [node("a", 64, 2), node("b", 64, 2)]
    assert place(cluster, "a", Wanted(2, 2, "GPU")).nodes == 2
    with pytest.raises(ConfigurationError, match="no room for 4 ranks") as refused:
        place(cluster, "a", Wanted(4, 1, "GPU"))
    assert refused.value.needed == "free GPUs: 4 here"
    assert place([node("a", 2), node("b", 2)], "a", Wanted(4, 1)).nodes == 2, "CPUs may be on several"


def test_threads_that_were_set_are_what_a_node_must_have() -> None:
    cluster = [node("a", 4), node("b", 2)]
    assert place(cluster, "a", Wanted(2, 1, threads=3)).amount == 3
    with pytest.raises(ConfigurationError, match="no room for 4 ranks") as refused:
        place([node("a", 2), node("b", 2)], "a", Wanted(2, 2, threads=3))
    needed = "free CPUs: 4 here or 3 on each of 2 nodes or 3 on each of 4 nodes, this one among them"
    assert refused.value.needed == needed
    assert refused.value.fix == "--threads 2 or less, or start the server on a node with more CPUs"


def test_memory_that_was_set_is_reserved_on_each_node() -> None:
    cluster = [node("a", 1), node("b", 1)]
    placed = place(cluster, "a", Wanted(2, 1, memory_bytes=4 * GIB))
    assert [bundle["memory"] for bundle in placed.bundles(cluster[0])] == [4.0 * GIB, 4.0 * GIB]
    with pytest.raises(NoResourcesError, match=r"has no room now for 2 ranks .*, on nodes with 5.00 GiB"):
        place(cluster, "a", Wanted(2, 1, memory_bytes=5 * GIB))
    with pytest.raises(ConfigurationError, match=r"on nodes with 7.00 GiB of memory free") as refused:
        place(cluster, "a", Wanted(2, 1, memory_bytes=7 * GIB))
    needed = "free CPUs: 2 here or 1 on each of 2 nodes, this one among them, with 7.00 GiB of memory on each"
    assert refused.value.needed == needed
    assert refused.value.fix == "--ram 6144MiB or less, or start the server on a node with more memory"


def test_an_engine_that_has_nodes_keeps_their_number() -> None:
    cluster = [node("a", 2), node("b", 2)]
    assert place(cluster, "a", Wanted(2, 1), nodes=2).nodes == 2
    with pytest.raises(ConfigurationError):
        place(cluster[:1], "a", Wanted(2, 1), nodes=2)


def test_a_cluster_that_is_too_small_is_named_with_what_would_do() -> None:
    with pytest.raises(ConfigurationError) as refused:
        place([node("a", 1), node("b", 1), node("c", 1)], "a", Wanted(2, 2), head="10.0.0.9:6380")
    error = refused.value
    assert error.code == "HF155"
    assert error.message == "the Ray cluster has no room for 4 ranks (-tp 2 x -pp 2), each with a CPU"
    assert error.needed == "free CPUs: 4 here or 2 on each of 2 nodes or 1 on each of 4 nodes, this one among them"
    assert error.found is not None
    assert error.found.startswith("a (10.0.0.97, this one): 1 of 1 CPUs free, 4.00 GiB of memory; b (10.0.0.98): 1 of")
    assert error.fix == "on another machine: ray start --address=10.0.0.9:6380 --num-cpus=N; or -tp 2 -pp 1"


def test_a_cluster_that_others_use_is_told_from_one_that_is_too_small() -> None:
    with pytest.raises(NoResourcesError, match="other jobs have reserved it") as refused:
        place([node("a", 2), node("b", 2, free=1)], "a", Wanted(4, 1))
    assert "b (10.0.0.98): 1 of 2 CPUs free" in str(refused.value)


def test_a_single_rank_is_needed_here_and_nowhere_else() -> None:
    with pytest.raises(ConfigurationError) as refused:
        place([node("a", 0)], "a", Wanted(1, 1))
    assert refused.value.needed == "free CPUs: 1 here"


def test_a_server_on_a_node_without_room_is_told_so() -> None:
    with pytest.raises(ConfigurationError) as refused:
        place([node("a", 8, 0), node("b", 8, 8)], "a", Wanted(2, 1, "GPU"))
    assert refused.value.fix == "start the server on a node with GPUs, or ray start with --num-gpus on this one"
