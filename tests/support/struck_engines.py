"""Engines of one server (-dp): who they are, and one that is struck in the middle of 32 streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import psutil
from deadlines import PATIENCE_S
from ended_processes import still_running
from standing_still import StandingStill, stopped
from story_streams import STREAMS, TOKENS, all_streams


def engines_of(server: Any) -> list[psutil.Process]:
    """By their numbers, as /memory has them."""
    rows = httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["engines"]
    return [psutil.Process(row["pid"]) for row in rows]


async def struck(
    server: Any, standing_still: StandingStill, strike: Callable[[psutil.Process], None]
) -> tuple[list[str], int]:
    """What streams say while one engine is struck in the middle of them, whichever; the other one stays as it is."""
    before = engines_of(server)
    standing_still.ask_for(STREAMS * TOKENS // 8)
    answers = asyncio.create_task(all_streams(server.url))
    victim = await stopped(before)
    number = before.index(victim)
    strike(victim)
    found = await answers
    after = engines_of(server)
    assert after[number].pid != before[number].pid
    assert after[1 - number].pid == before[1 - number].pid
    assert not still_running([before[number]])
    return found, number
