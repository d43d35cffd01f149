"""Ctrl-C while something runs on the loop: it is cancelled, and what it gave all the same is given back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from holdfast.cli.background_loop import BackgroundLoop


@pytest.mark.parametrize("late", [True, False])
def test_a_result_that_comes_after_ctrl_c_is_discarded(late: bool) -> None:
    """As of a model that was loaded when Ctrl-C came: its engine would live on, and the program wait for it."""
    discarded = []

    async def work() -> str:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not late:
                raise
        return "loaded"

    async def discard(result: str) -> None:
        discarded.append(result)

    with BackgroundLoop() as loop, pytest.raises(KeyboardInterrupt):
        loop.run(work(), discard=discard)
    assert discarded == (["loaded"] if late else [])
