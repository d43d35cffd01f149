"""What a user meets first: `holdfast serve` with nothing named, asked by real clients, through a real proxy."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(module_server):
    return module_server("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2048").wait_ready()


def test_the_first_answer(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list()
    answer = client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    stopped = client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, stop=[" is Par"])
    assert stopped.choices[0].message.content == "The capital of France"


def test_tokens_stream_through_nginx_as_they_come(server, proxy) -> None:
    url = proxy(server.port)
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 100, "ignore_eos": True, "stream": True}
    arrivals_s: list[float] = []
    begun_s = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                arrivals_s.append(time.monotonic())
    assert len(arrivals_s) >= 100
    # Gathered by a proxy, all would arrive at the end, or a buffer of them at a time; as they come, the first tenth is
    # there in the first half of the time, and most at moments of their own.
    taken_s = arrivals_s[-1] - begun_s
    shown = [round(when - begun_s, 3) for when in arrivals_s[::10]]
    assert arrivals_s[len(arrivals_s) // 10] - begun_s < 0.5 * taken_s, shown
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(arrivals_s)]
    assert sum(gap > 0.1 * taken_s / len(gaps_s) for gap in gaps_s) > len(gaps_s) // 2, shown


def test_chat_in_the_terminal(server) -> None:
    command = [sys.executable, "-m", "holdfast", "chat", "--url", server.url, "--temperature", "0"]
    said = subprocess.run(
        command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    assert "The capital of France is Paris." in said.stdout


async def test_sigterm_under_load_on_the_real_model(start_server) -> None:
    server = start_server("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2048").wait_ready()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
        running = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(6)]
        while server.metric("vllm:num_requests_running") < 6:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*running)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [24] * 6
    assert server.process.wait(60) == 0
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert sum(line["completion_tokens"] == 24 for line in lines) == 6
