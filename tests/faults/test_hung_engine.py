"""The engine process stops answering without dying: it is noticed, ended and started again; nobody's answer changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
from deadlines import PATIENCE_S
from ended_processes import still_running
from standing_still import StandingStill, stopped

POISON = 31_337
STREAMS = 6
LIMIT_S = 8.0
LONG = 200


@pytest.fixture(scope="module")
def standing_still(tmp_path_factory: pytest.TempPathFactory) -> StandingStill:
    return StandingStill(tmp_path_factory.mktemp("standing-still"))


@pytest.fixture(scope="module")
def server(module_server, tiny_arguments, standing_still: StandingStill):
    """Of those tests here that leave it well."""
    faults = {"HOLDFAST_FAULT_HANG_ON_TOKEN": str(POISON), **standing_still.environment}
    arguments = [*tiny_arguments, "--engine-hang-timeout", str(LIMIT_S), "--enable-sleep-mode"]
    return module_server(*arguments, environment=faults).wait_ready()


@pytest.fixture
async def client(server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as made:
        yield made


async def ask(client: httpx.AsyncClient, prompt: list[int], tokens: int = LONG) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


async def stream(client: httpx.AsyncClient, place: int, begun: asyncio.Semaphore | None = None) -> str:
    """All that was sent but its ids and times."""
    body = {
        "model": "tiny",
        "prompt": [place, 5, 6],
        "max_tokens": LONG + place,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    told = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            told += line.partition('"choices":')[2] or line.partition("[DONE]")[1]
            if begun is not None:
                begun.release()
                begun = None
    return told


async def all_streams(client: httpx.AsyncClient, begun: asyncio.Semaphore | None = None) -> list[str]:
    return await asyncio.gather(*(stream(client, place, begun) for place in range(STREAMS)))


@pytest.fixture(scope="module")
def told_undisturbed(server) -> list[str]:
    """What the streams are told when nothing happens to their engine."""

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as made:
            return await all_streams(made)

    told = asyncio.run(ask_all())
    assert all(one.endswith("[DONE]") for one in told)
    return told


async def until_health(client: httpx.AsyncClient, status: str) -> httpx.Response:
    async with asyncio.timeout(PATIENCE_S):
        while (health := await client.get("/health")).json()["status"] != status:
            await asyncio.sleep(0.02)
    return health


async def test_a_stopped_engine_is_noticed_and_replaced_and_no_answer_changes(
    server, client, told_undisturbed, standing_still: StandingStill
) -> None:
    standing_still.ask_for(STREAMS * LONG // 4)
    disturbed = asyncio.create_task(all_streams(client))
    victim = await stopped([psutil.Process(server.engine_pid)])
    health = await until_health(client, "hung")
    assert victim.status() == psutil.STATUS_STOPPED  # It is said before it is acted upon.
    assert health.status_code == 503
    assert health.headers["Retry-After"]
    assert health.json()["code"] == "HF412"
    assert "has not responded for" in health.json()["reason"]
    assert server.metric("holdfast:engine_unresponsive") == 1
    newcomer = asyncio.create_task(ask(client, [77, 5, 6], 5))  # It waits, and is answered by the next engine.
    assert await disturbed == told_undisturbed
    assert (await newcomer).json()["usage"]["completion_tokens"] == 5
    assert server.engine_pid != victim.pid
    assert (await until_health(client, "ready")).status_code == 200
    page = (await client.get("/metrics")).text
    assert 'holdfast:engine_restarts_total{engine="0",model_name="tiny",reason="hung"} 1.0' in page
    assert 'holdfast:engine_restarts_total{engine="0",model_name="tiny",reason="died"} 0.0' in page
    server.wait_metric("holdfast:engine_unresponsive", lambda unresponsive: unresponsive == 0)
    assert "it was killed after not responding for 8 s" in server.log
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)


async def test_one_that_goes_on_in_time_is_left_alone(
    server, client, told_undisturbed, standing_still: StandingStill
) -> None:
    restarts = server.metric("holdfast:engine_restarts_total")
    standing_still.ask_for(STREAMS * LONG // 4)
    disturbed = asyncio.create_task(all_streams(client))
    pid = server.engine_pid
    engine = await stopped([psutil.Process(pid)])
    await until_health(client, "hung")
    engine.resume()
    assert await disturbed == told_undisturbed
    await until_health(client, "ready")
    assert server.engine_pid == pid
    assert server.metric("holdfast:engine_restarts_total") == restarts
    assert "the engine process is responding again" in server.log


@pytest.mark.long
async def test_a_request_that_hangs_the_engine_each_time_is_ended_alone(server, client) -> None:
    innocents = [[place, 5, 6] for place in range(100, 103)]
    undisturbed = await asyncio.gather(*(ask(client, prompt, 1500) for prompt in innocents))
    before = server.metric("vllm:generation_tokens_total")
    hangs = server.metric("holdfast:engine_restarts_total")
    aboard = [asyncio.create_task(ask(client, prompt, 1500)) for prompt in innocents]
    async with asyncio.timeout(PATIENCE_S):
        while server.metric("vllm:generation_tokens_total") < before + 3:
            await asyncio.sleep(0.005)
    poisoned = await ask(client, [5, POISON, 7], 10)
    assert poisoned.status_code == 503
    assert poisoned.json()["error"]["code"] == "engine_hung"
    assert poisoned.json()["error"]["holdfast"]["code"] == "HF412"
    assert "hung on this request repeatedly" in poisoned.json()["error"]["message"]
    answers = await asyncio.gather(*aboard)
    assert [answer.json()["choices"] for answer in answers] == [one.json()["choices"] for one in undisturbed]
    assert (await client.get("/health")).status_code == 200
    assert server.metric("holdfast:engine_restarts_total") == hangs + 3


async def test_a_machine_that_was_suspended_as_a_whole_blames_nobody(server, client) -> None:
    pid, hangs = server.engine_pid, server.metric("holdfast:engine_restarts_total")
    front, engine = psutil.Process(server.process.pid), psutil.Process(pid)
    engine.suspend()  # First, so that the answer does not end before.
    answer = asyncio.create_task(ask(client, [3, 5, 6], 20))
    async with asyncio.timeout(PATIENCE_S):
        while server.open_requests() == 0:
            await asyncio.sleep(0.005)
    front.suspend()
    await asyncio.sleep(LIMIT_S + 2)  # Longer than any engine may be silent.
    front.resume()  # And the engine a moment later.
    await asyncio.sleep(0.5)
    engine.resume()
    assert (await answer).json()["usage"]["completion_tokens"] == 20
    assert server.engine_pid == pid
    assert server.metric("holdfast:engine_restarts_total") == hangs


@pytest.mark.long
async def test_sleep_waits_for_what_a_hung_engine_held(server, client) -> None:
    undisturbed = await stream(client, 9)
    begun = asyncio.Semaphore(0)
    running = asyncio.create_task(stream(client, 9, begun))
    await begun.acquire()
    psutil.Process(server.engine_pid).suspend()
    asleep = await client.post("/sleep?mode=wait")
    assert asleep.json()["status"] == "sleeping"
    assert await running == undisturbed
    assert (await client.post("/wake_up")).status_code == 200
    assert (await ask(client, [3, 5, 6], 5)).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("known", [False, True])
async def test_a_hung_engine_can_be_put_to_sleep_at_once(server, client, known: bool) -> None:
    victim = psutil.Process(server.engine_pid)
    victim.suspend()
    if known:
        await until_health(client, "hung")
    assert (await client.post("/sleep")).json()["status"] == "sleeping"
    assert not victim.is_running()
    assert (await client.post("/wake_up")).status_code == 200
    assert (await until_health(client, "ready")).json() == {"status": "ready"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine-hang-timeout", "0"),
        # The drain ends first here too: the same path, with a monitor beside it.
        pytest.param(("--engine-hang-timeout", "5"), marks=pytest.mark.long),
    ],
)
async def test_a_drain_ends_though_the_engine_hangs(start_server, tiny_arguments, arguments) -> None:
    server = start_server(*tiny_arguments, *arguments, "--drain-timeout", "2").wait_ready()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        begun = asyncio.Semaphore(0)
        running = asyncio.create_task(stream(client, 1, begun))
        await begun.acquire()
        engine = psutil.Process(server.engine_pid)
        engine.suspend()
        os.kill(server.process.pid, signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):
            assert "DONE" in await running
    assert server.process.wait(PATIENCE_S) == 0
    assert not still_running([engine])
    assert "drained in" in server.log


async def test_the_engine_goes_when_the_front_is_killed(server) -> None:
    """The last of those that share the server."""
    engine = psutil.Process(server.engine_pid)
    server.process.kill()
    server.process.wait()
    gone, _ = psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert gone
