"""Ctrl-C while a process starts: it is for this process alone, and comes once the other has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from deadlines import PATIENCE_S
from held_signals import hears_no_interrupt

from holdfast import held_interrupts
from holdfast.held_interrupts import interrupts_held, interrupts_put_off

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


def test_what_must_be_whole_is_done_to_its_end() -> None:
    """Also where another thread of the process hears of it."""
    done = list[str]()

    def half_by_half() -> None:
        with interrupts_put_off():
            done.append("one half")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the other")
        done.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        half_by_half()
    assert done == ["one half", "the other"]
    assert signal.getsignal(signal.SIGINT) is before


def test_who_asks_again_is_heard_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one later, as a person presses it, not one that was sent twice."""
    done = list[str]()

    def half_by_half() -> None:
        with interrupts_put_off():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("one half")
            monkeypatch.setattr(held_interrupts, "AGAIN_S", 0.0, raising=False)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        half_by_half()
    assert done == ["one half"]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_takes_no_time_is_done_to_its_end_however_often_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within what is put off once."""
    monkeypatch.setattr(held_interrupts, "AGAIN_S", 0.0)
    done = list[str]()

    def half_by_half() -> None:
        with interrupts_put_off():
            os.kill(os.getpid(), signal.SIGINT)
            with interrupts_put_off(however_often=True):
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGINT)
                done.append("all of it")
            done.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        half_by_half()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_who_hears_nothing_puts_nothing_off(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_put_off():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_puts_nothing_off() -> None:
    found = list[object]()

    def run() -> None:
        with interrupts_put_off():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [signal.getsignal(signal.SIGINT)]
