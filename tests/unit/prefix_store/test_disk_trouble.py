"""A disk that is full, read-only, slow, failing, or without O_DIRECT: counted, told once, and serving goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prefix_pages import DEADLINE_S, PAGE_BYTES, FailingCalls, get, key_of, opened, page_of, put, served, until

from holdfast.prefix_store import writing

KEYS = [key_of(number) for number in range(8)]


def failing(*names: str, error: int = errno.EIO, chance: float = 1.0) -> FailingCalls:
    calls = FailingCalls()
    calls.failing, calls.errors, calls.chance = set(names), [error], chance
    return calls


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_errors_of_reading_are_misses(tmp_path: Path) -> None:
    calls = failing("read_into", chance=0)
    store = opened(tmp_path / "store", calls=calls)
    put(store, KEYS)
    calls.chance = 1.0
    assert get(store, KEYS)[0].valid == (False,) * 8
    calls.chance = 0
    assert store.stats().missed == {"I/O error": 8}
    assert all(put(store, KEYS))
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


class FailingUnlocks(FailingCalls):
    def try_lock(self, file: int, kind: int) -> bool:
        if kind == fcntl.LOCK_UN:
            raise OSError(errno.EIO, "injected")
        return super().try_lock(file, kind)


def test_a_lock_that_cannot_be_given_back_keeps_nobody_out(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", calls=FailingUnlocks(), beat_s=DEADLINE_S)
    assert all(put(store, KEYS[:4]))
    other = opened(tmp_path / "store", lock_s=1.0)
    assert not other.stats().read_only
    assert all(put(other, KEYS[4:]))
    assert all(put(store, [key_of(20)]))
    assert served(store, KEYS) == KEYS
    for one in (store, other):
        one.close(DEADLINE_S)


class ShortReads(FailingCalls):
    """Each read brings no more than a part of a page."""

    def read_into(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().read_into(file, [buffers[0][:4096]], offset)


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 10_000])
def test_a_read_that_brings_a_part_is_gone_on_with(tmp_path: Path, page_bytes: int) -> None:
    """The page is as good as ever: were it forgotten, it would be for all processes."""
    store = opened(tmp_path / "store", page_bytes=page_bytes)
    assert all(put(store, KEYS, page_bytes))
    store.close(DEADLINE_S)
    store = opened(tmp_path / "store", page_bytes=page_bytes, calls=ShortReads())
    assert get(store, KEYS, page_bytes)[0].valid == (True,) * 8
    assert store.stats().missed == {}
    assert store.has(KEYS) == 8
    store.close(DEADLINE_S)


def test_a_slow_disk_says_how_many_pages_may_wait_for_it(tmp_path: Path) -> None:
    store, gate, keys = opened(tmp_path / "store", queue_bytes=3 * PAGE_BYTES), threading.Event(), KEYS

    def late(memory: memoryview) -> None:
        gate.wait(30)
        memory[:PAGE_BYTES] = page_of(keys[0])

    assert store.room() == 3
    assert store.write(keys[0], late)
    page = memoryview(page_of(keys[1]))
    assert store.write(keys[1], page)
    assert store.room() == 1
    assert store.write(keys[2], page)
    assert store.room() == 0
    assert store.takes(), "it is slow, and well"
    assert not store.write(keys[3], page)
    gate.set()
    until(lambda: store.room() == 3)
    store.close(5)
    never = opened(tmp_path / "other", queue_bytes=PAGE_BYTES // 2)
    assert never.room() == 0
    assert not never.takes(), "else it would be waited for"
    never.close(5)


def test_errors_of_writing_are_drops_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = failing("write_from", error=errno.ENOSPC)
    store = opened(tmp_path / "store", calls=calls, retry_s=0.2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(3):
            assert put(store, KEYS) == [False] * 8
            assert store.stats().failing == "injected"
            time.sleep(0.25)
    assert len([record for record in caplog.records if "HFW10" in record.getMessage()]) == 1
    assert store.stats().dropped == {"store failing": 24}
    calls.chance = 0
    time.sleep(0.25)
    assert all(put(store, KEYS))
    assert store.stats().failing is None
    assert served(store, KEYS) == KEYS
    assert store.stats().total_bytes == 8 * PAGE_BYTES  # Slots of what failed were used again.
    store.close(DEADLINE_S)


@pytest.mark.parametrize(
    "name", ["read", "write", "read_into", "write_from", "size", "punch", "try_lock", "disk_space"]
)
def test_each_call_may_fail(tmp_path: Path, name: str) -> None:
    calls = failing(name)
    calls.chance = 0
    store = opened(tmp_path / "store", pages=6, calls=calls, retry_s=0)
    put(store, KEYS[:4])
    calls.chance = 1.0
    put(store, KEYS)
    served(store, KEYS)
    time.sleep(0.05)
    calls.chance = 0
    time.sleep(0.05)
    until(lambda: sum(put(store, [key_of(100)])) + store.has([key_of(100)]) > 0)
    assert served(store, [key_of(100)]) == [key_of(100)]
    store.close(DEADLINE_S)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        store = opened(small_disk / "store", pages=1000)
        keys = [key_of(number) for number in range(100)]
        for key in keys:
            put(store, [key])
        stats = store.stats()
    # It stays within what there is, and keeps the newest.
    assert 10 <= stats.pages <= 32
    assert store.has(keys[-5:]) == 5
    assert len(served(store, keys)) >= stats.pages - 1
    assert len([record for record in caplog.records if "almost full" in record.getMessage()]) == 1
    store.close(DEADLINE_S)


def test_a_disk_that_another_fills(small_disk: Path) -> None:
    store = opened(small_disk / "store", pages=1000, retry_s=0)
    put(store, KEYS)
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for number in range(50, 60):
        put(store, [key_of(number)])
    assert store.has([key_of(59)]) == 1  # In the place of older ones.
    served(store, [*KEYS, key_of(59)])
    hog.unlink()
    assert put(store, [key_of(70)]) == [True]
    store.close(DEADLINE_S)


def test_a_file_system_that_was_made_read_only(small_disk: Path) -> None:
    store = opened(small_disk / "store")
    put(store, KEYS)
    store.close(DEADLINE_S)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store = opened(small_disk / "store")
    assert served(store, KEYS) == KEYS
    assert not store.write(key_of(50), memoryview(page_of(key_of(50))))
    stats = store.stats()
    assert stats.read_only
    assert stats.dropped == {"read only": 1}
    assert "only read: Read-only file system" in store.how
    store.close(DEADLINE_S)
    empty = opened(small_disk / "store", model=b"another")
    assert empty.has(KEYS) == 0
    assert get(empty, KEYS)[0].missed == {"absent": 8}
    assert not empty.write(key_of(50), memoryview(page_of(key_of(50))))
    empty.close(DEADLINE_S)


def test_for_a_disk_that_hangs_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FailingCalls()
    store = opened(tmp_path / "store", calls=calls)
    assert store.takes()
    calls.answer.clear()
    assert store.write(KEYS[0], memoryview(page_of(KEYS[0])))
    until(lambda: calls.begun > 0)
    assert store.takes(), "it may be slow"
    monkeypatch.setattr(writing, "HANGS_S", 0.0)
    until(lambda: not store.takes())
    calls.answer.set()
    until(store.takes)
    store.close(DEADLINE_S)


@pytest.mark.parametrize("name", ["lock", "control"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    store = opened(tmp_path / "store")
    put(store, KEYS)
    store.close(DEADLINE_S)

    class ReadOnly(FailingCalls):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_RDWR and path.name == name:
                raise OSError(errno.EACCES, "Permission denied")
            return super().open(path, flags)

    store = opened(tmp_path / "store", calls=ReadOnly())
    assert served(store, KEYS) == KEYS
    assert not store.write(key_of(50), memoryview(page_of(key_of(50))))
    assert store.stats().read_only
    store.use(KEYS)
    assert store._used == {}, "which nobody would ever take note of"
    # What others write is seen all the same.
    other = opened(tmp_path / "store")
    put(other, [key_of(50)])
    until(lambda: store.has([key_of(50)]) == 1)
    assert served(store, [key_of(50)]) == [key_of(50)]
    other.close(DEADLINE_S)
    store.close(DEADLINE_S)


def test_a_slow_disk_holds_nobody_up(tmp_path: Path) -> None:
    calls = FailingCalls()
    store = opened(tmp_path / "store", calls=calls, queue_bytes=4 * PAGE_BYTES)
    put(store, KEYS[:2])
    calls.answer.clear()
    results = []
    ticket = store.read([(KEYS[0], memoryview(bytearray(PAGE_BYTES)))], results.append)
    taken = [store.write(key, memoryview(page_of(key))) for key in KEYS]
    store.has(KEYS)
    store.use(KEYS)
    store.stats()
    assert not results  # All this while the disk has not answered once.
    assert taken == [False, False, True, True, True, True, False, False]
    assert store.stats().dropped == {"already there": 2, "queue full": 2}
    until(lambda: calls.begun == 4)  # Two pages were written at the beginning; now one is read, and one written.
    time.sleep(0.3)
    calls.answer.set()
    assert ticket.wait(DEADLINE_S)
    assert results[0].valid == (True,)
    rate = store.stats().read_bytes_per_second
    assert rate is not None
    assert rate < PAGE_BYTES / 0.2
    store.close(DEADLINE_S)
    store = opened(tmp_path / "store")
    assert store.has(KEYS[:6]) == 6
    store.close(DEADLINE_S)


def test_a_disk_that_does_not_answer_does_not_hold_up_closing(tmp_path: Path) -> None:
    answer = threading.Event()

    class Stuck(FailingCalls):
        def write_from(self, *arguments: object) -> int:
            answer.wait(DEADLINE_S)
            return super().write_from(*arguments)  # type: ignore[arg-type]

    store = opened(tmp_path / "store", calls=Stuck())
    over: list[bool] = []
    page = memoryview(page_of(KEYS[0]))
    assert store.write(KEYS[0], page, over.append)
    before = time.monotonic()
    store.close(0.2)
    assert time.monotonic() - before < DEADLINE_S / 2  # The disk takes longer.
    assert not over
    answer.set()
    until(lambda: len(over) == 1)


def test_a_process_that_keeps_the_lock_costs_only_writes(tmp_path: Path) -> None:
    before = opened(tmp_path / "store")
    put(before, KEYS)
    before.close(DEADLINE_S)
    store = opened(tmp_path / "store", lock_s=0.5)
    with (tmp_path / "store" / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        over: list[bool] = []
        assert store.write(key_of(50), memoryview(page_of(key_of(50))), over.append)
        assert served(store, KEYS) == KEYS
        until(lambda: len(over) == 1)
    assert over == [False]
    assert store.stats().dropped == {"store busy": 1}
    until(lambda: put(store, [key_of(50)]) == [True])  # Half a second may pass between any two of its steps.
    store.close(DEADLINE_S)


@pytest.mark.parametrize("when", ["at opening", "at reading"])
def test_without_direct_reads_the_page_cache_is_used_and_named(tmp_path: Path, when: str) -> None:
    class NoDirect(FailingCalls):
        def __init__(self) -> None:
            super().__init__()
            self.directs: set[int] = set()

        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT and when == "at opening":
                raise OSError(errno.EINVAL, "Invalid argument")
            file = super().open(path, flags & ~os.O_DIRECT)
            (self.directs.add if flags & os.O_DIRECT else self.directs.discard)(file)
            return file

        def read_into(self, file: int, buffers: list[memoryview], offset: int) -> int:
            if file in self.directs:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().read_into(file, buffers, offset)

    store = opened(tmp_path / "store", calls=NoDirect())
    assert not store.stats().direct
    assert "page cache: its file system refuses O_DIRECT (Invalid argument)" in store.how
    assert all(put(store, KEYS))
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


def test_direct_writes_that_are_refused_later(tmp_path: Path) -> None:
    class RefusedOnce(FailingCalls):
        refused = False

        def write_from(self, *arguments: object) -> int:
            if not self.refused:
                self.refused = True
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().write_from(*arguments)  # type: ignore[arg-type]

    store = opened(tmp_path / "store", calls=RefusedOnce())
    assert all(put(store, KEYS))
    assert not store.stats().direct
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


def test_file_systems_without_holes_keep_their_space(tmp_path: Path) -> None:
    calls = failing("punch", error=errno.EOPNOTSUPP)
    store = opened(tmp_path / "store", pages=8, calls=calls)
    put(store, KEYS)
    put(store, [key_of(100 + number) for number in range(4)])
    assert store.stats().total_bytes == 8 * PAGE_BYTES
    other = opened(tmp_path / "store", pages=8, calls=calls, model=b"other")
    assert put(other, [key_of(1)], model=b"other") == [False]
    assert other.stats().dropped == {"no room": 1}
    store.close(DEADLINE_S)
    other.close(DEADLINE_S)
