"""Two engines behind one API: the answers of one engine, one page of metrics, and a death of either that nobody else
notices."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
from deadlines import PATIENCE_S
from ended_processes import still_running
from standing_still import StandingStill
from story_streams import STREAMS, TOKENS, all_streams, told_by_one
from struck_engines import engines_of, struck


def by_engine(server, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.rpartition(" ")
            engine = labels.partition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0.0) + float(value)
    return found


async def test_two_engines_answer_as_one_and_outlive_each_other(
    start_server, tiny_model, tiny_arguments, tmp_path: Path
) -> None:
    expected, standing_still = told_by_one(tiny_model), StandingStill(tmp_path)
    flags = ("-dp", "2", "--engine-hang-timeout", "8")
    server = start_server(*tiny_arguments, *flags, environment=standing_still.environment).wait_ready()
    assert await all_streams(server.url) == expected
    generated = by_engine(server, "vllm:generation_tokens_total")
    assert sum(generated.values()) == STREAMS * TOKENS
    assert min(generated.values()) >= STREAMS * TOKENS / 4, generated
    assert by_engine(server, "vllm:num_requests_running") == {"0": 0, "1": 0}
    assert min(by_engine(server, "vllm:iteration_tokens_total_count").values()) > 0
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    headers = [line for line in page if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))

    found, number = await struck(server, standing_still, psutil.Process.kill)
    assert found == expected
    assert by_engine(server, "holdfast:engine_restarts_total") == {f"{number}": 1, f"{1 - number}": 0}
    assert f"engine {number}: the engine process exited (signal 9)" in server.log
    last = engines_of(server)
    assert server.stop() == 0
    assert not still_running(last)


@pytest.mark.long
async def test_either_engine_may_be_killed_or_stand_still(start_server, tiny_arguments, tmp_path: Path) -> None:
    standing_still, flags = StandingStill(tmp_path), ("-dp", "2", "--engine-hang-timeout", "8")
    server = start_server(*tiny_arguments, *flags, environment=standing_still.environment).wait_ready()
    expected, restarts = await all_streams(server.url), {"0": 0, "1": 0}
    while min(restarts.values()) < 2:
        for strike in (psutil.Process.kill, psutil.Process.suspend):  # Stopped it is already.
            found, number = await struck(server, standing_still, strike)
            assert found == expected
            restarts[f"{number}"] += 1
            if strike is psutil.Process.suspend:
                assert f"engine {number}: the engine process has not responded for" in server.log
    assert by_engine(server, "holdfast:engine_restarts_total") == restarts
    assert server.stop() == 0
