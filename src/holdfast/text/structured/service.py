"""The process that grammar workers are forked from: it holds the vocabulary's tree, which its children share, and does
nothing else. `python -m holdfast.text.structured.service DESCRIPTOR` with a listening socket; every connection is a
worker of its own. Ends, and its workers with it, when its standard input closes.

A fork takes milliseconds where a new process and a vocabulary take seconds, and nothing that a worker does is left
behind when it ends. There is one thread here, so that forking is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback

import msgspec

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.llguidance_backend import Grammars
from holdfast.text.structured.wire import Setup
from holdfast.text.structured.worker import Worker

_PR_SET_PDEATHSIG = 1


def main() -> int:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # They may reach the whole group or unit; the front decides.
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for a worker: its connection tells.
    _prefer_for_oom_kill()
    setup = _read_setup()
    if setup is None:
        return 0
    grammars = Grammars(setup.vocabulary, setup.eos_ids, setup.vocab_size)
    del setup
    with contextlib.suppress(GrammarError):  # A vocabulary may have no braces.
        # What the library builds once is built here, and shared.
        grammars.check(StructuredOutputsParams(json_object=True))
    libc = ctypes.CDLL(None)
    own_pid = os.getpid()
    gc.collect()
    gc.freeze()  # What is there now is never looked through again: pages stay shared with the workers.
    poll = select.poll()
    for descriptor in (listener.fileno(), 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        if any(descriptor == 0 for descriptor, _ in poll.poll()):
            return 0  # The parent has closed it, or is gone.
        connection, _ = listener.accept()
        try:
            child = os.fork()
        except OSError:  # No process or memory left: whoever asked sees the connection close.
            connection.close()
            continue
        if child == 0:
            _work(connection, listener, grammars, libc, own_pid)
        connection.close()


def _work(
    connection: socket.socket, listener: socket.socket, grammars: Grammars, libc: ctypes.CDLL, parent: int
) -> None:
    """Never returns: nothing of the parent's may run in a child."""
    log = os.dup(2)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            listener.close()
            os.close(0)
            # The library writes a line wherever memory ends, and a client decides how often that is.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with contextlib.suppress(OSError):  # Whoever asked has gone.
                Worker(connection, grammars).run()
    except Exception:
        with contextlib.suppress(OSError):
            os.write(log, traceback.format_exc().encode())
    finally:
        os._exit(0)


def _read_setup() -> Setup | None:
    """Up to the end of a length-prefixed message; None: there will be none."""
    length = int.from_bytes(_read(4) or b"", "little")
    body = _read(length)
    return msgspec.msgpack.decode(body, type=Setup) if body else None


def _read(count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        more = os.read(0, min(count - len(received), 1 << 20))
        if not more:
            return None
        received += more
    return bytes(received)


def _prefer_for_oom_kill() -> None:
    """Where a machine runs out of memory after all: rather this than the engine."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("900")


if __name__ == "__main__":
    sys.exit(main())
