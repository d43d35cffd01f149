"""What a program said last is passed on and read, however late rescue comes to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deadlines import PATIENCE_S

PROGRAM = """
import os, sys, time
print("first", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.stdout.write("".join(f"line {number}\\n" for number in range(4000)))
sys.exit(3)
"""
SUPERVISOR = """
import contextlib, os, sys
from pathlib import Path
from types import SimpleNamespace
from holdfast.rescue import process

go, write, read = Path(sys.argv[1]), process.Supervised._write, []

def slow_write(self, ours, piece):
    if not go.exists():  # As where whoever reads our output does not, or the system lets others run for a while.
        go.touch()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
    return write(self, ours, piece)

process.Supervised._write = slow_write
process.LAST_WORDS_S = -1.0  # It is over by then.
signals = SimpleNamespace(to=lambda told: contextlib.nullcontext())
ended = process.Supervised(sys.argv[2:], os.environ, read.append, signals).run()
print(ended.exit_code, len(read), read[-1])
"""


def test_the_last_words_of_a_program_outlast_a_supervisor_that_is_late(tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    words = [sys.executable, "-c", SUPERVISOR, go, sys.executable, "-c", PROGRAM, go]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    *_, last, told = ended.stdout.splitlines()
    assert (last, told) == ("line 3999", "3 4001 line 3999")
