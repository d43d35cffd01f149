"""Ranks on a real Ray cluster, whose nodes are process groups of this machine (support/ray_clusters.py): the tokens of
one rank, nothing left in the cluster, and what is said where there is no room."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest
from deadlines import PATIENCE_S
from lora_adapters import write_adapter
from rank_engines import make, tokens
from ray_clusters import SOURCES, RayCluster, needs_ray, ray_cluster

from holdfast import LoRARequest
from holdfast.engine.ranks.ray_cluster.messages import Connected, Placed, Reserve, decode_from_driver, encode
from holdfast.errors import AdapterError, ConfigurationError, ModelNotFoundError

pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster(1, 1) as found:
        patch.setenv("RAY_ADDRESS", found.address)
        yield found


@pytest.fixture(scope="module")
def of_one(tiny_model) -> list[list[int]]:
    with make(tiny_model, 1) as llm:
        return tokens(llm)


def on_ray(model, tensor: int, pipeline: int, **settings):
    given = {"pipeline_parallel_size": pipeline, "threads": None, "distributed_executor_backend": "ray"}
    return make(model, tensor, **given | settings)


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)], ids=["tp2", "pp2"])
def test_two_nodes_say_what_one_rank_says(cluster: RayCluster, tiny_model, of_one, sizes: tuple[int, int]) -> None:
    with on_ray(tiny_model, *sizes) as llm:
        assert tokens(llm) == of_one
        rows = llm.info.memory.ranks
        assert [(row.node, row.threads) for row in rows] == [(0, 1), (1, 1)]
        other = psutil.Process(rows[1].pid)
        assert "NodeActor" in other.parent().name()
        assert sorted(cluster.reserved()) == ["NodeActor", f"holdfast {tiny_model}"]
    assert cluster.reserved() == []
    assert not other.is_running()


def test_a_cluster_that_is_too_small_is_refused_with_its_nodes(cluster: RayCluster, tiny_model) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"no room for 4 ranks \(-tp 2 x -pp 2\)") as refused:
        on_ray(tiny_model, 2, 2)
    assert time.monotonic() - began_s < PATIENCE_S
    assert refused.value.code == "HF155"
    assert refused.value.found is not None
    assert refused.value.found.count("1 of 1 CPUs free") == 2
    assert "(127.0.0.2)" in refused.value.found
    assert cluster.reserved() == []


@pytest.mark.long
def test_what_a_node_lacks_is_said_by_the_head(cluster: RayCluster, tiny_model, tmp_path, monkeypatch) -> None:
    """A checkpoint that only the head has: its path goes by the folder that a process is in."""
    (tmp_path / "only-here").symlink_to(tiny_model)
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"node 1 \(.*\): no model at '/proc/self/cwd/only-here'"):
        on_ray("/proc/self/cwd/only-here", 2, 1)
    assert cluster.reserved() == []


@pytest.mark.long
def test_adapters_are_read_on_each_node(cluster: RayCluster, tiny_model, tmp_path, monkeypatch) -> None:
    """And one that only the head has is refused; its path goes by the folder that a process is in."""
    write_adapter(tmp_path / "sql", tiny_model, seed=1)
    everywhere = LoRARequest("sql", 1, str(tmp_path / "sql"))
    with make(tiny_model, 1, enable_lora=True) as llm:
        plain, expected = tokens(llm), tokens(llm, lora=everywhere)
    assert plain != expected
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.chdir(tmp_path)
    with on_ray(tiny_model, 1, 2, enable_lora=True) as llm:
        assert tokens(llm, lora=everywhere) == expected
        with pytest.raises(AdapterError, match=r"rank 1 \(node 1\): the folder of here") as refused:
            tokens(llm, lora=LoRARequest("here", 2, "/proc/self/cwd/sql"))
        assert refused.value.code == "HF379"
        assert tokens(llm) == plain
    assert cluster.reserved() == []


@pytest.mark.long
def test_stages_of_two_ranks_are_on_a_node_each(tiny_model, of_one, monkeypatch) -> None:
    with ray_cluster(2, 2, 1) as found:
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        with on_ray(tiny_model, 2, 2) as llm:
            assert tokens(llm) == of_one
            assert [row.node for row in llm.info.memory.ranks] == [0, 0, 1, 1]
        assert found.reserved() == []


@pytest.mark.long
def test_gpus_are_reserved_on_each_node() -> None:
    """As numbers of Ray's: nothing computes on them."""
    with ray_cluster(1, 1, gpus=2) as found:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "holdfast.engine.ranks.ray_cluster.driver", str(os.getpid())]
        environment = os.environ | {"RAY_ADDRESS": found.address}
        with theirs:
            driver = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment)
        with Connection(ours.detach()) as connection:
            asked = Reserve(
                name="gpus", tensor_parallel=2, pipeline_parallel=2, kind="GPU", threads=None, memory_bytes=1 << 30,
                nodes=None, config={}, environment={},
            )  # fmt: skip
            connection.send_bytes(encode(asked))
            assert decode_from_driver(connection.recv_bytes()) == Connected()
            placed = decode_from_driver(connection.recv_bytes())
            assert isinstance(placed, Placed)
            assert (placed.nodes, placed.amount) == (2, 2)
            assert sorted(placed.gpus) == ["0", "1"], "of this node, which the server's ranks have"
            assert sorted(found.reserved()) == ["GpuHolder", "NodeActor", "gpus"]
        assert driver.wait(PATIENCE_S) == 0
        assert found.reserved() == []
