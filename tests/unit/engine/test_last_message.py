"""What an engine process said last is heard, also by a front that was kept from running meanwhile."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from holdfast.engine.process import handle, protocol


async def test_a_front_that_stands_still_as_its_engine_ends_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "LAST_WORDS_S", 0.2)
    child = handle.Child.__new__(handle.Child)
    child._exit = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
    child._exit.set_result(None)  # type: ignore[attr-defined]
    child.watch = SimpleNamespace(heard=lambda: None)  # type: ignore[assignment]

    async def receive() -> bytes:
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # As if the system let others run.
        for _ in range(5):  # The loop passes it on from one to the next.
            await asyncio.sleep(0)
        return protocol.encode(protocol.Loading("weights", 1, 2))

    child._socket = SimpleNamespace(recv=receive)  # type: ignore[assignment]
    assert await child.receive() == protocol.Loading("weights", 1, 2)
