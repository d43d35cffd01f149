"""A client process: its load on standard input, timed answers on standard output, in frames, as they come.

    in    a WorkerOrder in msgpack; then, once all processes are ready, the moment at which the run begins
    out   an empty WorkerFrame: ready; answers; the last frame has the report of the process itself

A frame is 4 bytes of length, then msgpack.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections.abc import Callable

import msgspec

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.client.drive import PreparedRequests, drive, open_connections
from holdfast.bench.client.wire import Connections
from holdfast.bench.load.load import Load, WorkerShare

FLUSH_S = 0.5
HEADER = struct.Struct("<I")
MOMENT = struct.Struct("<d")


class WorkerOrder(msgspec.Struct, frozen=True):
    load: Load
    share: WorkerShare


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the client itself was the bottleneck."""

    cpu_share: float
    """Of one core, in its busiest half second that is not its first."""
    loop_lag_s: float
    """The most by which its own timer was late: events may have waited so long to be read."""


class WorkerFrame(msgspec.Struct, frozen=True):
    answers: list[TimedAnswer]
    report: ClientReport | None = None


def send(frame: WorkerFrame) -> None:
    """Ends the process where nobody reads any more: load that nobody asked for must not go on."""
    encoded = msgspec.msgpack.encode(frame)
    try:
        sys.stdout.buffer.write(HEADER.pack(len(encoded)) + encoded)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)


def receive(size: int) -> bytes:
    """Ends the process where nobody writes any more: a run that was interrupted before it began."""
    message = sys.stdin.buffer.read(size)
    if len(message) < size:
        sys.exit(1)
    return message


async def work(order: WorkerOrder, prepared: PreparedRequests, connections: Connections) -> None:
    waiting: list[TimedAnswer] = []
    shares, lags = [0.0], [0.0]

    def flush(report: ClientReport | None = None) -> None:
        send(WorkerFrame(waiting, report))
        waiting.clear()

    async def flush_now_and_then() -> None:
        await asyncio.sleep(max(0.0, order.share.start_s - time.monotonic()) + FLUSH_S)
        while True:
            began_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(FLUSH_S)
            took_s = time.monotonic() - began_s
            shares.append((time.process_time() - cpu_s) / took_s)
            lags.append(took_s - FLUSH_S)
            flush()

    flushing = asyncio.create_task(flush_now_and_then())
    await drive(order.load, order.share, waiting.append, connections=connections, prepared=prepared)
    flushing.cancel()
    flush(ClientReport(cpu_share=max(shares), loop_lag_s=max(lags)))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Where there is none for the system.
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def main() -> None:
    (size,) = HEADER.unpack(receive(HEADER.size))
    order = msgspec.msgpack.decode(receive(size), type=WorkerOrder)
    prepared = PreparedRequests(order.load, order.share)
    prepared.fill()
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        connections = runner.run(open_connections(order.load, order.share))
        send(WorkerFrame([]))
        (start_s,) = MOMENT.unpack(receive(MOMENT.size))
        share = msgspec.structs.replace(order.share, start_s=start_s)
        runner.run(work(WorkerOrder(order.load, share), prepared, connections))


if __name__ == "__main__":
    main()
