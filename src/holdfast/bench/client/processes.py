"""Client processes of one load: started, listened to, ended. What they send is collected as it comes.

The process that started them is free to sample the server meanwhile.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.worker import HEADER, MOMENT, ClientReport, WorkerFrame, WorkerOrder
from holdfast.bench.load.load import Load, WorkerShare
from holdfast.errors import EngineError

HEADWAY_S = 0.3
"""From when all are ready to the beginning: time for each to hear of it."""
POLL_S = 0.1


class ClientProcesses:
    """`answers` grows until all have ended, each with a report of its own."""

    def __init__(self, load: Load, workers: int) -> None:
        self.answers: list[TimedAnswer] = []
        self.reports: list[ClientReport] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._begin(load, workers)
        except BaseException:
            self.close()
            raise

    def _begin(self, load: Load, workers: int) -> None:
        for _ in range(workers):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "holdfast.bench.client.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    process_group=0,  # Ctrl-C in a terminal is for this process, which ends them.
                )
            )
        for index, process in enumerate(self._processes):
            order = msgspec.msgpack.encode(WorkerOrder(load, WorkerShare(index, workers)))
            self._tell(process, HEADER.pack(len(order)) + order)
        for process in self._processes:
            self._read(process)
        self.start_s = time.monotonic() + HEADWAY_S
        for process in self._processes:
            self._tell(process, MOMENT.pack(self.start_s))
        self._threads = [threading.Thread(target=self._listen, args=(one,), daemon=True) for one in self._processes]
        for thread in self._threads:
            thread.start()

    def _tell(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended; `wait` says so.
            process.stdin.write(message)
            process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> WorkerFrame | None:
        """None: it has ended."""
        assert process.stdout is not None
        header = process.stdout.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        return msgspec.msgpack.decode(process.stdout.read(HEADER.unpack(header)[0]), type=WorkerFrame)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        while (frame := self._read(process)) is not None:
            self.answers.extend(frame.answers)
            if frame.report is not None:
                self.reports.append(frame.report)
                return

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until all have sent everything. Raises where one ended before."""
        while any(thread.is_alive() for thread in self._threads):
            meanwhile()
            time.sleep(POLL_S)
        if len(self.reports) < len(self._processes):
            raise EngineError(
                "a client process of the benchmark ended early; its own words are above",
                fix="fewer requests at once (--concurrency), or more memory for the client",
            )

    def elapsed_s(self) -> float:
        """Since the beginning; negative: before it."""
        return time.monotonic() - self.start_s

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def client_processes(load: Load, workers: int) -> Iterator[ClientProcesses]:
    running = ClientProcesses(load, workers)
    try:
        yield running
    finally:
        running.close()
