"""A rank of several dies or stands still, the first or another; nobody's answer changes and no process is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from deadlines import PATIENCE_S
from ended_processes import still_running
from standing_still import StandingStill
from story_streams import all_streams
from struck_ranks import SAID, STRIKES, disturbed, ranks_of, restarted
from tiny_experts import write_tiny_experts

from holdfast.engine.process.fault_injection import RANK_NO_MEMORY


@pytest.mark.parametrize(
    "names",
    [("other", "without memory"), pytest.param(("first", "stopped"), marks=pytest.mark.long)],
    ids=["killed-or-without-memory", "any"],
)
async def test_streams_outlive_a_rank(start_server, tiny_arguments, tmp_path: Path, names: tuple[str, ...]) -> None:
    """One without memory finds none for a real allocation, in the middle of a step that the other has begun."""
    standing_still, lacking = StandingStill(tmp_path), tmp_path / "lacking"
    environment = standing_still.environment | {RANK_NO_MEMORY: str(lacking)}
    flags = ("-tp", "2", "--engine-hang-timeout", "8")
    server = start_server(*tiny_arguments, *flags, environment=environment).wait_ready()
    undisturbed = await all_streams(server.url)
    gone, strikes = list[psutil.Process](), STRIKES | {"without memory": lambda ranks: lacking.touch()}
    for name in names:
        answers, ranks = await disturbed(server, standing_still, strikes[name])
        assert answers == undisturbed
        assert SAID.get(name, "restarting it") in server.log
        gone += ranks
    first, other = ranks_of(server.engine_pid)
    other.kill()  # While nobody asks: it is noticed before somebody does.
    assert not psutil.wait_procs([first], timeout=PATIENCE_S)[1]
    assert not still_running([*gone, first, other])
    await restarted(server)
    last = ranks_of(server.engine_pid)
    assert server.stop() == 0
    assert not still_running(last)


@pytest.mark.parametrize(
    ("flags", "count", "struck"),
    [
        # Quick are a rank of -tp that dies under streams, above, and in test_pipeline each of four that dies or stops.
        pytest.param(("-pp", "2"), 2, (1,), marks=pytest.mark.long),
        pytest.param(("-tp", "2", "-pp", "2"), 4, (0, 1, 2, 3), marks=pytest.mark.long),
        pytest.param(("-tp", "2", "-ep"), 2, (1, 0), marks=pytest.mark.long),
    ],
    ids=["a-stage", "any-of-four", "whole-experts"],
)
async def test_streams_outlive_a_stage_or_its_experts(
    start_server, tiny_arguments, tmp_path: Path, flags: tuple[str, ...], count: int, struck: tuple[int, ...]
) -> None:
    _, *others = tiny_arguments
    model = str(write_tiny_experts(tmp_path)) if "-ep" in flags else tiny_arguments[0]
    standing_still, flags = StandingStill(tmp_path), (*flags, "--engine-hang-timeout", "20")
    server = start_server(model, *others, *flags, environment=standing_still.environment).wait_ready()
    undisturbed, gone = await all_streams(server.url), list[psutil.Process]()
    for rank in struck:
        answers, ranks = await disturbed(server, standing_still, lambda ranks, rank=rank: ranks[rank].kill(), count)
        assert answers == undisturbed
        gone += ranks
    assert f"rank {max(struck)} " in server.log
    assert not still_running(gone)
    last = ranks_of(server.engine_pid)
    assert server.stop() == 0
    assert not still_running(last)
