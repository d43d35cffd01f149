"""NUMA nodes as the system lists them, and the policy of a thread. A machine of one node runs all but the spreading."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.startup.numa_weights import spread_over_nodes
from holdfast.hardware import numa


@pytest.mark.parametrize(
    ("there", "allowed", "expected"),
    [
        ("0-1,4\n", "0-7", (0, 1, 4)),
        ("0-3\n", "1,3", (1, 3)),
        ("0\n", None, (0,)),
        (None, None, (0,)),
        ("\n", "0", (0,)),
    ],
)
def test_nodes_that_may_be_used(
    there: str | None, allowed: str | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    if there is not None:
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/has_memory").write_text(there)
    if allowed is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
    assert numa.memory_nodes(tmp_path) == expected


def test_the_policy_holds_within_and_is_given_back() -> None:
    before = numa.thread_policy()
    with numa.interleaved(numa.memory_nodes()) as spread:
        assert numa.thread_policy() == (numa.INTERLEAVE if spread else before)
        with numa.interleaved(numa.memory_nodes()) as again:
            assert not again, "a policy that is set already holds"
    assert numa.thread_policy() == before


def test_without_the_system_calls_nothing_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_SYSTEM_CALLS", {})
    with numa.interleaved((0,)) as spread:
        assert not spread


@pytest.mark.parametrize("allowed", [True, False])
def test_weights_of_several_nodes(
    allowed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if there were two; what the system is asked for is recorded."""
    asked: list[tuple[int, tuple[int, ...]]] = []

    def set_policy(policy: int, nodes: tuple[int, ...]) -> bool:
        asked.append((policy, nodes))
        return allowed

    monkeypatch.setattr(numa, "memory_nodes", lambda: (0, 1))
    monkeypatch.setattr(numa, "thread_policy", lambda: numa.DEFAULT)
    monkeypatch.setattr(numa, "_set_policy", set_policy)
    with caplog.at_level("INFO"), spread_over_nodes():
        assert asked == [(numa.INTERLEAVE, (0, 1))]
    assert asked[1:] == ([(numa.DEFAULT, ())] if allowed else [])
    assert ("spread over 2" in caplog.text, "numactl" in caplog.text) == (allowed, not allowed)
