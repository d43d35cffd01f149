"""How fast the doctor reads a log, and in how much memory: kinds of logs that servers really write, made here.

    python -m benchmarks.doctor_logs --mb 200 --save

Each log is read in a process of its own; MB/s are of its processor time (user and system), so a busy machine does not
change them. Knows nothing of what the doctor finds, but that it finds the failure at the end of each.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.machine import commit, describe_machine, machine_slug, today

TEXT = (
    "the a of to and in is that it for was on are with as be at by this have from or had not but what all were when "
    "can there use an each which she do how their if will up other about out many then them these so some her would "
    "make like him into time has look two more write go see number no way could people my than first water been call "
    "who oil its now find long down day did get come made may part memory cache model request error file trace server "
    "token batch failed available loading worker process cuda allocate timeout value device engine size length"
)
START = (
    "INFO 10-01 09:59:01 [api_server.py:1839] vLLM API server version 0.11.0\n"
    "INFO 10-01 09:59:02 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 8192}\n"
    "INFO 10-01 09:59:40 [gpu_model_runner.py:2602] Starting to load model Qwen/Qwen3-8B...\n"
    "INFO:     Application startup complete.\n"
)
FRAME = 'ERROR 10-01 {clock} [core.py:710]   File "/usr/lib/python3.12/vllm/v1/{file}", line {at}, in {name}\n'
END = (
    "ERROR 10-01 12:00:00 [core.py:710] Traceback (most recent call last):\n"
    + FRAME.format(clock="12:00:00", file="engine/core/loop.py", at=712, name="run_busy_loop")
    + "ERROR 10-01 12:00:00 [core.py:710] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU "
    "0 has a total capacity of 79.10 GiB of which 0.31 GiB is free. Process 4242 has 78.70 GiB memory in use. Of the "
    "allocated memory 77.10 GiB is allocated by PyTorch, and 0.60 GiB is reserved by PyTorch but unallocated.\n"
)
LAST = datetime(2025, 10, 1, 12, 0, 0, tzinfo=UTC)


class Chance:
    """Words and ids, different in each line and the same in each run."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self._at = 0
        self._text = " ".join(self.random.choices(TEXT.split(), k=400_000))
        letters = b"abcdefghijklmnopqrstuvwxyz012345" * 8
        self._ids = self.random.randbytes(2_000_000).translate(letters).decode()

    def words(self, count: int) -> str:
        """About that many, of English and of what engines say."""
        self._at = (self._at + 7919 * 5) % (len(self._text) - count * 6)
        return self._text[self._at : self._at + count * 5]

    def id(self, length: int) -> str:
        self._at = (self._at + 104_729) % (len(self._ids) - length)
        return self._ids[self._at : self._at + length]


def requests(chance: Chance, at: int) -> str:
    if at % 3 == 0:
        return access(chance, at)
    return (
        f"(APIServer pid=1) INFO 10-01 10:00:{at % 60:02d} [logger.py:41] Received request chatcmpl-{chance.id(32)}: "
        f"prompt: '{chance.words(60)}', params: SamplingParams(n=1, temperature=0.7), lora_request: None.\n"
    )


def access(_: Chance, at: int) -> str:
    return f'(APIServer pid=1) INFO:     10.0.0.{at % 250}:{at % 60000} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


def structured(chance: Chance, at: int) -> str:
    return (
        f"2025-05-05T10:00:{at % 60:02d}Z INFO  request_id={chance.id(9)}q-{chance.id(8)}k tenant=t{chance.id(7)}z "
        "path=/v1/chat/completions status=200\n"
    )


def sglang(chance: Chance, at: int) -> str:
    rid, text, clock = chance.id(32), chance.words(40), f"[2025-05-05 10:00:{at % 60:02d}]"
    if at % 2:
        return f"{clock} Receive: obj=GenerateReqInput(rid='{rid}', text='{text}', stream=False)\n"
    return f"{clock} Finish: obj=GenerateReqInput(rid='{rid}'), out={{'text': '{text}'}}\n"


def debug(chance: Chance, at: int) -> str:
    words = f"{chance.id(8)}g {chance.words(6)}"
    return f"DEBUG 10-01 10:00:{at % 60:02d} [core.py:{at % 999}] File read {words} error count {at % 7}\n"


def tracebacks(chance: Chance, at: int) -> str:
    """Of a client's mistake, over and over."""
    clock = f"10:{at // 60 % 60:02d}:{at % 60:02d}"
    frames = (
        ("entrypoints/openai/serving_chat.py", "create_chat_completion"),
        ("engine/processor.py", "process_inputs"),
    )
    return (
        f"ERROR 10-01 {clock} [serving_chat.py:190] Error in preprocessing prompt inputs of chatcmpl-{chance.id(32)}\n"
        f"ERROR 10-01 {clock} [serving_chat.py:190] Traceback (most recent call last):\n"
        + "".join(FRAME.format(clock=clock, file=file, at=at % 997, name=name) for file, name in frames)
        + f"ERROR 10-01 {clock} [serving_chat.py:190] KeyError: 'user-{chance.id(12)}'\n"
    )


def json_lines(chance: Chance, at: int) -> str:
    line = {"ts": f"2025-05-05T10:00:{at % 60:02d}Z", "level": "INFO", "id": chance.id(16), "message": chance.words(20)}
    return json.dumps(line) + "\n"


def progress(_: Chance, at: int) -> str:
    bars = (
        f"\rLoading safetensors checkpoint shards:  {step:2d}% Completed | {step}/100 "
        f"[00:{step % 60:02d}<01:{at % 60:02d}, 1.{at % 97:02d}s/it]"
        for step in range(100)
    )
    return "".join(bars) + "\n"


def statistics(_: Chance, at: int) -> str:
    return (
        f"(APIServer pid=1) INFO 10-01 10:00:{at % 60:02d} [loggers.py:127] Engine 000: Avg prompt throughput: "
        f"{at % 997}.2 tokens/s, Avg generation throughput: {900 + at % 97}.4 tokens/s, Running: {at % 60} reqs, "
        f"Waiting: {at % 5} reqs, GPU KV cache usage: {at % 90}.3%, Prefix cache hit rate: {at % 70}.0%\n"
    )


def ordinary(chance: Chance, at: int) -> str:
    if at % 50 == 0:
        return statistics(chance, at)
    return requests(chance, at) if at % 5 == 0 else access(chance, at)


def falling(chance: Chance, at: int) -> str:
    """As `journalctl -r` prints it: fifty lines a second, the newest first."""
    return f"{LAST - timedelta(seconds=at // 50):%b %d %H:%M:%S} gpu01 vllm[88]: {ordinary(chance, at)}"


def endless(chance: Chance, at: int) -> str:
    return chance.words(2000)


KINDS: dict[str, Callable[[Chance, int], str]] = {
    "vLLM request lines, different prompts": requests,
    "structured lines, ids in words": structured,
    "SGLang --log-requests": sglang,
    "debug lines with 'error' and 'File '": debug,
    "tracebacks over and over": tracebacks,
    "JSON lines": json_lines,
    "progress bars": progress,
    "one line": endless,
    "ordinary: access, prompts, figures": ordinary,
    "newest line first: the same": falling,
}
READ = """
import json, resource, sys
from holdfast.doctor import diagnose
began = resource.getrusage(resource.RUSAGE_SELF)
found = diagnose([sys.argv[1]])
ended = resource.getrusage(resource.RUSAGE_SELF)
cause = found.findings[0].cause if found.findings else "none"
cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
print(json.dumps({"cpu_s": cpu_s, "peak_rss_mb": ended.ru_maxrss * 1024 / 1e6, "cause": cause}))
"""


def written(make: Callable[[Chance, int], str], size_bytes: int) -> Iterator[str]:
    """A start that went well, the log, and a death while serving; where lines fall, from their end."""
    chance, at, made = Chance(), 0, 0
    begin, end = (_turned(END), _turned(START)) if make is falling else (START, "\n" + END)
    yield begin
    while made < size_bytes:
        piece = "".join(make(chance, at + step) for step in range(100))
        at, made = at + 100, made + len(piece)
        yield piece
    yield end


def _turned(text: str) -> str:
    return "".join(reversed(text.splitlines(keepends=True)))


def measure(kind: str, megabytes: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as file:
            file.writelines(written(KINDS[kind], megabytes * 1_000_000))
        size_mb = log.stat().st_size / 1e6
        done = subprocess.run([sys.executable, "-c", READ, str(log)], capture_output=True, text=True, check=True)
    result: dict[str, float | str] = json.loads(done.stdout)
    return {"mb": round(size_mb, 1), **result, "mb_per_cpu_s": round(size_mb / float(result["cpu_s"]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="megabytes of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="the first letters of some")
    parser.add_argument("--save", action="store_true", help="into benchmarks/results")
    asked = parser.parse_args()
    chosen = [kind for kind in KINDS if any(kind.startswith(one) for one in asked.kinds)]
    results = {}
    for kind in chosen:
        results[kind] = measure(kind, asked.mb)
        row = results[kind]
        print(
            f"{kind:40} {row['mb']:>8} MB {row['mb_per_cpu_s']:>8} MB/s {row['peak_rss_mb']:>8.1f} MB  {row['cause']}",
            flush=True,
        )
    if asked.save:
        machine = describe_machine()
        document = {"date": today(), "commit": commit(), "machine": machine, "kinds": results}
        name = f"{today()}-{machine_slug(machine)}-doctor-{asked.mb}mb.json"
        (Path(__file__).parent / "results" / name).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
