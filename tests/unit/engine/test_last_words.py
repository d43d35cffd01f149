"""What an engine process said before it ended is heard, also by a front that stood still meanwhile."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from holdfast.engine.process import handle, protocol
from holdfast.errors import DoesNotFitError


async def test_a_front_that_stood_still_hears_why_its_engine_ended() -> None:
    """Its own thread goes on before the one that reads the socket does."""
    loop, words = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    said = protocol.StartFailed(protocol.pack_failure(DoesNotFitError("too large", needed="2", found="1")))

    def stand_still() -> None:
        time.sleep(handle.LAST_WORDS_S * 1.1)
        loop.call_later(0.02, words.set_result, protocol.encode(said))

    child = object.__new__(handle.Child)
    child._socket = SimpleNamespace(recv=lambda: words)  # type: ignore[assignment]
    child._exit = asyncio.create_task(asyncio.sleep(0))
    child.watch = SimpleNamespace(heard=lambda: None)  # type: ignore[assignment]
    loop.call_later(0.02, stand_still)
    assert await child.receive() == said


async def test_one_that_said_nothing_is_not_waited_for_long() -> None:
    child = object.__new__(handle.Child)
    child._socket = SimpleNamespace(recv=asyncio.get_running_loop().create_future)  # type: ignore[assignment]
    child._exit = asyncio.create_task(asyncio.sleep(0))
    assert await child.receive() is None
