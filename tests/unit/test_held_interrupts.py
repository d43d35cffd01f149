"""Ctrl-C while a process starts: it is for this process alone, and comes once the other has begun."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from deadlines import PATIENCE_S
from held_signals import hears_no_interrupt

from holdfast.held_interrupts import interrupts_held

READY = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); input()"


def test_a_process_that_has_hardly_begun_does_not_die_of_ctrl_c() -> None:
    with interrupts_held():
        process = subprocess.Popen(
            [sys.executable, "-c", READY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    process.send_signal(signal.SIGINT)
    assert hears_no_interrupt(process.pid)
    assert process.communicate(b"\n", timeout=PATIENCE_S) == (b"ready\n", b"")
    assert process.returncode == 0


def test_ours_comes_afterwards() -> None:
    went_on = False

    def start() -> None:
        nonlocal went_on
        with interrupts_held():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            went_on = True

    with pytest.raises(KeyboardInterrupt):
        start()
    assert went_on
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
