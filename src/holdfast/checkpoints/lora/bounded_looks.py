"""Looking at files of adapters without waiting for ever: in threads of their own, each of which may hang alone.

Nobody waits for such a thread at the end of the process: a folder's file server may be gone. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast.checkpoints.lora.adapter import too_slow
from holdfast.units import shorten

T = TypeVar("T")

log = logging.getLogger("holdfast")

EXAMINE_LIMIT_S = 60.0
"""For an adapter's two headers, which take milliseconds, or where several nodes compare its files for all of them: what
takes longer hangs."""


def look(work: Callable[[], T]) -> Future[T]:
    """Begins `work`. It goes on whoever stops waiting for it."""
    found = Future[T]()
    found.set_running_or_notify_cancel()  # From now on nobody who waits can cancel it for the others.

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(result)

    threading.Thread(target=run, name="adapter-look", daemon=True).start()
    return found


async def in_time(found: Future[T], name: str, limit_s: float) -> T:
    """What a look has found. Raises AdapterError where it takes longer; `name`: of the adapter."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(found), limit_s)
    except TimeoutError:
        log.error("loading LoRA adapter %s timed out after %g s", shorten(name), limit_s)
        raise too_slow(shorten(name), limit_s) from None
