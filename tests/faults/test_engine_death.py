"""The engine process dies, however it dies; nobody's answer changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from deadlines import PATIENCE_S
from standing_still import StandingStill, stopped

POISON = 31_337
STREAMS = 64
TOKENS = 30


def ask(place: int) -> dict[str, object]:
    """Half greedy, half sampled with seeds; prompts that share beginnings and some that do not."""
    return {
        "model": "tiny",
        "prompt": f"Story number {place % 16}: " + "once upon a time " * (1 + place % 5),
        "max_tokens": TOKENS + place // 4,
        "temperature": 0.0 if place % 2 else 0.9,
        "seed": place,
        # Ten tokens to draw from: few draws fall so close to a border that the last bit of the KV cache decides.
        "extra_body": {"ignore_eos": True, "top_k": 10},
    }


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No engine process of the server starts while this file exists."""
    return tmp_path_factory.mktemp("switch") / "fail"


@pytest.fixture(scope="module")
def standing_still(tmp_path_factory: pytest.TempPathFactory) -> StandingStill:
    return StandingStill(tmp_path_factory.mktemp("standing-still"))


@pytest.fixture(scope="module")
def server(module_server, tiny_arguments, switch: Path, standing_still: StandingStill):
    """Of those tests here that leave it well."""
    faults = {"HOLDFAST_FAULT_DIE_ON_TOKEN": str(POISON), "HOLDFAST_FAULT_FAIL_LOADING": str(switch)}
    return module_server(*tiny_arguments, environment=faults | standing_still.environment).wait_ready()


Answer = tuple[str, str | None, int]


async def stream(client: openai.AsyncOpenAI, place: int) -> Answer:
    text, reason, tokens = "", None, 0
    asked = ask(place) | {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.completions.create(**asked):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason, tokens


async def all_streams(url: str) -> list[Answer]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(stream(client, place) for place in range(STREAMS)))


async def test_kill_9_under_64_streams_is_a_pause_to_their_clients(server, standing_still: StandingStill) -> None:
    """Greedy answers stay the same. Sampled ones go on with the same random numbers, over a KV cache that was computed
    anew and may differ in the last bits: with other numbers not one of them would stay the same."""
    undisturbed = await all_streams(server.url)
    assert [(reason, tokens) for _, reason, tokens in undisturbed] == [
        ("length", TOKENS + n // 4) for n in range(STREAMS)
    ]

    # In the middle of most answers; others perhaps still wait.
    standing_still.ask_for(STREAMS * TOKENS // 3)
    disturbed = asyncio.create_task(all_streams(server.url))
    victim = await stopped([psutil.Process(server.engine_pid)])
    await until_open(server, STREAMS // 2)  # Who has no whole answer now has none before it dies.
    victim.kill()
    answers = await disturbed
    assert answers[1::2] == undisturbed[1::2]  # Greedy.
    assert [answer[1:] for answer in answers] == [answer[1:] for answer in undisturbed]
    same = [answer == before for answer, before in zip(answers[::2], undisturbed[::2], strict=True)]
    assert sum(same) >= 0.75 * len(same)
    await next_engine(server, {victim.pid})
    assert "restarting it" in server.log
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:request_success_total") == 2 * STREAMS


async def test_health_tells_while_it_comes_back_and_requests_wait(server, standing_still: StandingStill) -> None:
    standing_still.ask_for(0)  # The next one is not ready before it has been seen that it is not.
    engine = psutil.Process(server.engine_pid)
    engine.kill()
    engine.wait()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        next_one = await stopped([psutil.Process(await next_engine(server, {engine.pid}))])
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        assert "the last sign of progress was" in health.json()["progress"]
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
        waiting = asyncio.create_task(client.post("/v1/completions", json=asked))
        await until_open(server, 1)
        next_one.resume()
        answer = await waiting
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (await client.get("/health")).status_code == 200


async def test_an_engine_that_cannot_live_is_given_up_and_the_server_ends(
    start_server, tiny_arguments, tmp_path: Path
) -> None:
    standing_still = StandingStill(tmp_path)
    server = start_server(*tiny_arguments, environment=standing_still.environment).wait_ready()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        long = {"model": "tiny", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
        standing_still.ask_for(0)
        waiting = asyncio.create_task(client.post("/v1/completions", json=long))
        killed: set[int] = set()
        # The first with the request aboard, the next where it would be ready, the others as soon as they are there:
        # none can answer anything.
        for place in range(5):
            engine = psutil.Process(await next_engine(server, killed))
            if place < 2:
                await stopped([engine])
            if place == 0:
                standing_still.ask_for(0)
            killed.add(engine.pid)
            engine.kill()
        answer = await waiting
        assert answer.status_code in (500, 503)
        assert "4 times in a row" in answer.json()["error"]["message"]
    assert server.process.wait(PATIENCE_S) == 1
    reason, said, end = server.log.partition("the engine failed permanently, shutting down")
    assert said
    assert "stopped: " not in reason
    assert "stopped: 0 requests answered, 1 failed" in end.splitlines()[-1]


async def ask_ids(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


async def test_a_poison_request_is_found_and_nobody_else_notices(server) -> None:
    starts = server.log.count("restarting it")
    # Three engines are started while it waits.
    async with httpx.AsyncClient(base_url=server.url, timeout=4 * PATIENCE_S) as client:
        innocents = [[place, 5, 6] for place in range(100, 103)]
        undisturbed = await asyncio.gather(*(ask_ids(client, prompt, 400) for prompt in innocents))
        assert [answer.json()["usage"]["completion_tokens"] for answer in undisturbed] == [400] * 3

        before = server.metric("vllm:generation_tokens_total")
        aboard = [asyncio.create_task(ask_ids(client, prompt, 400)) for prompt in innocents]
        async with asyncio.timeout(PATIENCE_S):
            while server.metric("vllm:generation_tokens_total") < before + 3:
                await asyncio.sleep(0.005)
        poisoned = await ask_ids(client, [5, POISON, 7], 10)
        assert poisoned.status_code in (500, 503)
        assert "HF410" in poisoned.text
        assert "on this request repeatedly" in poisoned.json()["error"]["message"]
        answers = await asyncio.gather(*aboard)
        assert [answer.json()["choices"] for answer in answers] == [one.json()["choices"] for one in undisturbed]
        assert (await client.get("/health")).status_code == 200
    assert server.log.count("restarting it") == starts + 3


async def test_a_start_that_fails_for_a_moment_is_tried_again(server, switch: Path) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        switch.touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        waiting = asyncio.create_task(ask_ids(client, [1, 2, 3], 5))
        async with asyncio.timeout(PATIENCE_S):
            while "this start fails on purpose" not in server.log:
                await asyncio.sleep(0.01)
        switch.unlink()
        answer = await waiting
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert server.stop() == 0  # In order, after all that has happened to it.


async def until_open(server, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.open_requests() < count:
            await asyncio.sleep(0.05)


async def next_engine(server, before: set[int]) -> int:
    """As soon as there is a new one, which has hardly begun to load."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(AssertionError, psutil.Error):
                if (pid := server.engine_pid) not in before:
                    return pid
            await asyncio.sleep(0.03)
