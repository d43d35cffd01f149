"""The process that speaks to Ray for a server: the cluster's driver of one job. It looks at the cluster, reserves a
placement group, keeps an agent on each node, and gives all of it back when the server hangs up. If it is killed, Ray
ends the job with everything in it.

A process of its own, so that Ray's threads, signal handlers and memory are neither in the server nor in rank 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import holdfast
from holdfast.config.parts.executors import NO_RAY
from holdfast.engine.ranks.ray_cluster import messages
from holdfast.engine.ranks.ray_cluster.actor import GpuHolder, NodeActor
from holdfast.engine.ranks.ray_cluster.address import cluster_address, first_line, no_cluster, part_of_ray
from holdfast.engine.ranks.ray_cluster.messages import HELLO_S, RELEASED_S, RESERVED_S
from holdfast.engine.ranks.ray_cluster.placement import NodeRoom, RayPlacement, Wanted, place
from holdfast.errors import ConfigurationError, HoldfastError, NoResourcesError
from holdfast.records import Failure

LOOK_S = 0.5
AGAIN_S = 2.0
"""Before an agent is started again that has ended in order."""
LOOK_FOR_LOST_S = 10.0
_SET_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""


def main() -> int:
    parent, descriptor = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return 3
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # They may reach the whole group; the server decides.
        signal.signal(one, signal.SIG_IGN)
    connection = Connection(descriptor)
    asked = messages.decode_reserve(connection.recv_bytes())
    driver = RayDriver(asked, connection)
    try:
        driver.place()
        driver.keep()
    except HoldfastError as error:
        driver.say(messages.NotPlaced(Failure.of(error)))
        return 1
    finally:
        driver.close()
    return 0


class RayDriver:
    def __init__(self, asked: messages.Reserve, connection: Connection) -> None:
        self._asked, self._connection = asked, connection
        self._group: Any = None
        self._holder: Any = None
        self._agents = list[_Agent]()
        sizes = asked.tensor_parallel, asked.pipeline_parallel
        self._wanted = Wanted(*sizes, asked.kind, asked.threads, asked.memory_bytes)

    def say(self, message: messages.FromDriver) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(messages.encode(message))

    def place(self) -> None:
        connect()
        self.say(messages.Connected())
        import ray

        home_id = ray.get_runtime_context().get_node_id()
        placement = self._find_room(home_id)
        home = next(node for node in cluster_nodes() if node.id == home_id)
        self._group = ray.util.placement_group(
            placement.bundles(home), strategy=placement.strategy, name=self._asked.name
        )
        if not self._group.wait(RESERVED_S):
            raise NoResourcesError(
                "Ray has not reserved what it says is free",
                needed=str(placement.bundles(home)),
                fix="ray status shows what is reserved, and what is pending",
            )
        gpus = self._hold_gpus(placement.amount) if placement.kind == "GPU" else []
        names = [f"{home.name} ({home.address})", *self._start_agents(placement, home)]
        self.say(
            messages.Placed(
                nodes=placement.nodes, address=home.address, amount=placement.amount, names=names, gpus=gpus
            )
        )

    def _hold_gpus(self, amount: int) -> list[str]:
        """Of the node where the server runs, until this ends: which they are."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        self._holder = ray.remote(GpuHolder).options(num_cpus=0, num_gpus=amount, scheduling_strategy=strategy).remote()
        try:
            return [str(one) for one in ray.get(self._holder.gpus.remote(), timeout=HELLO_S)]
        except ray.exceptions.RayError as error:
            raise ConfigurationError(
                "Ray has not said which GPUs of this machine it has reserved",
                code=NO_RAY,
                needed=f"holdfast {holdfast.__version__} in the Python that ray start was run with here",
                found=first_line(error),
                field="distributed_executor_backend",
            ) from None

    def _find_room(self, home_id: str) -> RayPlacement:
        """What an engine before this one had may still have to become free."""
        import ray

        until_s = time.monotonic() + RELEASED_S
        while True:
            try:
                head = ray.get_runtime_context().gcs_address
                return place(cluster_nodes(), home_id, self._wanted, nodes=self._asked.nodes, head=head)
            except NoResourcesError:
                if time.monotonic() > until_s or self._connection.poll(LOOK_S):
                    raise

    def _start_agents(self, placement: RayPlacement, home: NodeRoom) -> list[str]:
        """Their nodes' names, when all of them answer."""
        self._agents = [_Agent(self._group, node, placement, self._asked, home) for node in range(1, placement.nodes)]
        until_s = time.monotonic() + HELLO_S
        names = [agent.await_hello(until_s) for agent in self._agents]
        for agent in self._agents:
            agent.run()
        return names

    def keep(self) -> None:
        """Until the server hangs up: agents that have ended are started again, and a node that is lost is said."""
        looked_s = time.monotonic()
        while True:
            try:
                if self._connection.poll(LOOK_S):
                    self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            for agent in self._agents:
                if (text := agent.again()) is not None:
                    self.say(messages.Note("warning", text))
            if time.monotonic() - looked_s >= LOOK_FOR_LOST_S:
                looked_s = time.monotonic()
                if (text := self._lost()) is not None:
                    self.say(messages.Note("warning", text))

    def _lost(self) -> str | None:
        """Of a node whose bundle Ray has nowhere to put now."""
        from ray.util import placement_group_table

        table = placement_group_table(self._group)
        if table.get("state") in ("CREATED", None):
            return None
        nodes = "; ".join(
            f"{node.name} ({node.address}): {node.free_cpus:g} CPUs and {node.free_gpus:g} GPUs free"
            for node in cluster_nodes()
        )
        return (
            f"Ray has lost a node of this server ({table.get('state', '').lower()}), and waits for another with room:"
            f" {table.get('bundles')}; there are {nodes}"
        )

    def close(self) -> None:
        if "ray" not in sys.modules:
            return
        import ray

        with contextlib.suppress(Exception):  # What cannot be given back now, Ray takes when this job has ended.
            for agent in self._agents:
                agent.kill()
            if self._holder is not None:
                ray.kill(self._holder)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        ray.shutdown()


class _Agent:
    """The actor of a node that is not the server's."""

    def __init__(self, group: Any, node: int, placement: RayPlacement, asked: messages.Reserve, home: NodeRoom) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._node, self._asked, self._placement = node, asked, placement
        self._settings = asked.config | {"nnodes": placement.nodes, "node_rank": node, "master_addr": home.address}
        gpus = placement.amount if placement.kind == "GPU" else 0
        self._cpus = None if gpus else placement.amount
        self._actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=self._cpus or 0,
                num_gpus=gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            )
            .remote()
        )
        self._hello = self._actor.hello.remote()
        self._running: Any = None
        self._again_s, self._said = 0.0, ""

    def await_hello(self, until_s: float) -> str:
        """The name of its machine."""
        import ray

        where = f"node {self._node} of the placement group"
        try:
            said = ray.get(self._hello, timeout=max(0.0, until_s - time.monotonic()))
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"{where} cannot run an agent of Holdfast",
                code=NO_RAY,
                needed=f"holdfast {holdfast.__version__} in the Python that ray start was run with there",
                found=cause[-1][:500],
                fix=f"pip install 'holdfast[ray]=={holdfast.__version__}' on all nodes",
                field="distributed_executor_backend",
            ) from None
        if said["version"] != holdfast.__version__:
            raise ConfigurationError(
                f"{where} {said['name']} has another version of Holdfast",
                code=NO_RAY,
                needed=f"holdfast {holdfast.__version__}",
                found=f"{said['version']} in {said['python']}",
                fix=f"pip install 'holdfast[ray]=={holdfast.__version__}' on all nodes",
                field="distributed_executor_backend",
            )
        return str(said["name"])

    def run(self) -> None:
        self._running = self._actor.run.remote(self._settings, self._asked.environment, self._cpus)

    def again(self) -> str | None:
        """Runs an agent that has ended once more; why it ended, where that is news."""
        import ray

        if self._running is None:
            if time.monotonic() >= self._again_s:
                self.run()
            return None
        if not ray.wait([self._running], timeout=0)[0]:
            return None
        try:
            ended = ray.get(self._running)
            failed = messages.decode_from_driver(ended) if ended else None
            text = failed.failure.message if isinstance(failed, messages.NotPlaced) else ""
        except ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()[-1]
        self._running, self._again_s = None, time.monotonic() + AGAIN_S
        if not text or text == self._said:
            return None
        self._said = text
        return f"the agent of node {self._node} has ended: {text}"

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def connect() -> None:
    """To a cluster that answers. Starts none. Whoever started this process bounds how long Ray takes for it."""
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}.items():
        os.environ.setdefault(name, value)
    address, init = cluster_address(), part_of_ray("ray", "init")
    try:
        init(address=address, log_to_driver=True, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise no_cluster(f"at {address}: {first_line(error)}", head=address) from None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has set it.


def cluster_nodes() -> list[NodeRoom]:
    """That are alive."""
    import ray

    free_by_node = part_of_ray("ray._private.state", "available_resources_per_node")()
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        total, free = node["Resources"], free_by_node.get(node["NodeID"], {})
        found.append(
            NodeRoom(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                name=node["NodeManagerHostname"],
                cpus=total.get("CPU", 0.0),
                free_cpus=free.get("CPU", 0.0),
                gpus=total.get("GPU", 0.0),
                free_gpus=free.get("GPU", 0.0),
                memory_bytes=int(total.get("memory", 0)),
                free_memory_bytes=int(free.get("memory", 0)),
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
