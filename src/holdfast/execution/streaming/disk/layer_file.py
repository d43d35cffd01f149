"""Layers of a model in a file on a fast disk, as they lie in memory: written once while loading, then read again and
again past the page cache, which would only push out what it just read.

The file has no name: however the process ends, nothing is left of it. Knows nothing of models.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import DISK_FAILED, EngineError
from holdfast.execution.link.disk_turns import turns_of
from holdfast.records import LinkUse
from holdfast.units import format_bytes

PIECE_BYTES = 4 << 20
"""Read at once by one thread."""
DEPTH = 8
"""Pieces that are being read at the same time: what a disk needs to be busy."""
READ_TRIES, BEFORE_RETRY_S = 3, 0.05
"""Of a piece that the disk gave an error for: some are of the moment."""

ReadInto = Callable[[int, memoryview, int], int]


class LayerFile:
    """`places` of equal size, one a layer: whole pages. `read`: for tests of what a disk may do. `behind_bytes`: of
    something else behind them."""

    def __init__(
        self, folder: Path, places: int, place_bytes: int, read: ReadInto | None = None, behind_bytes: int = 0
    ) -> None:
        self.place_bytes, self.nbytes, self._read = place_bytes, places * place_bytes + behind_bytes, read or _pread
        self.direct = False
        """Reads go past the page cache."""
        self._file = self._open(folder)
        self._end = weakref.finalize(self, os.close, self._file)  # Loading may fail in the middle.
        self._threads, self._clock = _readers(), _ReadClock()
        self._turns = turns_of(folder.stat().st_dev)
        self._stopped: list[ThreadPoolExecutor] = []
        """That may still be reading."""

    def _open(self, folder: Path) -> int:
        try:
            free = shutil.disk_usage(folder).free
            if free < self.nbytes:
                raise _failed(f"there is not enough room in {folder}", self.nbytes, f"{format_bytes(free)} free")
            file = self._unnamed(folder)
            try:
                _allocate(file, self.nbytes)
                self.direct = _past_page_cache(file)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            raise _failed(f"cannot keep layers in {folder}", self.nbytes, error.strerror or str(error)) from error
        return file

    def _unnamed(self, folder: Path) -> int:
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError as error:  # Not every file system has files without names; some containers' have not.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
        file, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
        return file

    def write(self, place: int, memory: mmap.mmap | memoryview) -> None:
        view = memoryview(memory)
        for first in range(0, self.place_bytes, PIECE_BYTES):
            piece = view[first : min(first + PIECE_BYTES, self.place_bytes)]
            self.write_at(piece, place * self.place_bytes + first)

    def write_at(self, piece: memoryview, offset: int) -> None:
        """Whole pages."""
        try:
            written = os.pwrite(self._file, piece, offset)
        except OSError as error:
            raise _failed("a layer could not be written", self.nbytes, error.strerror or str(error)) from error
        if written != len(piece):
            raise _failed("a layer could not be written", self.nbytes, f"{written} of {len(piece)} bytes were")

    def read(self, place: int, memory: mmap.mmap | memoryview) -> Iterator[Future[None]]:
        """Begins to, piece by piece; it is there when all of these are done."""
        view = memoryview(memory)
        for first in range(0, self.place_bytes, PIECE_BYTES):
            piece = view[first : min(first + PIECE_BYTES, self.place_bytes)]
            yield self._threads.submit(self.read_at, piece, place * self.place_bytes + first)

    def read_at(self, piece: memoryview, offset: int) -> None:
        """Whole pages, in the calling thread."""
        for attempt in range(READ_TRIES):
            try:
                with self._clock.reading(), self._turns.layer():
                    found = self._read(self._file, piece, offset)
            except OSError as error:
                if attempt == READ_TRIES - 1:
                    raise _failed("a layer could not be read", len(piece), error.strerror or str(error)) from error
                time.sleep(BEFORE_RETRY_S)
                continue
            if found == len(piece):
                self._clock.arrived(found)
                return
        raise _failed("a layer could not be read", len(piece), f"{found} bytes")

    def stop_reading(self) -> None:
        """No piece is being read when this returns, also of a `read` that was interrupted."""
        self._stopped.append(self._threads)
        self._threads = _readers()  # First: Ctrl-C may come again, and others read then.
        for threads in self._stopped:
            _shut_down(threads)
        self._stopped.clear()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within, a step waits for what is being read, if it is not there yet."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._clock.stalled_s += time.monotonic() - began_s

    def use(self) -> LinkUse:
        return self._clock.use()

    def close(self) -> None:
        for threads in (*self._stopped, self._threads):
            threads.shutdown(cancel_futures=True)
        self._end()


class _ReadClock:
    """Bytes that were read, and the time in which something was being read, by however many threads."""

    def __init__(self) -> None:
        self._lock, self._began_s = threading.Lock(), time.monotonic()
        self._running, self._since_s, self._busy_s, self._bytes = 0, 0.0, 0.0, 0
        self.stalled_s = 0.0
        """Of the one thread that steps."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._since_s = time.monotonic()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._busy_s += time.monotonic() - self._since_s

    def arrived(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes

    def use(self) -> LinkUse:
        with self._lock:
            now_s = time.monotonic()
            busy_s = self._busy_s + (now_s - self._since_s if self._running else 0.0)
            return LinkUse(
                link="nvme-ram",
                copied_bytes=self._bytes,
                busy_s=busy_s,
                stalled_s=self.stalled_s,
                over_s=now_s - self._began_s,
            )


def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(DEPTH, "layer-reader")


def _shut_down(threads: ThreadPoolExecutor) -> None:
    """What was asked for is read before: nobody may wait for a piece that is never read. A `join` that Ctrl-C came in
    takes a thread that runs for one that is over; so another thread joins them."""
    ended = threading.Event()

    def end() -> None:
        threads.shutdown()
        ended.set()

    threading.Thread(target=end, name="layer-reader-end").start()
    ended.wait()


def _allocate(file: int, nbytes: int) -> None:
    """So that a full disk is found now. Where the file system cannot, it is found while writing."""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(file, nbytes)


def _past_page_cache(file: int) -> bool:
    """From now on. Not every file system can."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _pread(file: int, piece: memoryview, offset: int) -> int:
    return os.preadv(file, [piece], offset)


def _failed(what: str, needed: int, found: str) -> EngineError:
    return EngineError(
        what, code=DISK_FAILED, needed=format_bytes(needed), found=found, fix="--nvme-path on another disk"
    )
