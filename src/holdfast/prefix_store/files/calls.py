"""Every call of the system that the store makes, in one place, so that tests can make each of them fail or take long.

Knows nothing of pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01
_libc = ctypes.CDLL(None, use_errno=True)


class Calls:
    """Each raises OSError as the system does."""

    def open(self, path: Path, flags: int) -> int:
        """Files are for their owner alone, and never links that somebody laid there."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, file: int) -> None:
        os.close(file)

    def read(self, file: int, nbytes: int, offset: int) -> bytes:
        return os.pread(file, nbytes, offset)

    def write(self, file: int, data: bytes, offset: int) -> None:
        """All of it: a short write is an error, as a full disk makes."""
        if (written := os.pwrite(file, data, offset)) != len(data):
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")

    def read_into(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(file, buffers, offset)

    def write_from(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(file, buffers, offset)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def truncate(self, file: int, nbytes: int) -> None:
        os.ftruncate(file, nbytes)

    def punch(self, file: int, offset: int, nbytes: int) -> None:
        """Gives the space of these bytes back to the file system; they read as zeros."""
        call = getattr(_libc, "fallocate", None)
        if call is None:
            raise OSError(errno.EOPNOTSUPP, "no fallocate")
        mode = ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE)
        if call(ctypes.c_int(file), mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync(self, file: int) -> None:
        os.fsync(file)

    def try_lock(self, file: int, kind: int) -> bool:
        """`kind`: fcntl.LOCK_EX, LOCK_SH or LOCK_UN. False: another holds it."""
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def disk_space(self, folder: Path) -> tuple[int, int]:
        """Free and in all, in bytes."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def now(self) -> float:
        return time.time()
