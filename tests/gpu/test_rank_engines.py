"""Two engines that share one GPU, of one rank or of two: answers are one engine's, and each outlives the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from ended_processes import still_running
from left_on_gpu import assert_nothing_is_left, on_the_gpu, used_mib
from standing_still import StandingStill
from story_streams import all_streams
from struck_engines import engines_of, struck


@pytest.mark.parametrize("flags", [("-dp", "2"), ("-dp", "2", "-tp", "2"), ("-dp", "2", "-pp", "2")], ids=" ".join)
async def test_engines_of_one_gpu_outlive_each_other(
    flags: tuple[str, ...], start_server: Callable[..., Any], tiny_arguments: list[str], tmp_path: Path
) -> None:
    torch.zeros(1, device="cuda")
    before_mib, before = used_mib(), on_the_gpu()
    common = ("--device", "cuda", "--max-model-len", "400", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
    alone = start_server(*tiny_arguments, *common, "--vram", "8GiB")
    try:
        alone.wait_ready(180.0)
        expected = await all_streams(alone.url)
    finally:
        assert alone.stop() == 0
    standing_still, ranks = StandingStill(tmp_path), 2 if len(flags) == 2 else 4
    shared = {"HOLDFAST_RANK_GPUS": ",".join(["0"] * ranks)}
    server = start_server(*tiny_arguments, *common, *flags, environment=shared | standing_still.environment)
    try:
        server.wait_ready(180.0)
        assert await all_streams(server.url) == expected
        first, last = engines_of(server), used_mib()
        found, number = await struck(server, standing_still, psutil.Process.kill)
        print(f"engine {number} of {flags} was killed")
        assert found == expected
        assert await all_streams(server.url) == expected
        assert used_mib() <= last + 64, "the new engine has what the old one had"
        memory = httpx.get(f"{server.url}/memory", timeout=30.0).json()
        print({key: memory[key] for key in memory if key in ("ranks", "engines")})
        every = [*first, *engines_of(server)]
        assert server.stop() == 0
        assert not still_running(every)
        assert_nothing_is_left(before_mib, before | {psutil.Process().pid})
    except BaseException:
        print(server.log)
        raise
