"""The secret of nodes: long enough, dear to guess, and not open to all users of a machine."""

from __future__ import annotations

import logging
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from free_ports import free_port

from holdfast.config import EngineConfig
from holdfast.config.nodes import LEAST_SECRET, MAKE_SECRET
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.hub import NodeHub
from holdfast.engine.ranks.nodes.join import join_head
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.parallel.sockets.key_proof import proof

pytestmark = pytest.mark.usefixtures("forked_starts")

GOOD = "a secret of tests"
REPORT = messages.NodeReport(
    node=0, nodes=2, tensor_parallel_size=2, pipeline_parallel_size=1, version="1", checkpoint={"config": "abc"},
    host="127.0.0.1", name="here", pid=1, cores=2, total_bytes=1, free_bytes=1, kernels=True,
)  # fmt: skip


def settings(**changed) -> EngineConfig:
    return EngineConfig(**{"tensor_parallel_size": 2, "nnodes": 2, "device": "cpu"} | changed)


def test_a_short_secret_is_refused_with_a_command_that_makes_one() -> None:
    with pytest.raises(ConfigurationError, match="the node secret is too short: 15 characters") as refused:
        settings(node_secret="s" * 15)
    assert refused.value.code == "HF139"
    assert refused.value.needed == "16 characters or more, the same on all nodes"
    assert MAKE_SECRET in (refused.value.fix or "")
    made = subprocess.run(shlex.split(MAKE_SECRET), capture_output=True, text=True, check=True).stdout.strip()
    assert len(made) >= 2 * LEAST_SECRET
    assert settings(node_secret=made).node_secret == made


def test_a_node_without_a_secret_is_told_how_to_make_one() -> None:
    with pytest.raises(ConfigurationError, match="has no secret") as refused:
        secret.with_secret(settings(node_rank=1))
    assert MAKE_SECRET in (refused.value.fix or "")


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_a_file_that_all_users_may_read_is_warned_of_once(tmp_path: Path, caplog, mode: int, warned: bool) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{GOOD}\n")
    file.chmod(mode)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        config, _ = secret.with_secret(settings(node_secret_file=str(file)))
        secret.with_secret(config)
    assert config.node_secret == GOOD
    said = [record.getMessage() for record in caplog.records]
    assert said == ([f"the node secret in {file} is open to all users (mode {mode:04o}): chmod 600 {file}"] * warned)


@pytest.fixture
def derived(monkeypatch) -> list[tuple[int, int]]:
    """How dear each key was that was derived."""
    found, derive = list[tuple[int, int]](), secret.hashlib.scrypt

    def count(*given, **limits) -> bytes:
        found.append((limits["n"], limits["r"]))
        return derive(*given, **limits)

    monkeypatch.setattr(secret.hashlib, "scrypt", count)
    return found


def test_a_guess_at_a_secret_costs_scrypt(derived: list[tuple[int, int]]) -> None:
    keys = [secret.derive_key(one) for one in (GOOD, "another secret of tests")]
    assert len({proof(key, secret.HEAD, b"a", b"b") for key in keys}) == 2
    assert derived == [(1 << 14, 8)] * 2


def test_those_who_call_a_head_cost_it_no_scrypt(derived: list[tuple[int, int]]) -> None:
    """Of which each takes 16 MiB, and 32 may call at once."""
    head = NodeHub("127.0.0.1", 0, GOOD, REPORT, 1, 2)
    assert len(derived) == 1
    try:
        callers = [Wire(socket.create_connection(("127.0.0.1", head.port))) for _ in range(8)]
        for caller in callers:
            caller.send(messages.encode(messages.NodeHello(b"n" * messages.NONCE_BYTES)))
        for caller in callers:
            assert isinstance(messages.decode_from_head(caller.receive()), messages.Challenge)
            caller.close()
    finally:
        head.close(again=False)
    assert len(derived) == 1


def test_a_node_derives_its_key_once_however_often_it_tries(derived: list[tuple[int, int]]) -> None:
    config = settings(node_rank=1, node_secret=GOOD, node_timeout=1.2, master_port=free_port())
    with pytest.raises(EngineError, match="has not reached the head"):
        join_head(config, lambda: REPORT)
    assert len(derived) == 1
