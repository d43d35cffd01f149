"""A server's side of Ray: it starts the driver, learns on how many nodes its ranks are, and starts another driver when
one has ended. Imports no Ray.

    server ── socket ──► driver ──► Ray: placement group, an agent on each node ── join ──► rank 0

The driver ends with the server however that ends, and Ray ends all that is the driver's.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.config.nodes import DEFAULT_PORT
from holdfast.config.parts.executors import NO_RAY
from holdfast.engine.ranks.nodes.secret import new_secret
from holdfast.engine.ranks.ray_cluster import messages
from holdfast.engine.ranks.ray_cluster.address import no_cluster
from holdfast.engine.ranks.ray_cluster.messages import HELLO_S, RELEASED_S, RESERVED_S
from holdfast.errors import ConfigurationError, EngineError
from holdfast.hardware import processor
from holdfast.hardware.nvidia import VISIBLE
from holdfast.records import Failure

log = logging.getLogger("holdfast")

CONNECTED_S = 90.0
"""For a driver to be let into a cluster that answers: Ray alone would try for minutes, and again."""
SPARE_S = 60.0
"""For all that Ray is asked for in between."""
PLACED_S = CONNECTED_S + RELEASED_S + RESERVED_S + HELLO_S + SPARE_S
"""For a driver to reserve the nodes, or to say why it cannot: longer than all that it waits for itself, one after the
other, so that a slow cluster is told of in the driver's words and not as one that does not answer."""
ENDED_S = 15.0
"""For a driver to give all back."""
AGAIN_S = 5.0
"""Before another driver is started."""
LOOK_S = 0.2
LOOKS_FOR_HEAD_S = 86400.0
"""An agent: it lives as long as the server does, which may restart its engine or download a model."""
DRIVER_BYTES = 96 << 20
"""Of memory, of the driver."""
PORTS = 1000
"""Among which one is chosen for agents to join at, where none was set."""
TAKEN_ALONG = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
"""Variables that agents need as the server has them. Folders are each node's own."""


def driver_bytes(config: EngineConfig) -> int:
    """Of memory beside the engine's."""
    return DRIVER_BYTES if config.distributed_executor_backend == "ray" else 0


@contextlib.contextmanager
def on_ray(config: EngineConfig, name: str) -> Iterator[EngineConfig]:
    """The settings of node 0 while Ray keeps the other nodes; the same settings where Ray was not asked for. `name`: of
    the model, for people. Raises what keeps the ranks from being placed."""
    if config.distributed_executor_backend != "ray":
        yield config
        return
    settled, nodes = place_on_ray(config, name)
    try:
        yield settled
    finally:
        nodes.close()


def place_on_ray(config: EngineConfig, name: str) -> tuple[EngineConfig, RayNodes]:
    """The settings of node 0, and what keeps the others until it is closed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            "Ray is not installed, and distributed_executor_backend is ray",
            code=NO_RAY,
            needed="the ray package, of the version that the cluster has",
            fix="pip install 'holdfast[ray]'",
            field="distributed_executor_backend",
        )
    port = config.master_port if config.master_port != DEFAULT_PORT else _free_port()
    own = replace(
        config, distributed_executor_backend="mp", master_port=port, node_secret=new_secret(), node_secret_file=None
    )
    nodes = RayNodes(own, name)
    try:
        placed = nodes.await_placed()
        settled = replace(
            own,
            nnodes=placed.nodes,
            master_addr=placed.address,
            threads=config.threads if config.device == "cuda" else min(placed.amount, processor().cores),
        )
    except BaseException:
        nodes.close()
        raise
    return settled, nodes


class RayNodes:
    """What a server has of a Ray cluster, until it is closed or the process ends."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self._config, self._name, self._visible = config, name, os.environ.get(VISIBLE)
        self._placed: Future[messages.Placed] = Future()
        self._closing = threading.Event()
        # The system ends a driver when the thread that started it ends.
        self._thread = threading.Thread(target=self._run, name="ray-driver", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def await_placed(self) -> messages.Placed:
        try:
            return self._placed.result(PLACED_S)
        except TimeoutError:
            raise ConfigurationError(
                "the Ray cluster does not answer",
                code=NO_RAY,
                needed=f"all nodes reserved within {PLACED_S:g} s",
                found=f"RAY_ADDRESS {os.environ.get('RAY_ADDRESS') or 'is not set'}",
                fix="ray status on this machine shows whether the cluster runs",
                field="distributed_executor_backend",
            ) from None

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                ending = self._drive()
            except OSError as error:
                ending = str(error)
            if self._closing.is_set():
                return
            if not self._placed.done():
                self._placed.set_exception(EngineError(f"the Ray driver has ended: {ending}"))
            if self._placed.exception() is not None:
                return
            log.error("the Ray driver has ended (%s): the nodes are placed again", ending)
            self._closing.wait(AGAIN_S)

    def _drive(self) -> str:
        """One driver, until it has ended: how."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "holdfast.engine.ranks.ray_cluster.driver", str(os.getpid()),
                 str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        connection = Connection(ours.detach())
        why, connected, until_s = "", False, time.monotonic() + CONNECTED_S
        try:
            with contextlib.suppress(EOFError, OSError):
                connection.send_bytes(messages.encode(self._asked()))
                while not self._closing.is_set():
                    if connection.poll(LOOK_S):
                        connected = True
                        why = self._hear(messages.decode_from_driver(connection.recv_bytes())) or why
                    elif not connected and time.monotonic() > until_s:
                        why = self._hear(messages.NotPlaced(Failure.of(_not_let_in())))
                        process.kill()
                        break
        finally:
            connection.close()
            if not self._placed.done():  # It waits for Ray, which ends what it has begun.
                process.kill()
            try:
                process.wait(ENDED_S if self._closing.is_set() else 1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return why or f"exit code {process.returncode}"

    def _asked(self) -> messages.Reserve:
        config = self._config
        placed = self._placed.result() if self._placed.done() else None
        return messages.Reserve(
            name=f"holdfast {self._name}"[:120],
            tensor_parallel=config.tensor_parallel_size,
            pipeline_parallel=config.pipeline_parallel_size,
            kind="GPU" if config.device == "cuda" else "CPU",
            threads=config.threads,
            memory_bytes=config.ram,
            nodes=None if placed is None else placed.nodes,
            config=asdict(config) | {"node_timeout": LOOKS_FOR_HEAD_S, "model": _same_everywhere(config.model)},
            environment={name: os.environ[name] for name in TAKEN_ALONG if name in os.environ},
        )

    def _hear(self, heard: messages.FromDriver) -> str:
        """Why nothing was placed, where that is what was said."""
        if isinstance(heard, messages.Note):
            log.log(logging.getLevelNamesMapping()[heard.level.upper()], "%s", heard.text)
        elif isinstance(heard, messages.Connected):
            pass
        elif isinstance(heard, messages.Placed):
            if heard.gpus:  # To this process, and to all engine processes that it starts from now on.
                os.environ[VISIBLE] = ",".join(heard.gpus)
            log.info("Ray has placed the ranks on %d nodes: %s", heard.nodes, ", ".join(heard.names))
            if not self._placed.done():
                self._placed.set_result(heard)
        elif not self._placed.done():
            self._placed.set_exception(heard.failure.error())
        else:
            return str(heard.failure.error())
        return ""

    def close(self) -> None:
        """Gives all nodes back."""
        if self._visible is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = self._visible
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join(ENDED_S + 5.0)


def _not_let_in() -> ConfigurationError:
    where = os.environ.get("RAY_ADDRESS") or "the address of the last cluster of this machine"
    return no_cluster(f"what answers at {where} has not let this machine in within {CONNECTED_S:g} s")


def _same_everywhere(model: str | None) -> str | None:
    """A path as other processes understand it; other names as they are."""
    if model is None or not Path(model).expanduser().exists():
        return model
    return str(Path(model).expanduser().absolute())


def _has_file(stream: object) -> bool:
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):
        return False


def _free_port() -> int:
    """Below those that systems give to connections by themselves: nobody has it by chance while an engine restarts."""
    for offset in range(PORTS):
        port = DEFAULT_PORT + (os.getpid() + offset) % PORTS
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return DEFAULT_PORT
