"""How many streamed events a second one client process of `holdfast bench` reads, each with its own timestamp.

    python benchmarks/bench_reader.py [--rate 40000 ...] [--connections 256] [--seconds 5] [--rounds 3] [--out FILE]

A byte replayer, in a process of its own, sends prepared events over that many connections, one send an event, as fast
as it was asked for; no server is in it. What counts is the client's processor time an event, which a busy machine does
not change much, and what was read a second. Both have a core each, where there are two.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, describe_machine, today
from holdfast.bench.client.processes import client_processes
from holdfast.bench.load.load import LengthRange, Load
from holdfast.bench.load.profile import PEAK, Phase
from holdfast.bench.measure.figures import token_times

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TICK_S = 0.001
TEXT = {"delta": {"content": " token"}, "index": 0, "finish_reason": None, "logprobs": None}
EVENT = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(document: dict[str, object] | None) -> bytes:
    data = b"data: " + (b"[DONE]" if document is None else json.dumps(document).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def replay(connections: int, rate: float, seconds: float) -> None:
    """The other process: waits for all requests, then sends events in turn to each connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=connections)
    print(listener.getsockname()[1], flush=True)
    sockets = [listener.accept()[0] for _ in range(connections)]
    for one in sockets:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.recv(1 << 16)
    for one in sockets:
        one.sendall(HEAD)
    event, sent, began = chunk(EVENT | {"choices": [TEXT]}), 0, time.monotonic()
    while (at_s := time.monotonic() - began) < seconds:
        due = int(rate * at_s)
        for number in range(sent, due):
            sockets[number % connections].sendall(event)
        sent = due
        time.sleep(TICK_S)
    ended = EVENT | {"choices": [{"delta": {}, "index": 0, "finish_reason": "length"}]}
    for one in sockets:
        one.sendall(chunk(ended) + chunk(None) + b"0\r\n\r\n")


def measure(connections: int, rate: float, seconds: float) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    words = [sys.executable, __file__, "--replay", "--connections", str(connections)]
    words += ["--rate", str(rate), "--seconds", str(seconds)]
    replayer = subprocess.Popen(["taskset", "-c", str(cores[-1]), *words], stdout=subprocess.PIPE, text=True)
    assert replayer.stdout is not None
    url = f"http://127.0.0.1:{int(replayer.stdout.readline())}"
    load = Load(
        url=url,
        phases=(Phase(PEAK, float("inf")),),
        concurrency=connections,
        requests=connections,
        output=LengthRange(1, 1),
        prompt=LengthRange(8, 8),
    )
    with client_processes(load, 1) as clients:
        [client] = [one for one in psutil.Process().children() if one.pid != replayer.pid]
        client.cpu_affinity(cores[:1])
        time.sleep(1.0)
        spans = []
        for _ in range(2):
            used = client.cpu_times()
            spans.append((time.monotonic(), used.user + used.system))
            time.sleep(seconds - 2.0 if len(spans) == 1 else 0.0)
        clients.wait(lambda: None)
        replayer.wait()
    (begin_s, cpu_before), (end_s, cpu_after) = spans
    times, _ = token_times(clients.answers)
    within = times[(times >= begin_s) & (times < end_s)]
    events = len(within)
    return {
        "events_per_s": events / (end_s - begin_s),
        "events_per_read": events / len(np.unique(within)),
        "cpu_us_per_event": 1e6 * (cpu_after - cpu_before) / events,
        "events_per_s_of_a_core": events / (cpu_after - cpu_before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[40_000.0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="for every round, as JSON")
    parser.add_argument("--replay", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        replay(arguments.connections, arguments.rate[0], arguments.seconds)
        return
    found = {
        "date": today(), "commit": commit(), "machine": describe_machine(), "load_average": os.getloadavg()[0],
        "connections": arguments.connections,
    }  # fmt: skip
    print(json.dumps(found))
    rounds = []
    for rate in arguments.rounds * arguments.rate:
        measured = measure(arguments.connections, rate, arguments.seconds)
        rounds.append({"rate": rate, **{name: round(value, 2) for name, value in measured.items()}})
        print(json.dumps(rounds[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({**found, "rounds": rounds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
