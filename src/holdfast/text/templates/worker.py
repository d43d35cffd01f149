"""The process that runs templates of clients, one at a time: `python -m holdfast.text.templates.worker PARENT`.

Hears jobs on its standard input, a socket, and answers there; each message has its length in front. Limits its own
memory and processor time, and ends with the process that started it. Imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import time

MEMORY_BYTES = 256 << 20
"""That a template may take, on top of what the process has when it begins."""
CPU_S = 8
"""Of one job, in whole seconds: above what the sandbox allows, for what it does not see."""
NICENESS = 5
"""Where cores are short the server itself and the engine come first."""
LENGTH = struct.Struct("!I")
READY = b"ready"


def main(parent: int) -> None:
    _end_with(parent)
    from holdfast.text.templates import jobs

    _limit_memory()
    os.nice(NICENESS)
    with socket.socket(fileno=0) as line:
        _send(line, READY)
        while (raw := _receive(line)) is not None:
            _limit_cpu()
            _send(line, jobs.encode_outcome(jobs.run_job(jobs.decode_job(raw))))


def _end_with(parent: int) -> None:
    """While it waits it hears that the other end is closed; while it works the kernel ends it."""
    for one in (signal.SIGINT, signal.SIGUSR1):  # They may reach the whole group or unit; the front decides.
        signal.signal(one, signal.SIG_IGN)
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(3)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):  # There may be none of this on this system, or less of it.
        with open("/proc/self/statm") as statm:
            now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, now_bytes + MEMORY_BYTES))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu() -> None:
    """Of the next job. The first limit ends the process; the second is left alone, so that this can be said again."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, hard))


def _send(line: socket.socket, message: bytes) -> None:
    line.sendall(LENGTH.pack(len(message)))
    line.sendall(message)


def _receive(line: socket.socket) -> bytes | None:
    """None: the other end is gone."""
    head = _exactly(line, LENGTH.size)
    return None if head is None else _exactly(line, LENGTH.unpack(head)[0])


def _exactly(line: socket.socket, size_bytes: int) -> bytes | None:
    message = bytearray(size_bytes)
    view = memoryview(message)
    while view:
        count = line.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
