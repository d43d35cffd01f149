"""Ranks of one GPU under 32 streams: each of them killed, one stopped, and nothing left there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ended_processes import still_running
from left_on_gpu import LEFT_MIB, assert_nothing_is_left, on_the_gpu, used_mib
from standing_still import StandingStill
from story_streams import all_streams
from struck_ranks import SAID, STRIKES, disturbed, ranks_of, restarted

from holdfast.engine.process.fault_injection import RANK_NO_MEMORY

SHARED = {"HOLDFAST_RANK_GPUS": "0,0"}


@pytest.mark.parametrize("size", ["-tp", "-pp"])
async def test_streams_outlive_every_rank(
    size: str, start_server: Callable[..., Any], tiny_arguments: list[str], tmp_path: Path
) -> None:
    """Killed: the other, and the first. Stopped: the other, which the kernels of the first wait for in vain."""
    torch.zeros(1, device="cuda")
    before_mib, before = used_mib(), on_the_gpu() | {os.getpid()}
    standing_still, lacking = StandingStill(tmp_path), tmp_path / "lacking"
    server = start_server(
        *tiny_arguments, size, "2", "--device", "cuda", "--max-model-len", "400", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "256", "--vram", "8GiB", "--engine-hang-timeout", "20",
        environment=SHARED | standing_still.environment | {RANK_NO_MEMORY: str(lacking)},
    )  # fmt: skip
    try:
        server.wait_ready(180.0)
        gone, undisturbed = list[psutil.Process](), await all_streams(server.url)
        assert await all_streams(server.url) == undisturbed, "and with graphs that are there already"
        serving_mib = used_mib()
        for name, strike in STRIKES.items():
            began_s = time.monotonic()
            answers, ranks = await disturbed(server, standing_still, strike)
            print(f"{size} 2, {name}: 32 streams in {time.monotonic() - began_s:.1f} s")
            assert answers == undisturbed, name
            assert SAID.get(name, "restarting it") in server.log
            gone += ranks
            assert not still_running(gone)
            assert used_mib() <= serving_mib + LEFT_MIB, "the new ranks have what the old ones had"
        lacking.touch()
        assert await all_streams(server.url) == undisturbed, "a rank without memory"
        assert "rank 1: out of GPU memory in a step" in server.log
        first, other = ranks_of(server.engine_pid)
        other.kill()  # While nobody asks.
        assert not still_running([first, other])
        await restarted(server)
        last = ranks_of(server.engine_pid)
        assert server.stop() == 0
        assert not still_running(last)
        assert_nothing_is_left(before_mib, before)
    except BaseException:
        print(server.log)
        raise
