"""Nothing that `holdfast rescue` started outlives it: workers that left their session, ignore requests to end and
compute on, processes whose first thread has ended, and all of them when rescue itself is killed. Real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import PATIENCE_S

TREE = """
import os, signal, subprocess, sys, threading, time

role, folder, ending = sys.argv[1:4]

def started(role, session):
    program = [sys.executable, __file__, role, folder, ending]
    subprocess.Popen(program, start_new_session=session, stdin=subprocess.DEVNULL)

def wait_for(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        threading.Event().wait(0.02)

def spin():
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    while True:  # Busy all the same, without taking a core from whoever tests.
        time.sleep(0.001)

if role != "head" and ending != "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "worker":  # In a session of its own, and so is its child.
    started("worker's worker", True)
if role == "headless":  # Its first thread ends; the process goes on.
    threading.Thread(target=spin).start()
with open(os.path.join(folder, role + ".part"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(folder, role + ".part"), os.path.join(folder, role))
if role == "head":
    started("worker", True)
    started("headless", False)
    wait_for("worker", "worker's worker", "headless")
    print("all there", flush=True)
    if ending == "waits":
        threading.Event().wait()
    sys.exit(int(ending))
if role == "headless":
    import ctypes
    ctypes.CDLL(None).pthread_exit(None)
spin() if role == "worker" else threading.Event().wait()
"""
ROLES = ("worker", "worker's worker", "headless")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[list[str]]:
    """The command of a server with such workers, without how it ends. Whatever a failed test leaves is killed."""
    program = tmp_path / "tree.py"
    program.write_text(TREE)
    yield [sys.executable, str(program), "head", str(tmp_path)]
    for role in ROLES:
        pid = _pid(tmp_path, role)
        if pid is not None and _lives(pid):
            os.kill(pid, signal.SIGKILL)


def _pid(folder: Path, role: str) -> int | None:
    file = folder / role
    return int(file.read_text()) if file.exists() else None


def _lives(pid: int) -> bool:
    """Also where its first thread has ended and others have not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" or int(fields[17]) > 1


@pytest.mark.parametrize("ending", ["3", "0"])
def test_all_that_a_program_started_ends_with_it(tree: list[str], tmp_path: Path, ending: str) -> None:
    rescue = [sys.executable, "-m", "holdfast", "rescue", "--", *tree, ending]
    ended = subprocess.run(rescue, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    assert (ended.returncode, ended.stdout) == (int(ending), b"all there\n")
    pids = [_pid(tmp_path, role) for role in ROLES]
    assert [pid for pid in pids if pid is None or _lives(pid)] == []
    assert (b"killed, because it outlived its server" in ended.stderr) == (ending == "3"), "the others heed SIGTERM"
    assert (b"stopping the processes that it left behind" in ended.stderr) == (ending == "0")


SUPERVISOR = """
import os, signal, subprocess, sys
from holdfast.rescue.orphans import Guard, adopt_orphans, left_behind

others = adopt_orphans()
program = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True)
guard = Guard(program.pid)
assert program.stdout.readline() == b"all there\\n"
guard.tell(left_behind(program.pid, others))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_guard_ends_what_left_the_group_too(tree: list[str], tmp_path: Path) -> None:
    """As rescue does it every few seconds, and then is killed."""
    subprocess.run([sys.executable, "-c", SUPERVISOR, *tree, "waits"], timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S
    for role in ("head", *ROLES):
        pid = _pid(tmp_path, role)
        assert pid is not None
        while _lives(pid):
            assert time.monotonic() < until, role
            time.sleep(0.05)
