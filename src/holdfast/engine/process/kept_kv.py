"""The front end's hold on KV pages while the engine sleeps: two files without names, which it keeps open. They are gone
with it, however it ends. What is in them the engine process knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import msgspec

from holdfast.engine.process import protocol
from holdfast.records import SleepingKV

log = logging.getLogger("holdfast")

KEEP_S = 90.0
"""For the engine process to put its pages into RAM; then it sleeps without them."""


Send = Callable[[protocol.ToEngine], bool]


class KeptFiles:
    def __init__(self) -> None:
        self._answer: asyncio.Future[None] | None = None
        self._files: list[int] = []
        self.kept: SleepingKV | None = None
        """For the process that is started next."""
        self._reset = False

    @property
    def held_bytes(self) -> int:
        return 0 if self.kept is None else self.kept.held_bytes

    async def ask(self, send: Send) -> None:
        """Returns when it holds what the process has cached, or when that keeps nothing."""
        self.drop()
        self._answer = asyncio.get_running_loop().create_future()
        if send(protocol.KeepKV()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answer, KEEP_S)

    def answered(self, answer: protocol.Kept) -> None:
        if answer.kept is not None:
            try:
                for path in (answer.kept.pages_path, answer.kept.index_path):
                    self._files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                pages, index = (f"/proc/{os.getpid()}/fd/{file}" for file in self._files)
                self.kept = msgspec.structs.replace(answer.kept, pages_path=pages, index_path=index)
            except OSError as error:
                log.warning("what is cached of prompts cannot be kept while the engine sleeps: %s", error)
                self.drop()
        self.died()

    def died(self) -> None:
        """Nobody answers any more."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def reset(self, send: Send, *, asleep: bool, in_use: bool) -> None:
        """Nothing of it may be found. `in_use`: a process fills it, or may be about to open it by the numbers of its
        files, which others could have by then: it is told when it is ready."""
        send(protocol.ResetPrefixCache())
        self._reset = asleep
        if asleep and not in_use:
            self.drop()

    def taken(self, send: Send) -> None:
        """By a process that is ready."""
        self.drop()
        if self._reset:
            send(protocol.ResetPrefixCache())
        self._reset = False

    def drop(self) -> None:
        """Nobody wants it, nor waits for it."""
        self.died()
        for file in self._files:
            os.close(file)
        self._files, self.kept = [], None
