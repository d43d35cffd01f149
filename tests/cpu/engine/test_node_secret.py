"""The secret of nodes: long enough, dear to guess, and not open to all users of a machine."""

from __future__ import annotations

import logging
import shlex
import subprocess
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.config.nodes import LEAST_SECRET, MAKE_SECRET
from holdfast.engine.ranks.nodes import secret
from holdfast.errors import ConfigurationError

GOOD = "a secret of tests"


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


def test_a_guess_at_a_secret_costs_scrypt(monkeypatch) -> None:
    asked = list[tuple[int, int]]()
    derive = secret.hashlib.scrypt

    def count(*given, **limits) -> bytes:
        asked.append((limits["n"], limits["r"]))
        return derive(*given, **limits)

    monkeypatch.setattr(secret.hashlib, "scrypt", count)
    secret._key.cache_clear()
    proofs = {secret.proof(one, secret.HEAD, b"a", b"b") for one in (GOOD, GOOD, "another secret of tests")}
    assert len(proofs) == 2
    assert asked == [(1 << 14, 8)] * 2  # Once for each secret, however many proofs.
