"""Folders for the sockets between Holdfast's processes: readable by their owner alone, and not left behind.

A server that is killed cannot remove its own; the next one that starts does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "holdfast-"
YOUNG_S = 60.0
"""A folder that was made this shortly ago may not be locked yet."""


class SocketFolder:
    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Held as long as this process lives: that is how others know that somebody still uses it.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> list[str]:
    """Folders of this user's processes that were killed. Returns their names."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.name)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != os.getuid() or time.time() - status.st_ctime < YOUNG_S:
            return False
        # Sockets and nothing else: whatever else a person has named so stays.
        with os.scandir(entry.path) as inside:
            if not all(each.name.endswith(".sock") for each in inside):
                return False
        folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(folder)
