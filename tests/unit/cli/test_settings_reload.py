"""Settings that are read again while a server runs: budgets are held against those in force, whoever set them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.cli.servers.reload import SettingsReload
from holdfast.config import EngineConfig, ServerConfig
from holdfast.errors import DoesNotFitError
from holdfast.units import GIB


class Engine:
    """Has 90 GiB of VRAM."""

    def __init__(self, config: EngineConfig) -> None:
        self.budgets: Mapping[str, int | None] = config.budgets
        self.asked = list[tuple[str, int | None]]()

    async def set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        self.asked.append((tier, budget_bytes))
        if budget_bytes is not None and budget_bytes > 90 * GIB:
            raise DoesNotFitError("less is free")
        self.budgets = {**self.budgets, tier: budget_bytes}


async def test_budgets_follow_the_file_and_not_what_it_said_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    started = EngineConfig(vram=20 * GIB)
    engine: Any = Engine(started)
    written = started
    reload = SettingsReload(engine, started, ServerConfig(), lambda: (written, ServerConfig()))
    await reload()
    assert (engine.asked, "nothing has changed" in caplog.text) == ([], True)
    # A client asks for another one: the file differs from then on.
    await engine.set_memory_budget("vram", 10 * GIB)
    await reload()
    assert engine.asked.pop() == ("vram", 20 * GIB)
    written = dataclasses.replace(started, vram=GIB)
    for _ in range(2):
        await reload()
    assert engine.asked == [("vram", 10 * GIB), ("vram", GIB)]
    # What was refused is asked for again.
    for size in (99 * GIB, 99 * GIB, None):
        written = dataclasses.replace(started, vram=size)
        await reload()
        assert engine.asked.pop() == ("vram", size)
    caplog.clear()
    written = dataclasses.replace(written, block_size=32)
    await reload()
    assert "only a restart takes it over: --block-size" in caplog.text
    assert "nothing has changed" not in caplog.text
    assert engine.budgets["vram"] is None
