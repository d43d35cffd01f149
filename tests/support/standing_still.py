"""Engines that stop themselves in the middle of an answer, or while they start: a test meets them there however little
of the machine it has itself. What it does to them then is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import psutil
from deadlines import PATIENCE_S

from holdfast.engine.process.fault_injection import STAND_STILL


class StandingStill:
    """Of the engines of one server, which is started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "stand-still"
        self.environment = {STAND_STILL: str(self._file)}

    def ask_for(self, tokens: int) -> None:
        """The next engine that has sampled so many; at 0 also one that starts."""
        written = self._file.with_suffix(".written")
        written.write_text(f"{tokens}")
        written.rename(self._file)  # Nobody reads half of it.


async def stopped(processes: Iterable[psutil.Process]) -> psutil.Process:
    """The first of them that stands still."""
    among = [*processes]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for one in among:
                if one.status() == psutil.STATUS_STOPPED:
                    return one
            await asyncio.sleep(0.02)
