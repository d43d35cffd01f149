"""`holdfast run-batch` as it is used: killed at moments nobody chose and taken up again; the real model's answers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.engine.process.fault_injection import HANG_ON_TOKEN

pytestmark = pytest.mark.usefixtures("forked_starts")

FLAGS = ["--kv-cache-memory-bytes", "128MiB", "--max-model-len", "1024", "--max-num-seqs", "8", "--runner", "pooling"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TIMEOUT_S = 120
HANGS = 31_999
"""A token at which the engine hangs, where the environment says so."""


def line(number: int, **options: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": f"Chapter {number}.", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": {**body, **options}}


def command(folder: Path, *more: str, model: list[str] | None = None) -> list[str]:
    words = ["run-batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--model"]
    return [sys.executable, "-m", "holdfast", *words, *(model or ["smollm2", *FLAGS]), *more]


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in (folder / "out.jsonl").read_text().splitlines()]


def vectors(body: dict[str, Any]) -> list[list[float]]:
    """Taken out of an answer, if there are."""
    return [array("f", b64decode(one.pop("embedding"))).tolist() for one in body.get("data", [])]


def run(folder: Path, *more: str, model: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more, model=model), capture_output=True, text=True, timeout=TIMEOUT_S)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    """Without a word, and until its engine has noticed that nobody is there."""
    engines = children(process.pid)
    process.kill()
    process.communicate()
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{engine}").exists() for engine in engines):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_killed_and_taken_up_again_no_line_is_lost_or_repeated(tmp_path: Path, tiny_arguments: list[str]) -> None:
    lines = 100
    last = line(lines - 1, model="tiny", prompt=[HANGS])  # Not answered before the kill comes, however late that is.
    write(tmp_path, [*(line(number, model="tiny") for number in range(lines - 1)), last])
    model = [*tiny_arguments, "--max-num-seqs", "8"]
    environment = {**os.environ, HANG_ON_TOKEN: str(HANGS)}
    process = subprocess.Popen(command(tmp_path, model=model), stderr=subprocess.PIPE, text=True, env=environment)
    until_lines(process, tmp_path / "out.jsonl", 2)
    kill(process)
    before = answers(tmp_path)
    assert 2 <= len(before) < lines
    # A kill may also fall into the middle of a line.
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"id":"batch_req_16_0123')
    done = run(tmp_path, model=model)
    assert done.returncode == 0, done.stderr
    assert f"{lines} of {lines} lines answered" in done.stderr
    after = answers(tmp_path)
    assert after[: len(before)] == before
    assert sorted(one["custom_id"] for one in after) == sorted(f"line-{number}" for number in range(lines))
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 12 for one in after)
    again = run(tmp_path, model=model)
    assert (again.returncode, answers(tmp_path)) == (0, after)
    assert "nothing left to do" in again.stderr


@pytest.mark.long
def test_killed_and_stopped_many_times(tmp_path: Path, tiny_arguments: list[str]) -> None:
    lines = 3000
    write(tmp_path, [line(number, model="tiny", max_tokens=4) for number in range(lines)])
    chance = random.Random(6)
    begun = command(tmp_path, model=tiny_arguments)
    before: list[dict[str, Any]] = []
    for _ in range(12):
        process = subprocess.Popen(begun, stderr=subprocess.PIPE, text=True)
        until_lines(process, tmp_path / "out.jsonl", min(len(before) + chance.randrange(1, 150), lines - 1))
        if chance.random() < 0.5:
            kill(process)
        else:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=TIMEOUT_S)[1]
            assert process.returncode == 143, said
            assert "the same command resumes" in said
        whole = (tmp_path / "out.jsonl").read_bytes().rpartition(b"\n")[0]
        now = [json.loads(one) for one in whole.splitlines()]
        assert now[: len(before)] == before
        before = now
    done = subprocess.run(begun, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert sorted(one["custom_id"] for one in answers(tmp_path)) == sorted(f"line-{n}" for n in range(lines))


NAMED = ("--served-model-name", "smollm2")
"""Without it any name is answered."""


def test_answers_are_the_servers(tmp_path: Path, start_server) -> None:
    import httpx

    lines = [
        line(1),
        line(2, logprobs=2, n=2, seed=5, temperature=1.0),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "smollm2", "messages": QUESTION, "temperature": 0}},
        {"custom_id": "vectors", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": "smollm2", "input": ["The sea is blue.", "Two"], "encoding_format": "base64"}},
        {"custom_id": "ranks", "method": "POST", "url": "/v1/rerank",
         "body": {"model": "smollm2", "query": "The sea", "documents": ["Two", "The sea is blue."]}},
        {"custom_id": "json", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 40, "response_format": {
             "type": "json_schema", "json_schema": {"name": "city", "schema": {
                 "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
                 "additionalProperties": False}}}}},
        line(3, prompt="x " * 5000),
        line(4, model="another"),
    ]  # fmt: skip
    write(tmp_path, lines)
    # A key that the environment sets for servers is not asked of ourselves.
    environment = {**os.environ, "HOLDFAST_API_KEY": "secret"}
    done = subprocess.run(
        command(tmp_path, "--max-concurrency", "1", *NAMED),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    server = start_server("smollm2", *FLAGS, *NAMED).wait_ready()
    found = {one["custom_id"]: one for one in answers(tmp_path)}
    for asked in lines:
        reply = httpx.post(server.url + asked["url"], json=asked["body"], timeout=TIMEOUT_S)
        mine = found[asked["custom_id"]]["response"]
        assert mine["status_code"] == reply.status_code
        theirs = reply.json()
        for body in (mine["body"], theirs):
            body.pop("id", None)
            body.pop("created", None)
        for one, other in zip(vectors(mine["body"]), vectors(theirs), strict=True):
            # Texts that were computed with others, or in other pieces, are rounded otherwise.
            assert one == pytest.approx(other, abs=1e-5)
        assert mine["body"] == theirs
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "The capital of France is Paris."
    city = json.loads(found["json"]["response"]["body"]["choices"][0]["message"]["content"])
    assert city["city"] in ("Paris", "Rome")
    assert len(found["vectors"]["response"]["body"]["data"]) == 2
    assert found["line-4"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-i", "https://example.org/in.jsonl"], "nothing is downloaded"),
        (["--enable-metrics"], "no port"),
        (["--port", "1"], "--port is not understood"),
        (["-i", "absent.jsonl"], "HF170"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    tmp_path: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [line(1)])
    assert main(command(tmp_path, *words)[3:]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_mistake_ends_the_process_with_its_code(tmp_path: Path) -> None:
    write(tmp_path, [line(1)])
    done = run(tmp_path, "--max-concurrency", "0")
    assert done.returncode == 2
    assert "--max-concurrency" in done.stderr
    assert "Traceback" not in done.stderr
