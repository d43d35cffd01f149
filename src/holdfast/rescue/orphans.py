"""What a supervised program leaves behind, and what becomes of it when its supervisor is killed. Linux; elsewhere less.

its session, orphans that left it, and all their children   ended before the next start, and with us
children that were here before us (a sidecar)               not ours to end, nor theirs, which share their session
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
_GUARD = """trap '' HUP INT QUIT TERM
while read -r line; do away=$line; done
kill -s TERM "$0"
for second in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$0" || break; sleep 1; done
kill -s TERM -- "-$0" $away
sleep 1
kill -s KILL -- "-$0" $away"""
"""Reads who has left the program's group. When there is nothing more to read its writer is gone, and the program has to
end too: first in its own order, for ten seconds, then at once."""
SHELL = "/bin/sh"
_THREADS = 17
"""Place of the number of threads behind the name in /proc/PID/stat."""


class Process(NamedTuple):
    pid: int
    parent: int
    group: int
    session: int
    lives: bool
    """A process whose first thread has ended is shown as dead, and lives as long as another thread does."""


def adopt_orphans() -> frozenset[int]:
    """Linux: what its children leave behind comes to us instead of to the machine's init, and can be waited for.

    Sessions of the processes that are not the program's: our own, and those of children that we have already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return frozenset((os.getsid(0), *(one.session for one in _processes() if one.parent == os.getpid())))


def left_behind(head: int, others: frozenset[int]) -> list[Process]:
    """Processes of the session that `head` led, those that left it and became ours when their parents died, and the
    descendants of both, in whatever sessions. `head` itself is among them while it lives."""
    there = list(_processes())
    children: dict[int, list[Process]] = {}
    for one in there:
        children.setdefault(one.parent, []).append(one)
    ours = [one for one in children.get(os.getpid(), ()) if one.session not in others]
    open_ones = [*ours, *(one for one in there if one.session == head)]
    found: dict[int, Process] = {}
    while open_ones:
        one = open_ones.pop()
        if one.pid not in found:
            found[one.pid] = one
            open_ones += children.get(one.pid, ())
    # The dead that are ours to wait for are left too, until that was done.
    return [one for one in found.values() if one.lives or one.parent == os.getpid()]


def name_of(pid: int) -> str:
    """As the system shows it; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _processes() -> Iterator[Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, group, session.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parent, group, session = map(int, fields[1:4])
            lives = fields[0] not in "ZX" or int(fields[_THREADS]) > 1
        except (OSError, ValueError, IndexError):
            continue
        yield Process(int(folder.name), parent, group, session, lives)


class Guard:
    """A small process that ends a program when we are killed and can do it no more. As good as none where there is no
    shell: a container without one ends with its first process."""

    def __init__(self, head: int) -> None:
        self._head = head
        self._told: frozenset[int] = frozenset()
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            # In our session, so that it is not taken for something that the program left.
            self._process = subprocess.Popen(
                [SHELL, "-c", _GUARD, str(head)],
                bufsize=0,
                process_group=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)

    def tell(self, there: Iterable[Process]) -> None:
        """Who of the program is out of its group, and would not be reached through it."""
        away = frozenset(one.pid for one in there if one.group != self._head)
        if away == self._told or self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # It may be gone, or stopped: then it is told the next time.
            self._process.stdin.write(f"{' '.join(map(str, sorted(away)))}\n".encode())
            self._told = away

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is None:
            return
        self._process.kill()  # Before the end of its input, which would set it to work.
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()
