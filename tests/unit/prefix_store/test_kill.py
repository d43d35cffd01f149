"""A process that is killed at any point of a write leaves every page as it was written, or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefix_pages import DEADLINE_S, PAGE_BYTES, FailingCalls, key_of, opened, put, served, until

SUPPORT = Path(__file__).parents[2] / "support"
PAGES = 48
KEYS = [key_of(number) for number in range(96)]

LAUNCHER = """
import os, random, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from prefix_pages import FailingCalls, key_of, opened, page_of

def write(folder, seed, ahead_s):
    calls, draws = FailingCalls(), random.Random(seed)
    calls.ahead_s = ahead_s
    store = opened(folder, pages=48, calls=calls)
    print(os.getpid(), flush=True)
    while True:
        key = key_of(draws.randrange(96))
        store.write(key, memoryview(page_of(key)))
        store.use([key_of(draws.randrange(96))])

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork() == 0:
        write(Path(sys.argv[2]), *map(int, line.split()))
"""


class Launcher:
    """A process that has imported everything and forks writers, each within milliseconds."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", LAUNCHER, str(SUPPORT), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, seed: int, ahead_s: int) -> int:
        """Returns when the writer has opened the store."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed} {ahead_s}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self, writer: int) -> None:
        os.kill(writer, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{writer}").exists())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def kill_many(folder: Path, kills: int, seed: int) -> None:
    """Two writers at a time, each killed after some milliseconds of writing, evicting and reusing slots; beside them a
    reader that lives through all of it. A minute passes each time, after which what they left half done is nobody's."""
    draws, found, ahead_s = random.Random(seed), 0, 0
    launcher = Launcher(folder)
    beside = opened(folder, pages=PAGES)
    for number in range(0, kills, 2):
        ahead_s += 61
        writers = [launcher.start(seed + number + one, ahead_s) for one in (0, 1)]
        if not number:  # However long it takes: from then on there are pages to lose.
            until(lambda: len(served(beside, KEYS)) >= PAGES // 2)
        for writer in writers:
            end = time.monotonic() + draws.uniform(0, 0.05)
            while time.monotonic() < end:
                served(beside, draws.sample(KEYS, 8))  # Asserts that what is served is right.
            launcher.kill(writer)
        after = opened(folder, pages=PAGES)
        there = served(after, KEYS)
        # Torn pages are never there to be found: a page is there only after its bytes are.
        assert "checksum" not in after.stats().missed
        assert after.stats().total_bytes <= PAGES * PAGE_BYTES
        assert len(there) <= PAGES
        found += len(there)
        after.close(DEADLINE_S)
    beside.close(DEADLINE_S)
    launcher.end()
    assert found > kills * 8  # They did write.
    calls = FailingCalls()
    calls.ahead_s = ahead_s + 61
    last = opened(folder, pages=PAGES, calls=calls)
    keys = [key_of(1000 + number) for number in range(PAGES)]
    assert all(all(put(last, [key])) for key in keys)
    assert served(last, keys) == keys
    last.close(DEADLINE_S)


def test_killed_writers(tmp_path: Path) -> None:
    kill_many(tmp_path / "store", 40, seed=1)


@pytest.mark.long
def test_hundreds_of_killed_writers(tmp_path: Path) -> None:
    kill_many(tmp_path / "store", 600, seed=1000)
