"""Fifty grammars that explode, sent to a real server at its default limits while 32 ordinary streams run, half of them
with structured output: all streams end as they would alone, none pauses, and the memory comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grammar_attacks
import httpx
import psutil
import pytest
from deadlines import PATIENCE_S
from grammar_attacks import bomb

STREAMS, BOMBS, SLOW = 32, 50, 16
CALM_S = 0.1
"""The longest pause of a stream that nobody notices. Held to where the machine does nothing else."""
STALL_S = 5.0
"""In the quick suite, where other tests take the cores: a front or an engine that stood still did so for minutes."""
TICK_S = 0.01


@dataclass(slots=True)
class Seen:
    texts: dict[int, str] = field(default_factory=dict)
    worst_gap_s: float = 0.0
    worst_probe_s: float = 0.0
    own_stall_s: float = 0.0
    """That this process itself stood still for: the machine's, not the server's."""
    codes: list[int] = field(default_factory=list)

    def pauses(self) -> str:
        seen = (("stream", self.worst_gap_s), ("/health", self.worst_probe_s), ("this test", self.own_stall_s))
        return ", ".join(f"{name} {pause_s * 1000:.0f} ms" for name, pause_s in seen)


def ordinary(number: int, tokens: int) -> dict[str, Any]:
    body = {
        "prompt": f"Number {number}", "max_tokens": tokens, "seed": number, "temperature": 1.0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    return body | ({"guided_regex": f"([a-z]{{3}}[0-9]){{{tokens}}}"} if number % 2 else {})


async def follow(client: httpx.AsyncClient, number: int, tokens: int, seen: Seen) -> None:
    text, last_s = "", None
    async with client.stream("POST", "/v1/completions", json=ordinary(number, tokens)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.monotonic()
            seen.worst_gap_s = max(seen.worst_gap_s, now_s - (last_s or now_s))
            text, last_s = text + line, now_s
    # Ids and times differ from run to run; what was written does not.
    seen.texts[number] = "".join(part.split('"text":"')[1].split('","')[0] for part in text.split("data: ")[1:])


async def probe(client: httpx.AsyncClient, seen: Seen) -> None:
    while True:
        began_s = time.monotonic()
        assert (await client.get("/health")).status_code == 200
        seen.worst_probe_s = max(seen.worst_probe_s, time.monotonic() - began_s)
        await asyncio.sleep(TICK_S)


async def tick(seen: Seen) -> None:
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        seen.own_stall_s = max(seen.own_stall_s, time.monotonic() - began_s - TICK_S)


@contextlib.asynccontextmanager
async def attackers(url: str, kind: str, count: int, seen: Seen) -> AsyncIterator[Callable[[], None]]:
    """Gives what lets them begin. They leave at the end, those too that still wait for an answer."""
    command = (sys.executable, grammar_attacks.__file__, url, kind, str(count))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    try:
        assert await stdout.readline() == b"ready\n"
        yield lambda: stdin.write(b"begin\n")
        async with asyncio.timeout(PATIENCE_S):
            first = await stdout.readline()
        process.kill()
        seen.codes = [int(code) for code in (first + await stdout.read()).split()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def run(url: str, tokens: int, attack: tuple[str, int] | None = None) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=STREAMS + 8)
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client,
        attackers(url, *attack, seen) if attack else contextlib.nullcontext(lambda: None) as begin,
    ):
        beside = [asyncio.create_task(probe(client, seen)), asyncio.create_task(tick(seen))]
        streams = [asyncio.create_task(follow(client, number, tokens, seen)) for number in range(STREAMS)]
        await asyncio.sleep(0.3)
        begin()
        await asyncio.gather(*streams)
        for task in beside:
            assert not task.done(), task
            task.cancel()
    return seen


def held_bytes(server: Any) -> int:
    """By the server, its engine and whatever else it has started, pages that they share once."""
    root, held = psutil.Process(server.process.pid), 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # A worker that ended meanwhile.
            held += process.memory_full_info().pss
    return held


def check_nobody_notices(server: Any, tokens: int, attack: tuple[str, int], limit_s: float, rounds: int = 1) -> Seen:
    """`limit_s`: of the longest pause; the median of several rounds, since other machines share ours."""
    asyncio.run(run(server.url, 10, ("bombs", 5)))  # Whatever is loaded when it is first used.
    asyncio.run(run(server.url, tokens))
    before, pauses_s = held_bytes(server), []
    for _ in range(rounds):
        alone = asyncio.run(run(server.url, tokens))
        beside = asyncio.run(run(server.url, tokens, attack))
        # Where a mask was late a row is computed once more, in a step of another shape, which may round otherwise.
        for number, text in alone.texts.items():
            assert len(beside.texts[number]) > len(text) // 2
        same = sum(beside.texts[number] == text for number, text in alone.texts.items())
        print(f"\n{attack}: alone {alone.pauses()}; beside {beside.pauses()}; {same} of {STREAMS} texts the same")
        worst_s = max(beside.worst_gap_s, beside.worst_probe_s)
        pauses_s.append(worst_s - max(limit_s, alone.worst_gap_s, alone.worst_probe_s) - beside.own_stall_s)
    assert median(pauses_s) <= 0
    deadline_s = time.monotonic() + PATIENCE_S
    while held_bytes(server) > before * 1.05:
        assert time.monotonic() < deadline_s, (before, held_bytes(server))
        time.sleep(0.1)
    assert "restarting it" not in server.log
    assert "structured output worker" not in server.log
    return beside


@pytest.fixture(scope="module")
def server(module_server: Callable[..., Any], tiny_arguments: list[str]) -> Any:
    return module_server(*tiny_arguments, "--max-num-seqs", "64").wait_ready()


def test_streams_beside_fifty_explosions(server: Any) -> None:
    beside = check_nobody_notices(server, 60, ("bombs", BOMBS), STALL_S)
    assert {*beside.codes} <= {400, 429}


@pytest.mark.long
@pytest.mark.parametrize(
    ("attack", "limit_s", "codes"),
    [(("bombs", BOMBS), CALM_S, {400, 429}), (("slow", SLOW), 1.5 * CALM_S, {200, 400, 429})],
    ids=["explosions", "slow grammars"],
)
def test_streams_do_not_pause(server: Any, attack: tuple[str, int], limit_s: float, codes: set[int]) -> None:
    """On a machine that does nothing else."""
    beside = check_nobody_notices(server, 400, attack, limit_s, rounds=3)
    assert {*beside.codes} <= codes


def ask_and_leave(server: Any, first: int, stay_s: float) -> None:
    """In the middle of an explosion. A client that stood still itself, and has its answer, asks for the next of its
    kind."""
    deadline_s, patience = time.monotonic() + PATIENCE_S, httpx.Timeout(PATIENCE_S, read=stay_s)
    for number in itertools.count(first, 5):
        assert time.monotonic() < deadline_s
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", **bomb(number)}, timeout=patience)
        except httpx.ReadTimeout:
            return
        assert answer.status_code == 400, answer.text


def test_a_client_that_leaves_takes_its_explosion_along(server: Any) -> None:
    before = {process.pid for process in workers(server)}  # Of grammars that have proven to be quick, one is kept.
    ask_and_leave(server, 1000, 0.15)
    deadline_s = time.monotonic() + PATIENCE_S
    while not {process.pid for process in workers(server)} <= before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def workers(server: Any) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    (service,) = [process for process in children if "structured.service" in str(process.cmdline())]
    return service.children()


def test_a_server_that_is_stopped_takes_explosions_along(server: Any) -> None:
    """The last of those that share the server."""
    for number in (2000, 2001, 2002):
        ask_and_leave(server, number, 0.05)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    assert psutil.wait_procs(processes, PATIENCE_S)[1] == []
