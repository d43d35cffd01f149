"""`holdfast bench` against real servers of one GGUF file on this machine, llama.cpp's own and ours, in turns:

    python -m benchmarks.bench_servers FOLDER MODEL.gguf [--turns 2] [--peak 30] [--at-once 4] [--out FILE.json]

FOLDER has llama-server with its libraries. What is looked at is the client: that it knows each server by its metrics,
and that its counts agree with what was asked for and with what the servers count themselves. The rows of both servers
stand in the same file; `benchmarks/cpu_peers.py` and `benchmarks/llama_programs.py` compare their speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import commit, describe_machine, today

READY_S = 120.0
END_S = 60.0
JUDGED = (0, 1)
"""Exit codes of a bench that measured and wrote its file: pass and fail."""
LEFT_OUT = ("requests", "timeline", "samples", "itl_histogram")
"""Of a result: what is one entry a request or a second."""
COUNTED = {
    "llama.cpp": r"^llamacpp:tokens_predicted_total (\S+)",
    "holdfast": r"^vllm:generation_tokens_total(?:\{.*\})? (\S+)",
}
"""Tokens that a server says it has made since it started."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command_of(server: str, folder: Path, model: str, port: int, at_once: int) -> list[str]:
    """With one thread that computes: threads that wait for one another stand still beside other work on these cores."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if server == "llama.cpp":
        flags = ["-t", "1", "-np", str(at_once), "-c", str(2048 * at_once), "--metrics"]
        return [str(folder / "llama-server"), "-m", model, *flags, *where]
    flags = ["--device", "cpu", "--max-model-len", "2048", "--max-num-seqs", str(at_once), "--threads", "1"]
    return [sys.executable, "-m", "holdfast", "serve", model, *flags, *where, "--disable-access-log"]


def turn(server: str, options: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = command_of(server, options.folder, options.model, port, options.at_once)
    libraries = f"{options.folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"LD_LIBRARY_PATH": libraries})
        try:
            wait_until_ready(url, process)
            kept = Path(scratch) / "run.json"
            load = ["--concurrency", str(options.at_once), "--peak", f"{options.peak}s", "--up", "5s", "--down", "5s"]
            load += ["--prompt", str(options.prompt), "--output", str(options.output), "--save", str(kept), "--quiet"]
            before = counted(url, server)
            done = subprocess.run([sys.executable, "-m", "holdfast", "bench", url, *load], stdout=subprocess.DEVNULL)
            if done.returncode not in JUDGED:
                raise SystemExit(f"holdfast bench of {server} measured nothing: exit code {done.returncode}")
            after = counted(url, server)
        finally:
            end(process)
        found = json.loads(kept.read_text())
    asked = [options.output] * found["whole"]["completed"]
    return {
        "server": server,
        "exit_code": done.returncode,
        "output_tokens_asked": sum(asked),
        "output_tokens_by_the_server": None if before is None or after is None else after - before,
        "load_average": round(os.getloadavg()[0], 2),
        "result": {name: value for name, value in found.items() if name not in LEFT_OUT},
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it does with SIGTERM: a server that stays would compute beside the next one."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no server at {url}: {process.args!r}")


def counted(url: str, server: str) -> float | None:
    """With those of the two short requests before a run, which ask for one token each."""
    found = re.findall(COUNTED[server], httpx.get(f"{url}/metrics", timeout=30).text, re.MULTILINE)
    return sum(map(float, found)) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--peak", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--out", type=Path, help="for all of it, as JSON")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    document: dict[str, Any] = {"date": today(), "commit": commit(), "machine": describe_machine(), "turns": []}
    document["model"] = Path(options.model).name
    for number in range(options.turns):
        for server in ("llama.cpp", "holdfast"):
            found = turn(server, options)
            document["turns"].append(found)
            peak, verdict = found["result"]["peak"], found["result"]["verdict"]
            first = "none" if peak["ttft"] is None else f"{1e3 * peak['ttft']['p50']:.0f} ms"
            print(
                f"{number + 1} {server:<10} {peak['output_tokens_per_s']:>7.1f} tokens/s, {peak['completed']} answered,"
                f" {peak['failed']} failed, ttft p50 {first}, counted"
                f" {found['result']['whole']['output_tokens']} of {found['output_tokens_asked']} asked and"
                f" {found['output_tokens_by_the_server']} by the server; {verdict['reason']}",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
