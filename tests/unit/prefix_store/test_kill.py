"""A process that is killed at any point of a write leaves every page as it was written, or not at all."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefix_pages import PAGE_BYTES, FailingCalls, key_of, opened, put, served

SUPPORT = Path(__file__).parents[2] / "support"
PAGES = 48
KEYS = [key_of(number) for number in range(96)]

WRITER = """
import random, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from prefix_pages import FailingCalls, key_of, opened, page_of
draws = random.Random(int(sys.argv[3]))
calls = FailingCalls()
calls.ahead_s = float(sys.argv[4])
store = opened(Path(sys.argv[2]), pages=48, calls=calls)
print("ready", flush=True)
while True:
    key = key_of(draws.randrange(96))
    store.write(key, memoryview(page_of(key)))
    store.use([key_of(draws.randrange(96))])
"""


def start_writer(folder: Path, seed: int, ahead_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(SUPPORT), str(folder), str(seed), str(ahead_s)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    return writer


def kill_many(folder: Path, kills: int, seed: int) -> None:
    """Two writers at a time, each killed after some milliseconds of writing, evicting and reusing slots; beside them a
    reader that lives through all of it. A minute passes each time, after which what they left half done is nobody's."""
    draws, found, ahead_s = random.Random(seed), 0, 0.0
    beside = opened(folder, pages=PAGES)
    for number in range(0, kills, 2):
        ahead_s += 61
        writers = [start_writer(folder, seed + number + one, ahead_s) for one in (0, 1)]
        for writer in writers:
            end = time.monotonic() + draws.uniform(0, 0.05)
            while time.monotonic() < end:
                served(beside, draws.sample(KEYS, 8))  # Asserts that what is served is right.
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        after = opened(folder, pages=PAGES)
        there = served(after, KEYS)
        # Torn pages are never there to be found: a page is there only after its bytes are.
        assert "checksum" not in after.stats().missed
        assert after.stats().total_bytes <= PAGES * PAGE_BYTES
        assert len(there) <= PAGES
        found += len(there)
        after.close(5)
    beside.close(5)
    assert found > kills * 8  # They did write.
    calls = FailingCalls()
    calls.ahead_s = ahead_s + 61
    last = opened(folder, pages=PAGES, calls=calls)
    keys = [key_of(1000 + number) for number in range(PAGES)]
    assert all(all(put(last, [key])) for key in keys)
    assert served(last, keys) == keys
    last.close(5)


def test_killed_writers(tmp_path: Path) -> None:
    kill_many(tmp_path / "store", 24, seed=1)


@pytest.mark.long
def test_hundreds_of_killed_writers(tmp_path: Path) -> None:
    kill_many(tmp_path / "store", 600, seed=1000)
