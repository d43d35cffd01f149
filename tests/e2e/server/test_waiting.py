"""A server that waits before it loads answers probes: while a cluster places its ranks, and at the socket that it
serves at afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
from free_ports import free_port

from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.engine.ranks.ray_cluster import launch as ray_launch
from holdfast.errors import ConfigurationError
from holdfast.server.run import bind
from holdfast.server.waiting import answering

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}


def test_probes_and_clients_are_told_why() -> None:
    listener = bind(port=0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with answering(listener, "nodes are awaited", root_path="/models/a"), httpx.Client(base_url=url) as http:
        for path in ("/health", "/ping", "/models/a/health"):
            health = http.get(path)
            assert health.status_code == 503
            assert health.json() == {"status": "loading", "reason": "starting: nodes are awaited"}
            assert int(health.headers["retry-after"]) > 0
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    # The socket is still there, for who serves: also who has connected meanwhile is heard then.
    with httpx.Client(base_url=url) as http, answering(listener, "once more"):
        assert http.get("/health").json()["reason"] == "starting: once more"
    listener.close()


def test_a_server_whose_ranks_ray_places_answers_meanwhile(monkeypatch, capsys) -> None:
    port, heard = free_port(), list[tuple[int, dict[str, str]]]()

    @contextlib.contextmanager
    def placing(config: EngineConfig, name: str) -> Iterator[EngineConfig]:
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
        heard.append((answer.status_code, answer.json()))
        raise ConfigurationError("there is no such cluster", field="distributed_executor_backend")
        yield config

    monkeypatch.setattr(ray_launch, "on_ray", placing)
    words = ["serve", "--port", str(port), "-tp", "2", "--device", "cpu", "--distributed-executor-backend", "ray"]
    assert main(words) == 2
    [(status, body)] = heard
    assert (status, body["status"]) == (503, "loading")
    assert body["reason"].startswith("starting: Ray")
    assert "there is no such cluster" in capsys.readouterr().err
    with pytest.raises(httpx.ConnectError):  # Nothing is left behind.
        httpx.get(f"http://127.0.0.1:{port}/health")
