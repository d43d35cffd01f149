"""What engine processes are told of tokens: they have no tokenizer. Owns when each is told, and that it is told once;
what is told is `text.matching`'s."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.engine import messages
from holdfast.errors import HoldfastError
from holdfast.text import Tokenizer

SOON_S = 1.0
"""After an engine is ready. A server that is only looked at has ended by then."""

Send = Callable[[messages.Teach], None]


class Teaching:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._taught: object = None
        self._task: asyncio.Task[None] | None = None

    def now(self, child: object, send: Send) -> None:
        """Before its first request that needs it. `child`: the process."""
        if self._taught is not child and self._tokenizer is not None:
            self._taught = child
            send(messages.Teach(_pack(self._tokenizer)))

    def soon(self, child: object, send: Send) -> None:
        """Before anybody asks: what the first answer that must have a form needs takes a second of a large vocabulary,
        in which a process does nothing else."""
        self.end()
        if self._tokenizer is not None:
            self._task = asyncio.create_task(self._wait(self._tokenizer, child, send), name="engine-teaching")

    async def _wait(self, tokenizer: Tokenizer, child: object, send: Send) -> None:
        await asyncio.sleep(SOON_S)
        with contextlib.suppress(HoldfastError):  # A tokenizer that cannot tell: that is said to whoever asks.
            await asyncio.to_thread(_pack, tokenizer)
            self.now(child, send)

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _pack(tokenizer: Tokenizer) -> bytes:
    from holdfast.text.matching import packed_vocabulary  # Its library is large: not for the event loop.

    return packed_vocabulary(tokenizer)
