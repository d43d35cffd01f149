"""Silence of an engine process: when it counts, and what follows."""

from __future__ import annotations

import logging

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.process.heartbeat import (
    LEAST_LIMIT_S,
    LOADING_FACTOR,
    TICK_S,
    HeartbeatMonitor,
    hang_limit,
    loading_limit_s,
)
from holdfast.records import EngineInfo


class Clocked:
    def __init__(self, limit_s: float) -> None:
        self.now_s, self.kills = 100.0, 0
        self.watch = HeartbeatMonitor(limit_s, self.kill, lambda: self.now_s)

    def kill(self) -> None:
        self.kills += 1

    def tick(self, seconds: float, each_s: float = TICK_S) -> None:
        for _ in range(round(seconds / each_s)):
            self.now_s += each_s
            self.watch.tick()


def test_it_is_late_first_and_killed_once_at_the_limit() -> None:
    clocked = Clocked(8.0)
    clocked.tick(1.75)
    assert not clocked.watch.late
    clocked.tick(0.25)
    assert clocked.watch.late
    assert "not responded for 2.0 s; after 8.0 s it is killed" in clocked.watch.story
    clocked.tick(5.75)
    assert (clocked.watch.hung, clocked.kills) == (False, 0)
    clocked.tick(5.0)
    assert (clocked.watch.hung, clocked.kills) == (True, 1)


def test_a_word_in_time_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    clocked = Clocked(8.0)
    with caplog.at_level(logging.INFO, "holdfast"):
        for _ in range(5):
            clocked.tick(7.0)
            clocked.watch.heard()
            assert not clocked.watch.late
    assert clocked.kills == 0
    said = [record.message for record in caplog.records]
    assert sum("has not responded" in line for line in said) == sum("is responding again" in line for line in said) == 5


def test_time_in_which_nobody_was_awake_does_not_count() -> None:
    """The machine slept for an hour, or this process was stopped: nothing could be heard."""
    clocked = Clocked(8.0)
    clocked.tick(3 * 3600, each_s=3600)
    assert not clocked.watch.late
    clocked.tick(8.0)
    assert clocked.watch.hung


def test_without_a_limit_nothing_follows() -> None:
    clocked = Clocked(0.0)
    clocked.tick(10_000, each_s=0.5)
    assert (clocked.watch.late, clocked.watch.hung, clocked.kills) == (False, False, 0)


def test_another_limit_begins_anew() -> None:
    clocked = Clocked(100.0)
    clocked.tick(90.0)
    clocked.watch.expect(10.0)
    assert not clocked.watch.late
    clocked.tick(10.0)
    assert clocked.kills == 1


INFO = EngineInfo(
    model="tiny",
    device="none",
    dtype="none",
    kv_dtype="none",
    block_size=16,
    blocks=10,
    max_model_len=100,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefix_caching=True,
    parameters=0,
    weights_bytes=0,
    kv_pool_bytes=0,
    attention_backend="none",
)


@pytest.mark.parametrize(
    ("given", "profile_run_s", "limit_s", "loading_s", "source"),
    [
        (None, None, LEAST_LIMIT_S, LOADING_FACTOR * LEAST_LIMIT_S, "default"),
        (None, 0.5, LEAST_LIMIT_S, LOADING_FACTOR * LEAST_LIMIT_S, "default"),
        (None, 30.0, 300.0, LOADING_FACTOR * LEAST_LIMIT_S, "measured"),
        (5.0, 30.0, 5.0, 50.0, "set"),
        (0.0, 30.0, 0.0, 0.0, "set"),
    ],
)
def test_the_limit_and_why(given, profile_run_s, limit_s, loading_s, source) -> None:
    import msgspec

    config = EngineConfig(engine_hang_timeout=given)
    found_s, decision = hang_limit(config, msgspec.structs.replace(INFO, profile_run_s=profile_run_s))
    assert (found_s, loading_limit_s(config), decision.source) == (limit_s, loading_s, source)
    assert decision.line().startswith(f"engine_hang_timeout = {limit_s:g} s ({source}): ")
