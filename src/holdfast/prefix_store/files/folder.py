"""The folder of a store: whether it may be used, its lock, and what all processes share besides pages: bytes in use,
bytes written today, rates measured. Knows nothing of pages.

    lock        held (flock) while files are changed, for microseconds to milliseconds
    control     numbers of the whole folder
    NAME.index, NAME.pages, NAME.uses      of each model and page size
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.prefix_store.files.calls import Calls

LOCK, CONTROL = "lock", "control"
_CONTROL = struct.Struct("<16sqqqdd")
_MAGIC = b"holdfast control"
_DAY_S = 86400
_POLL_S = 0.002
LOCK_S = 2.0
"""Waited for another process that holds the lock: then a page is not worth it."""
_NEUTRAL = {"lost+found"}
"""May be in a folder that is otherwise empty."""


class BusyError(OSError):
    """Another process holds the lock for longer than anybody should."""

    def __init__(self) -> None:
        super().__init__(errno.EBUSY, "another process holds the lock of the store")


@dataclass(frozen=True, slots=True)
class Control:
    total_bytes: int = -1
    """Of all models, as last counted; -1: not known."""
    day: int = 0
    written_bytes: int = 0
    """On that day."""
    read_rate: float = 0.0
    write_rate: float = 0.0
    """Bytes a second as last measured; 0: never."""

    def on(self, now_s: float) -> Control:
        """On the day of `now_s`: a new day has its whole budget. A clock that went back gains nothing."""
        day = int(now_s // _DAY_S)
        return self if day <= self.day else replace(self, day=day, written_bytes=0)


class StoreFolder:
    def __init__(self, path: Path, calls: Calls, *, create: bool, lock_s: float = LOCK_S) -> None:
        """ConfigurationError where it cannot be used at all."""
        self.path, self._calls, self._lock_s = path, calls, lock_s
        _prepare(path, create=create)
        self._thread_lock = threading.Lock()
        self.seen = Control()
        """The numbers as last read or written."""
        self._read = b""
        """The bytes of them."""
        self.read_only: str = ""
        """Why it is, where it is."""
        self._lock = self._control = -1
        self._reopens = False
        """The lock's file was closed because it could not be unlocked."""
        try:
            self._lock = self._open_lock()
            self._control = calls.open(path / CONTROL, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            self.read_only = error.strerror or str(error)

    @contextlib.contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """Alone among threads and processes. BusyError; OSError."""
        timeout_s = self._lock_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        if self._lock < 0 and not self._reopens:
            raise OSError(errno.EROFS, self.read_only)
        if not self._thread_lock.acquire(timeout=timeout_s):
            raise BusyError
        try:
            if self._reopens:
                self._lock, self._reopens = self._open_lock(), False
            while not self._calls.try_lock(self._lock, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise BusyError
                time.sleep(_POLL_S)
            try:
                yield
            finally:
                self._unlock()
        finally:
            self._thread_lock.release()

    def _open_lock(self) -> int:
        return self._calls.open(self.path / LOCK, os.O_RDWR | os.O_CREAT)

    def _unlock(self) -> None:
        try:
            self._calls.try_lock(self._lock, fcntl.LOCK_UN)
        except OSError:  # Closing the file does it, too. Else all others would wait until this process ends.
            with contextlib.suppress(OSError):
                self._calls.close(self._lock)
            self._lock, self._reopens = -1, True

    def changed(self) -> bool:
        """Whether the numbers are others than those last read or written. Without the lock."""
        return self._read_control() != self._read

    def look(self) -> None:
        """`seen` as it is now. Without the lock: what another is writing just then is not taken."""
        data = self._read_control()
        if (found := self._decoded(data)) is not None:
            self.seen, self._read = found, data

    def control(self) -> Control:
        """As of today. Where it is damaged, the budget begins anew, and bytes in use are to be counted."""
        self._read = self._read_control()
        self.seen = self._decoded(self._read) or Control().on(self._calls.now())
        return self.seen

    def _decoded(self, data: bytes) -> Control | None:
        """None: it is damaged."""
        if len(data) == _CONTROL.size + 4 and zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little"):
            magic, *numbers = _CONTROL.unpack(data[:-4])
            if magic == _MAGIC:
                return Control(*numbers).on(self._calls.now())
        return None

    def set_control(self, control: Control) -> None:
        """Under the lock."""
        numbers = (control.total_bytes, control.day, control.written_bytes, control.read_rate, control.write_rate)
        data = _CONTROL.pack(_MAGIC, *numbers)
        data += zlib.crc32(data).to_bytes(4, "little")
        self._calls.write(self._control, data, 0)
        self.seen, self._read = control, data

    def _read_control(self) -> bytes:
        return b"" if self._control < 0 else self._calls.read(self._control, _CONTROL.size + 4, 0)

    def slab_names(self) -> list[str]:
        return sorted(name.removesuffix(".index") for name in self._calls.names(self.path) if name.endswith(".index"))

    def close(self) -> None:
        for file in (self._lock, self._control):
            if file >= 0:
                with contextlib.suppress(OSError):
                    self._calls.close(file)
        self._lock = self._control = -1
        self._reopens = False
        self.read_only = "closed"


def _prepare(path: Path, *, create: bool) -> None:
    try:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = path.lstat(), path.stat()
        names = set(os.listdir(path)) if stat.S_ISDIR(found.st_mode) else set()
    except OSError as error:
        reason = error.strerror or str(error)
        raise _unusable(path, "cannot be used", reason, "--kv-store with a folder on a local disk") from error
    user = os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(path, "is not a folder", "a file", "--kv-store with a folder")
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (user, 0):
        raise _unusable(path, "is a link that belongs to another user", f"user {link.st_uid}", "name the folder itself")
    if found.st_uid != user:
        fix = f"chown -R {user} {path}, or a folder of your own" if create else f"run it as user {found.st_uid}"
        raise _unusable(path, "belongs to another user, who could change pages", f"user {found.st_uid}", fix)
    if found.st_mode & 0o022:
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        raise _unusable(path, "can be written by others, who could change pages", mode, f"chmod 700 {path}")
    if names - _NEUTRAL and LOCK not in names:
        other = ", ".join(sorted(names - _NEUTRAL)[:3])
        raise _unusable(path, "has files that are not a KV store's", other, f"--kv-store {path / 'kv-store'}")
    if found.st_mode & 0o077:
        with contextlib.suppress(OSError):  # Where the file system is read-only. Files are for the owner alone anyway.
            path.chmod(0o700)


def open_parent(path: Path) -> Path | None:
    """A folder above in which all users may rename what is others': they could put another store in the place of
    `path`. Under a sticky bit, as in /tmp, they may not."""
    for parent in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return parent
    return None


def _unusable(path: Path, what: str, found: str, fix: str) -> ConfigurationError:
    return ConfigurationError(
        f"the folder {path} {what}",
        code="HF180",
        needed="a folder for KV pages alone, that only its owner can write",
        found=found,
        fix=fix,
        field="kv_store",
    )
