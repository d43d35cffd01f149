"""Ranks, agents and nodes of a Ray cluster that die under streams, and a server that does: nobody's answer changes, and
nothing is left in the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
from deadlines import PATIENCE_S
from ray_clusters import RayCluster, needs_ray, ray_cluster
from story_streams import STREAMS, all_streams

pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1, 1) as found:
        yield found


@pytest.fixture
def serve(start_server, tiny_arguments, cluster: RayCluster):
    flags = [*tiny_arguments, "-tp", "2", "--distributed-executor-backend", "ray"]
    return lambda: start_server(*flags, environment={"RAY_ADDRESS": cluster.address}).wait_ready()


def other_rank(server) -> psutil.Process:
    """The one on the other node."""
    rows = httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["ranks"]
    [row] = [row for row in rows if row["node"] == 1]
    return psutil.Process(row["pid"])


async def disturbed(server, strike: Callable[[], None]) -> list[str]:
    begun = asyncio.Semaphore(0)
    answers = asyncio.create_task(all_streams(server.url, begun))
    for _ in range(STREAMS // 4):
        await begun.acquire()
    await asyncio.to_thread(strike)
    return await answers


def gone(*processes: psutil.Process) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def wait_for(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.parametrize("struck", ["rank", "agent"])
async def test_streams_outlive_a_rank_and_its_agent(serve, cluster: RayCluster, struck: str) -> None:
    """And a server that is killed in the end, or stopped, leaves nothing in the cluster."""
    server = serve()
    undisturbed, rank = await all_streams(server.url), other_rank(server)
    agent = rank.parent()
    victim = rank if struck == "rank" else agent
    assert await disturbed(server, victim.kill) == undisturbed
    assert "restarting it" in server.log
    assert gone(rank)
    assert gone(agent) == (struck == "agent")
    last = other_rank(server)
    assert cluster.reserved()
    if struck == "rank":
        server.process.kill()
        wait_for(lambda: cluster.reserved() == [] and gone(last))
    else:
        assert server.stop() == 0
        assert cluster.reserved() == []
        assert gone(last)


@pytest.mark.long
async def test_a_driver_that_is_killed_is_replaced(serve, cluster: RayCluster) -> None:
    server = serve()
    undisturbed = await all_streams(server.url)
    [driver] = [
        one
        for one in psutil.Process(server.process.pid).children()
        if "holdfast.engine.ranks.ray_cluster.driver" in " ".join(one.cmdline())
    ]
    assert await disturbed(server, driver.kill) == undisturbed
    assert "the Ray driver has ended" in server.log
    assert server.stop() == 0
    assert cluster.reserved() == []


@pytest.mark.long
async def test_a_node_that_is_lost_is_replaced_by_another(start_server, tiny_arguments) -> None:
    flags = [*tiny_arguments, "-tp", "2", "--distributed-executor-backend", "ray"]
    with ray_cluster(1, 1) as cluster:
        server = start_server(*flags, environment={"RAY_ADDRESS": cluster.address}).wait_ready()
        undisturbed, before = await all_streams(server.url), other_rank(server)

        def lose() -> None:
            cluster.lose(1)
            wait_for(lambda: "Ray has lost a node of this server" in server.log)
            cluster.add(1)

        assert await disturbed(server, lose) == undisturbed
        assert gone(before)
        assert server.stop() == 0
        assert cluster.reserved() == []
