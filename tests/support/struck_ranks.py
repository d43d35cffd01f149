"""Ranks of a server that are struck in the middle of 32 streams, or while nobody asks: killed, or stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import psutil
from deadlines import PATIENCE_S
from standing_still import StandingStill, stopped
from story_streams import STREAMS, TOKENS, all_streams


def ranks_of(engine_pid: int) -> list[psutil.Process]:
    """The first, which has the loop, and the others, which are its children."""
    first = psutil.Process(engine_pid)
    return [first, *(one for one in first.children() if "holdfast.engine.ranks.entry" in " ".join(one.cmdline()))]


async def disturbed(
    server: Any, standing_still: StandingStill, strike: Callable[[list[psutil.Process]], None], count: int = 2
) -> tuple[list[str], list[psutil.Process]]:
    """What streams say while ranks are struck in the middle of them, and who the ranks were."""
    standing_still.ask_for(STREAMS * TOKENS // 4)
    answers = asyncio.create_task(all_streams(server.url))
    ranks = ranks_of(server.engine_pid)
    assert len(ranks) == count
    first = await stopped(ranks[:1])
    strike(ranks)
    with contextlib.suppress(psutil.NoSuchProcess):
        first.resume()
    return await answers, ranks


async def restarted(server: Any) -> None:
    """There is an engine again, which is ready. Until the end of the old one is noticed it seems to be."""
    async with asyncio.timeout(PATIENCE_S):
        while not any("holdfast.engine.process.entry" in " ".join(one.cmdline()) for one in children(server)):
            await asyncio.sleep(0.05)
    server.wait_ready()


def children(server: Any) -> list[psutil.Process]:
    return [one for one in psutil.Process(server.process.pid).children() if one.status() != psutil.STATUS_ZOMBIE]


STRIKES: dict[str, Callable[[list[psutil.Process]], None]] = {
    "other": lambda ranks: ranks[1].kill(),
    "first": lambda ranks: ranks[0].kill(),
    "stopped": lambda ranks: ranks[1].suspend(),
}
SAID = {
    "other": "has ended: signal SIGKILL",
    "stopped": "has not come to where the other ranks wait for it",
    "without memory": "rank 1: out of memory in a step, which all ranks have begun; this engine ends [HF447]",
}
