"""A real Ray cluster of several nodes on this machine: each has its own processes, CPUs and loopback address, as if it
were a machine. Run as a program it is the cluster, and follows lines of its standard input; it ends with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SOURCES = Path(__file__).parents[2] / "src"
STARTS = 3
STORE_BYTES = 80 << 20
"""The least that Ray takes."""


class RayCluster:
    """`cpus`: of each node; the first is the head, and the one that servers of the test are on. `gpus`: that each says
    it has; there are none."""

    def __init__(self, folder: Path, cpus: list[int], gpus: int = 0) -> None:
        environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])),
        }
        environment.pop("RAY_ADDRESS", None)
        self._log = folder / "cluster.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(gpus), *map(str, cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self.address = self._heard()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the Ray cluster has ended: {self._log.read_text()[-2000:]}"
        return line

    def _do(self, order: str) -> str:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        return self._heard()

    def lose(self, node: int) -> None:
        """The machine: all of its processes at once."""
        self._do(f"lose {node}")

    def add(self, cpus: int) -> None:
        self._do(f"add {cpus}")

    def reserved(self) -> list[str]:
        """Names of placement groups that are not removed, and of actors that are not dead."""
        return [one for one in self._do("reserved").split("|") if one != "ok"]

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def ray_cluster(*cpus: int, gpus: int = 0) -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets lie in it: paths must be short.
    try:
        cluster = _started(folder, list(cpus), gpus)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, cpus: list[int], gpus: int) -> RayCluster:
    """Ray gives a node 30 s to come up, by a number in its code: on a busy machine that is not always enough."""
    for attempt in range(STARTS):
        try:
            return RayCluster(folder, cpus, gpus)
        except AssertionError:
            if attempt == STARTS - 1:
                raise
    raise AssertionError("no start was tried")


def _main(folder: str, gpus: int, cpus: list[int]) -> None:
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    # Where a cluster notes its address besides, whatever its own folder: there on machines that ran Ray before.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints.
    each = {"num_gpus": gpus, "object_store_memory": STORE_BYTES}
    head = each | {"num_cpus": cpus[0], "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.head_node]

    def add(amount: int) -> None:
        address = f"127.0.0.{len(nodes) + 1}"
        nodes.append(cluster.add_node(num_cpus=amount, node_ip_address=address, **each))

    try:
        for amount in cpus[1:]:
            add(amount)
        print(cluster.address, file=answers, flush=True)
        for line in sys.stdin:
            order, _, value = line.strip().partition(" ")
            said = "ok"
            if order == "lose":
                cluster.remove_node(nodes[int(value)], allow_graceful=False)
            elif order == "add":
                add(int(value))
            elif order == "reserved":
                said = _reserved(cluster.address)
            print(said, file=answers, flush=True)
    finally:
        cluster.shutdown()


def _reserved(address: str) -> str:
    import ray
    from ray.util import placement_group_table

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="error")
    from ray._private.state import actors

    groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    living = [str(one["ActorClassName"]) for one in actors().values() if one["State"] != "DEAD"]
    return "|".join(["ok", *groups, *living])


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), [int(one) for one in sys.argv[3:]])
