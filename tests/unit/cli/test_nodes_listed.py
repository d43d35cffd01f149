"""A machine that computes for a head elsewhere, as `holdfast ps` lists it: a node, not a server that is silent."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from holdfast.cli.commands.running.stop import _chosen
from holdfast.cli.main import main
from holdfast.cli.servers import background, node, registry
from holdfast.cli.servers.node import node_state
from holdfast.cli.servers.register import ServerEntry
from holdfast.cli.servers.registry import NodeState, RunningServer, registered_servers
from holdfast.config import EngineConfig, ServerConfig

WORDS = ("serve", "smollm2", "-tp", "2", "-pp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.1.2.3")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def config() -> EngineConfig:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2, "node_rank": 1}
    return EngineConfig(device="cpu", master_addr="10.1.2.3", **sizes)


@pytest.fixture
def entry() -> Iterator[ServerEntry]:
    found = ServerEntry(node_state(config()), model="smollm2", settings={}, certificate=None, words=WORDS)
    yield found
    found._remove()


def test_a_node_waits_for_its_head_and_then_has_it(entry: ServerEntry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("node 1 of 2  waiting for the head at 10.1.2.3:29501 for ")
    assert "; ranks 2 to 3 of 4 will run here\n" in said
    assert "the same command with --node-rank 0" in said
    assert f"holdfast stop {os.getpid()}" in said
    assert "unreachable" not in said
    assert "8000" not in said
    entry.joined(True)
    assert main(["ps"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("node 1 of 2  joined to the head at 10.1.2.3:29501 for ")
    assert ", with ranks 2 to 3 of 4\n" in said
    assert main(["ps", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["status"], told["node"]["head"], told["node"]["joined"]) == ("joined", "10.1.2.3:29501", True)
    assert told["process"]["command"] == f"holdfast {shlex.join(WORDS)}"


def test_what_the_agent_knows_of_its_head_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import holdfast.engine.ranks.nodes.agent as agents
    from holdfast.engine.startup import build, select_device

    seen = []

    class Agent:
        def __init__(self, config: object, files: object, on_joined: Callable[[bool], None]) -> None:
            self._on_joined = on_joined

        def run(self) -> None:
            for joined in (True, False):
                self._on_joined(joined)
                seen.append(state().joined)

    model = SimpleNamespace(files=SimpleNamespace(name="smollm2", path=tmp_path))
    monkeypatch.setattr(agents, "NodeAgent", Agent)
    monkeypatch.setattr(build, "find_model", lambda config, **how: model)
    monkeypatch.setattr(select_device, "settle_device", lambda config: config)
    assert node.run_node(replace(config(), node_secret="a secret of tests"), ServerConfig(), {}, WORDS) == 0
    assert seen == [True, False]


def state() -> NodeState:
    (server,) = registered_servers()
    assert server.node is not None
    return server.node


def test_nobody_chats_with_a_node(entry: ServerEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the model, and no API."""

    class Spawned(Exception):
        pass

    def spawn(*_: object) -> None:
        raise Spawned

    monkeypatch.setattr(background, "_spawn", spawn)
    with pytest.raises(Spawned):
        background.ensure_server("smollm2", {}, lambda line: None)


def test_top_shows_servers_alone(entry: ServerEntry, capsys: pytest.CaptureFixture[str]) -> None:
    main(["top", "--once"])
    assert "node 1 of 2" not in capsys.readouterr().out


def test_a_node_is_stopped_by_its_pid(entry: ServerEntry) -> None:
    (server,) = registered_servers()
    assert _chosen([str(os.getpid())], [server]) == [server]
    with pytest.raises(Exception, match="no server of yours") as refused:
        _chosen(["77"], [server])
    assert f"smollm2 (node 1 of 2, pid {os.getpid()})" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "head", "ranks"),
    [
        (f"holdfast {shlex.join(WORDS)} --headless", "10.1.2.3:29501", "ranks 2 to 3"),
        ("holdfast serve m -pp=2 -n 2 -r 1 --master_addr=h --master-port 7", "h:7", "rank 1"),
        ("holdfast serve m --port 9", None, ""),
        ("holdfast serve m -pp 2 --nnodes 2 --node-rank 0 --port 9", None, ""),
    ],
)
def test_a_node_is_known_by_its_command_line(
    words: str, head: str | None, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        def __init__(self, info: dict[str, Any]) -> None:
            self.info, self.pid = info, 7

    info = {"cmdline": words.split(), "username": "other", "create_time": 1.0}
    monkeypatch.setattr(psutil, "process_iter", lambda fields: [Process(info)])
    monkeypatch.setattr(registry, "_ancestors", lambda pid: set())
    (found,) = registry._unregistered(set())
    assert isinstance(found, RunningServer)
    if head is None:
        assert (found.port, found.node) == (9, None)
    else:
        assert found.node is not None
        assert (found.node.head, found.node.named_ranks, found.node.joined, found.port) == (head, ranks, None, 0)
