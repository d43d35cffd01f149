"""What a user meets first: `holdfast serve` with nothing named, asked by real clients, through a real proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from deadlines import PATIENCE_S

from holdfast.cli.main import main

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "holdfast.toml"
    path.write_text('max_model_len = 2048\nkv_cache_memory_bytes = "128MiB"\n')
    return path


@pytest.fixture(scope="module")
def server(module_server, config):
    return module_server("--config", str(config), "--drain-timeout", str(PATIENCE_S), forked=False).wait_ready()


def test_the_start_fits_on_a_screen(server) -> None:
    start, ready, _ = server.log.partition("(try: curl")
    assert ready
    lines = [line for line in start.splitlines() if not line.startswith("{")]
    assert sum(-(-len(line) // 100) for line in lines) <= 24, start


def test_the_first_answer(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list()
    answer = client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    stopped = client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, stop=[" is Par"])
    assert stopped.choices[0].message.content == "The capital of France"


def test_it_is_benchmarked(server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--requests", "4", "--concurrency", "2", "--prompt", "60", "--output", "8", "--json", "--quiet")
    main(["bench", server.url, *words])  # Whether it passes is up to the machine.
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "holdfast"
    assert (found["peak"]["completed"], found["peak"]["failed"]) == (4, 0)
    assert found["requests"]["output_tokens"] == [8] * 4
    assert found["requests"]["prompt_tokens"] == pytest.approx([60] * 4, abs=6)
    assert found["peak"]["itl"]["count"] == 4 * 7
    assert found["samples"][-1]["ram_bytes"] > 1 << 28
    assert found["samples"][-1]["kv_touched_bytes"] > 0


def test_tokens_stream_through_nginx_as_they_come(server, proxy) -> None:
    """Whenever the engine stands still, what it has made so far is through: nobody keeps it until a buffer is full."""
    url = proxy(server.port)
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    before = server.metric("vllm:generation_tokens_total")
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE_S) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        told = (event["usage"]["completion_tokens"] for event in events if event["usage"] is not None)
        for _ in range(5):
            seen = next(told)
            with server.engine_held():
                made = server.metric("vllm:generation_tokens_total") - before
                while seen < made:
                    seen = next(told)
        assert 0 < seen < 1000


def test_chat_in_the_terminal(server) -> None:
    command = [sys.executable, "-m", "holdfast", "chat", "--url", server.url, "--temperature", "0"]
    said = subprocess.run(
        command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert said.returncode == 0, said.stderr
    assert "The capital of France is Paris." in said.stdout


def test_sigusr1_reads_the_config_again(server, config) -> None:
    """What can be changed while serving is, and the rest is said; a file that is wrong changes nothing."""

    def after_signal(line: str) -> None:
        server.process.send_signal(signal.SIGUSR1)
        deadline_s = time.monotonic() + PATIENCE_S
        while line not in server.log and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert line in server.log

    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGUSR1)  # As a signal to the whole unit does.
    after_signal("nothing has changed")
    assert "the engine process exited" not in server.log
    before = config.read_text()
    config.write_text(before + 'ram = "1500MiB"\nmax_queued_requests = 77\n')
    after_signal("memory budget changed to 1.46 GiB: KV pool")
    assert "only a restart takes it over: --max-queued-requests" in server.log
    assert httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["tiers"][0]["budget_bytes"] == 1500 << 20
    # What a client has set since is not what the file says.
    changed = httpx.post(f"{server.url}/memory", json={"ram": "1400MiB"}, timeout=PATIENCE_S)
    assert changed.json()["tiers"][0]["budget_bytes"] == 1400 << 20
    (pool,) = (line for line in changed.json()["decisions"] if line.startswith("kv_pool = "))
    assert re.search(r"; steps stood still for \d+ ms$", pool)
    assert server.metric("holdfast:kv_pool_resizes_total") >= 2
    told = server.log.count("memory budget changed to 1.46 GiB: KV pool")
    server.process.send_signal(signal.SIGUSR1)
    deadline_s = time.monotonic() + PATIENCE_S
    while server.log.count("memory budget changed to 1.46 GiB: KV pool") == told and time.monotonic() < deadline_s:
        time.sleep(0.05)
    config.write_text(before + 'ram = "200MiB"\n')
    after_signal("the memory budget stays as it is: the model does not fit in memory")
    config.write_text("max_model_len = [")
    after_signal("the settings could not be read again")
    assert httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()["tiers"][0]["budget_bytes"] == 1500 << 20


async def test_sigterm_in_the_middle_of_answers_of_the_real_model(server) -> None:
    """The last one here: it ends the server of all the others."""
    begun, told = asyncio.Semaphore(0), asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> int:
        asked = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            begun.release()
            await told.wait()
            events = [line async for line in lines if line]
        assert events[-1] == "data: [DONE]"
        return int(json.loads(events[-2][6:])["usage"]["completion_tokens"])

    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        running = [asyncio.create_task(ask(client)) for _ in range(6)]
        for _ in running:
            await begun.acquire()
        with server.engine_held():
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                while "SIGTERM: running requests: " not in server.log:
                    await asyncio.sleep(0.01)
        told.set()
        assert await asyncio.gather(*running) == [24] * 6
    assert server.process.wait(PATIENCE_S) == 0
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert [line["completion_tokens"] for line in lines if line["path"] == "/v1/completions"] == [24] * 6
