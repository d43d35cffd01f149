"""How fast the HTTP front is by itself: one event a token, an engine that has every token at once, wrk as the client.

    python benchmarks/front.py [--connections 64] [--seconds 10] [--rounds 3] [--vllm PEER/bin/python]
        [--llama-server BINARY] [--out FILE.json]

The front has one core, wrk another. Events are counted by wrk's script, one by one; a client of our own looks into the
chunks on the wire, that none holds two. Needs wrk (Debian: apt-get install wrk) and two cores. What is kept with --out
is of a commit that can be had, and of a process that had no rank above others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, describe_machine, today

HERE = Path(__file__).resolve().parent
WANTED_TOKENS_PER_S, WANTED_FIRST_TOKEN_MS = 15_000, 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TOKENS = 128
START_LIMIT_S = 300.0
_HAS_TEXT = re.compile(rb'"content":"[^"]')


def question(tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], core: int) -> Iterator[tuple[int, int]]:
    """Its process and its port, which is put where PORT stands."""
    port = free_port()
    words = ["taskset", "-c", str(core), *(str(port) if word == "PORT" else word for word in command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it did not start: {' '.join(words)}")
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def write_model(folder: Path) -> None:
    """A model's settings and the built-in model's tokenizer, for a front that asks for them."""
    from holdfast.checkpoints import locate
    from holdfast.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_files(locate("smollm2", revision=None))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **tokenizer.special_tokens_map}))
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))


def cpu_seconds(pid: int) -> tuple[float, float]:
    """In the program, and in the system for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S


def drive(port: int, pid: int, core: int, connections: int, seconds: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    command = ["taskset", "-c", str(core), "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s"]
    command += ["-s", str(HERE / "front_post.lua"), url, "--", json.dumps(question())]
    user_before, system_before = cpu_seconds(pid)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took_s = time.perf_counter() - began
    user, system = (
        after - before for after, before in zip(cpu_seconds(pid), (user_before, system_before), strict=True)
    )
    counted = next(line for line in done.stdout.splitlines() if line.startswith("COUNTED"))
    answers, refused, events, duration_us, read_bytes = map(int, counted.split()[1:])
    if refused or events != answers * TOKENS:
        raise RuntimeError(
            f"{refused} of {answers} refused, {events} events for {answers * TOKENS} tokens:\n{done.stdout}"
        )
    # What was under way when wrk stopped was computed too, and is in the bytes alone.
    tokens = TOKENS * read_bytes / answer_bytes(port)
    return {
        "tokens_per_s": events / (duration_us / 1e6),
        "answers": answers,
        "events": events,
        "cpu_us_per_token": 1e6 * (user + system) / tokens,
        "system_us_per_token": 1e6 * system / tokens,
        "core_share": (user + system) / took_s,
    }


class Asker:
    """A client of one connection that sees what comes when, and in which chunk."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def ask(self, tokens: int = TOKENS) -> tuple[list[bytes], float, int]:
        """The chunks, the seconds to the first that has a token, and the bytes of all."""
        body = json.dumps(question(tokens)).encode()
        kind = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        head = b"POST /v1/chat/completions HTTP/1.1\r\n" + kind
        began = time.perf_counter()
        self._socket.sendall(head + body)
        first_s, read_bytes = 0.0, 0
        while (line := self._file.readline()) != b"\r\n":
            if not line:  # llama-server closes a connection after 100 answers.
                self._connect()
                return self.ask(tokens)
            read_bytes += len(line)
        chunks: list[bytes] = []
        while True:
            size_line = self._file.readline()
            chunk = self._file.read(int(size_line, 16) + 2)
            read_bytes += len(size_line) + len(chunk)
            if chunk == b"\r\n":
                return chunks, first_s, read_bytes + 2
            chunks.append(chunk[:-2])
            if not first_s and _HAS_TEXT.search(chunk):
                first_s = time.perf_counter() - began


def answer_bytes(port: int) -> int:
    return Asker(port).ask()[2]


def alone_in_their_chunks(port: int) -> int:
    """How many of the tokens of an answer came as one event in a chunk of its own."""
    chunks = Asker(port).ask()[0]
    return sum(chunk.count(b"data: ") == 1 and _of_a_token(chunk) for chunk in chunks)


def _of_a_token(event: bytes) -> bool:
    """As wrk's script counts them."""
    return b'"finish_reason"' in event and b'"role"' not in event and b'"delta":{}' not in event


def first_tokens_ms(port: int, count: int = 400) -> list[float]:
    asker = Asker(port)
    for _ in range(20):
        asker.ask(2)
    return sorted(1e3 * asker.ask(2)[1] for _ in range(count))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    front_core, client_core = sorted(os.sched_getaffinity(0))[:2]
    commands = {"holdfast": [sys.executable, str(HERE / "front_server.py"), "PORT"]}
    if arguments.vllm is not None:
        write_model(folder)
        commands["vllm"] = [arguments.vllm, str(HERE / "front_vllm.py"), "PORT", str(folder)]
    if arguments.llama_server is not None:
        from benchmarks.front_llama import command

        commands["llama-server"] = command(arguments.llama_server, folder, arguments.connections)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    fronts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(running(command, front_core)) for name, command in commands.items()}
        os.sched_setaffinity(0, {client_core})
        for pid, port in started.values():
            drive(port, pid, client_core, arguments.connections, 1)
        for _ in range(arguments.rounds):  # In turns: what else the machine does meets them alike.
            for name, (pid, port) in started.items():
                rounds[name].append(drive(port, pid, client_core, arguments.connections, arguments.seconds))
        for name, (_, port) in started.items():
            first_ms = first_tokens_ms(port)
            fronts[name] = {
                "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds[name]),
                "cpu_us_per_token": statistics.median(one["cpu_us_per_token"] for one in rounds[name]),
                "first_token_ms": {"median": statistics.median(first_ms), "p99": first_ms[len(first_ms) * 99 // 100]},
                "events_in_chunks_of_their_own": alone_in_their_chunks(port), "rounds": rounds[name],
            }  # fmt: skip
    return {
        "date": today(),
        "commit": commit(),
        "niceness": os.nice(0),
        "load": os.getloadavg(),
        "machine": describe_machine(),
        "connections": arguments.connections,
        "tokens_an_answer": TOKENS,
        "fronts": fronts,
    }


def tell(name: str, front: dict[str, Any]) -> None:
    print(name)
    for one in front["rounds"]:
        print(
            f"{one['tokens_per_s']:9,.0f} tokens/s in {one['events']:,.0f} events of {one['answers']:,.0f} answers; "
            f"{one['cpu_us_per_token']:.1f} us of CPU a token ({one['system_us_per_token']:.1f} in the system), "
            f"{one['core_share']:.0%} of its core"
        )
    first = front["first_token_ms"]
    print(f"{front['tokens_per_s']:9,.0f} tokens/s: the median")
    print(f"{first['median']:9.2f} ms to the first token, alone ({first['p99']:.2f} at the 99th)")
    print(f"{front['events_in_chunks_of_their_own']:9,d} of {TOKENS} tokens came in as many chunks, one event each")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON", help="also vLLM's front: the Python of its environment")
    parser.add_argument("--llama-server", metavar="BINARY", help="also llama-server's front, with the smallest model")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if shutil.which("wrk") is None or len(os.sched_getaffinity(0)) < 2:
        print("benchmarks/front.py needs wrk (apt-get install wrk) and two cores", file=sys.stderr)
        return 2
    if arguments.out is not None and (commit().endswith("-dirty") or os.nice(0)):
        print("--out needs a clean commit and no niceness: else nobody can see the same again", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    for name, front in found["fronts"].items():
        tell(name, front)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    ours = found["fronts"]["holdfast"]
    enough = ours["tokens_per_s"] >= WANTED_TOKENS_PER_S and ours["first_token_ms"]["median"] < WANTED_FIRST_TOKEN_MS
    enough = enough and ours["events_in_chunks_of_their_own"] == TOKENS
    print(
        f"wanted: {WANTED_TOKENS_PER_S:,} tokens/s and under {WANTED_FIRST_TOKEN_MS:g} ms: {'yes' if enough else 'no'}"
    )
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
