"""What a supervised program leaves behind, and what becomes of it when its supervisor is killed. Linux; elsewhere less.

its session, and orphans that left it           ended before the next start: an engine may still hold the GPU
children that were here before us (a sidecar)   not ours to end, nor theirs, which share their session
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GUARD = 'read -r word || { kill -s TERM -- "-$0"; sleep 10; kill -s KILL -- "-$0"; }'
"""Waits for a word; when the other end is gone without one, so is its writer, and its program has to end too."""
SHELL = "/bin/sh"


def adopt_orphans() -> frozenset[int]:
    """Linux: what its children leave behind comes to us instead of to the machine's init, and can be waited for.

    Sessions of the processes that are not the program's: our own, and those of children that we have already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return frozenset((os.getsid(0), *(session for _, _, parent, session in _processes() if parent == os.getpid())))


def left_behind(head: int, others: frozenset[int]) -> list[int]:
    """Processes of the session that `head` led, and those that left it and became ours when their parents died."""
    # The dead that are ours to wait for are left too, until that was done.
    return [
        pid
        for pid, state, parent, session in _processes()
        if (session == head and state != "Z") or (parent == os.getpid() and session not in others)
    ]


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """Their ids, states, parents and sessions."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, group, session.
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        yield int(folder.name), state, int(parent), int(session)


class Guard:
    """A small process that ends a program's group when we are killed and can do it no more. As good as none where
    there is no shell: a container without one ends with its first process."""

    def __init__(self, head: int) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            # In our session, so that it is not taken for something that the program left.
            self._process = subprocess.Popen(
                [SHELL, "-c", f"trap '' HUP INT QUIT TERM; {_GUARD}", str(head)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"done\n")
            self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
