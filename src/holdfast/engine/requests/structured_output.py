"""Structured output as whoever takes requests sees it: grammars are checked without holding up an event loop, and texts
matched. Owns the service that worker processes are forked from, the engine's too, and so their memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.hardware import resident_tree
from holdfast.observability.ledger import ProcessMemory
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.checker import GrammarChecker
from holdfast.text.structured.client import GrammarService, check_model, vocabulary_of
from holdfast.text.structured.text_matcher import TextMatcher

if TYPE_CHECKING:
    from holdfast.models import ModelSpec
    from holdfast.text.tokenizer.tokenizer import Tokenizer

CHECKING_THREADS = 256
"""Each waits for a worker; no more than 17 of them for one that is slow."""
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose request this is, an API key or an address: those of one wait for each other before they keep others waiting."""
PROCESS_NAME = "structured_output"
PREPARE_S = 1.0
"""After an engine is ready, until the service is started."""


class StructuredOutput:
    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self.service = GrammarService(partial(vocabulary_of, tokenizer), eos_ids, vocab_size)
        self.checker = GrammarChecker(self.service)
        self.texts = TextMatcher(self.service, self.checker)
        self._preparing: asyncio.Task[None] | None = None
        self._unwanted = threading.Event()
        self._threads = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="grammar-check")

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, spec: ModelSpec) -> StructuredOutput | None:
        """None without a tokenizer: there is none then."""
        return None if tokenizer is None else cls(tokenizer, spec.eos_token_ids, spec.vocab_size)

    def check_available(self) -> None:
        """Raises RequestError for models that cannot follow a grammar."""
        check_model(self._tokenizer, self._eos_ids)

    async def check(self, params: StructuredOutputsParams) -> None:
        """Raises RequestError for a grammar that is invalid, unsupported or too large, OverloadedError where too many
        wait. When it is cancelled, its worker process is killed."""
        self.check_available()
        if self.checker.known(params) is not None:
            return
        gone = threading.Event()
        check = partial(self.checker.check, params, gone.is_set, TENANT.get())
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, check)
        finally:
            gone.set()

    def prepare_soon(self) -> None:
        """Starts the service before anybody asks: a vocabulary takes a second to build. A server that is only looked at
        has ended by then."""
        if self._preparing is None:
            self._unwanted = threading.Event()
            self._preparing = asyncio.create_task(self._prepare(self._unwanted), name="structured-output")

    async def _prepare(self, unwanted: threading.Event) -> None:
        await asyncio.sleep(PREPARE_S)
        with contextlib.suppress(HoldfastError):  # Whoever asks is told.
            self.check_available()
            await asyncio.get_running_loop().run_in_executor(self._threads, self.service.start, unwanted.is_set)

    def memory(self) -> list[ProcessMemory]:
        """Of the service and all workers, as one; nothing where it was not needed yet."""
        pid = self.service.pid
        held = None if pid is None else resident_tree(pid)
        if held is None or pid is None:
            return []
        return [
            ProcessMemory(
                name=PROCESS_NAME,
                pid=pid,
                resident_bytes=held.now_bytes,
                peak_bytes=held.peak_bytes,
                files_bytes=held.files_bytes,
            )
        ]

    def stop(self) -> None:
        """Gives all memory back until somebody asks again."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._unwanted.set()  # A thread that is on its way to start it cannot be cancelled.
            self._preparing = None
        self.service.stop()

    def close(self) -> None:
        self.stop()
        self.service.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
