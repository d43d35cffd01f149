"""A prefix store in tests: pages whose bytes follow from their keys, reads that wait, a disk that fails on demand."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any

from holdfast.prefix_store import PrefixStore, ReadResult
from holdfast.prefix_store.files.calls import Calls

PAGE_BYTES = 8192
MODEL = b"a model"
DEADLINE_S = 60.0
"""Of what must happen, however little of the machine this process has."""


def page_of(key: bytes, page_bytes: int = PAGE_BYTES, model: bytes = MODEL) -> bytes:
    return shake_128(model + key).digest(page_bytes)


def key_of(number: int) -> bytes:
    return number.to_bytes(20, "big")


def opened(folder: Path, pages: int = 64, page_bytes: int = PAGE_BYTES, **settings: Any) -> PrefixStore:
    slot_bytes = -(-page_bytes // 4096) * 4096
    settings = {"size_bytes": pages * slot_bytes, "model": MODEL, "beat_s": 0.01, "lock_s": DEADLINE_S, **settings}
    return PrefixStore.open(folder, page_bytes=page_bytes, **settings)


def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def put(store: PrefixStore, keys: Sequence[bytes], page_bytes: int = PAGE_BYTES, model: bytes = MODEL) -> list[bool]:
    """Waits until each was written or dropped; whether it is there."""
    over: dict[bytes, bool] = {}
    for key in keys:
        page = memoryview(page_of(key, page_bytes, model))
        if not store.write(key, page, lambda there, key=key: over.__setitem__(key, there)):
            over[key] = False
    until(lambda: len(over) == len(keys))
    return [over[key] for key in keys]


def get(store: PrefixStore, keys: Sequence[bytes], page_bytes: int = PAGE_BYTES) -> tuple[ReadResult, list[bytearray]]:
    memory = [bytearray(page_bytes) for _ in keys]
    results: list[ReadResult] = []
    ticket = store.read([(key, memoryview(page)) for key, page in zip(keys, memory, strict=True)], results.append)
    assert ticket.wait(DEADLINE_S)
    return results[0], memory


def served(
    store: PrefixStore, keys: Sequence[bytes], page_bytes: int = PAGE_BYTES, model: bytes = MODEL
) -> list[bytes]:
    """The keys whose pages are served. Every one of them is the page that was written."""
    result, memory = get(store, keys, page_bytes)
    for key, valid, page in zip(keys, result.valid, memory, strict=True):
        assert not valid or bytes(page) == page_of(key, page_bytes, model)
    return [key for key, valid in zip(keys, result.valid, strict=True) if valid]


def file_of(folder: Path, ending: str) -> Path:
    (found,) = folder.glob(f"*.{ending}")
    return found


class FailingCalls(Calls):
    """Raises `error` in calls by these names, each with `chance`. While `answer` is not set, pages are neither read nor
    written; `begun`: how many such calls there were."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.chance = 0.0
        self.failing: set[str] = set()
        self.errors: list[int] = []
        self.answer = threading.Event()
        self.answer.set()
        self.begun = 0
        self.clock_s: float | None = None
        self.ahead_s = 0.0
        self.failed = 0

    def now(self) -> float:
        return (super().now() if self.clock_s is None else self.clock_s) + self.ahead_s

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ("now", "close") or not callable(found) or not hasattr(Calls, name):
            return found

        def call(*arguments: Any) -> Any:
            if name in ("read_into", "write_from"):
                self.begun += 1
                assert self.answer.wait(DEADLINE_S)
            if name in self.failing and self.errors and self.random.random() < self.chance:
                self.failed += 1
                number = self.random.choice(self.errors)
                raise OSError(number, "injected")
            return found(*arguments)

        return call
