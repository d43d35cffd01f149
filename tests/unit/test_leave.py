"""An engine process ends with all that it owes anybody, and without being taken apart."""

from __future__ import annotations

import subprocess
import sys

from deadlines import PATIENCE_S

CODE = """
import atexit, sys, threading
from holdfast.leave import leave

class TakenApart:
    def __del__(self):
        print("taken apart")

kept = TakenApart()
begun = threading.Event()

def work():
    begun.wait()
    print("a thread's last words")
    handlers.append("an exit handler's")

threading.Thread(target=work).start()
handlers = []
atexit.register(lambda: print(*handlers))  # After the thread, which says what.
print("written, not yet sent")
{before}
threading.Timer(0.1, begun.set).start()
leave(7)
"""


def _ended(before: str = "") -> subprocess.CompletedProcess[str]:
    code = CODE.format(before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)


def test_threads_handlers_and_output_come_first() -> None:
    done = _ended()
    assert (done.returncode, done.stderr) == (7, "")
    assert set(done.stdout.splitlines()) == {"written, not yet sent", "a thread's last words", "an exit handler's"}


def test_without_output_it_ends_the_same() -> None:
    done = _ended("sys.stdout = sys.stderr = None")
    assert (done.returncode, done.stderr) == (7, "")
