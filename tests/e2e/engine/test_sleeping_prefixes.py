"""What is cached of prompts while the engine sleeps: at level 1 it is there again afterwards, at level 2 it is not.
Real SmolLM2, over the real endpoints."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from holdfast.config import EngineConfig
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.process.fault_injection import FAIL_LOADING
from holdfast.engine.startup.build import find_model, open_tokenizer, plan_model
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import MIB

pytestmark = pytest.mark.usefixtures("forked_starts")

SMALL = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 * MIB, "enable_sleep_mode": True}
PROMPTS = ["Numbers: " + " ".join(str(first + number) for number in range(70)) for first in (0, 1000)]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[ProcessEngine, httpx.AsyncClient]]:
    config = EngineConfig.from_arguments(device="cpu", **SMALL)
    model = find_model(config)
    plan = plan_model(config, model, front_bytes=FRONT_BYTES)
    engine = ProcessEngine(config, model, open_tokenizer(config, model), plan=plan)
    app = create_app(engine, ServerSettings(served_model_names=("smollm2",), enable_sleep_mode=True))
    await engine.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", timeout=120) as http:
            yield engine, http
    finally:
        await engine.stop()


async def answers(http: httpx.AsyncClient) -> list[tuple[str, int]]:
    found = list[tuple[str, int]]()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        found.append((answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return found


def unnamed_files() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # Threads of the messaging library close sockets long after `close`.
            found += "memfd:holdfast-kv" in os.readlink(f"/proc/self/fd/{number}")
    return found


async def test_prefixes_survive_level_1_and_a_wake_that_fails_and_not_level_2(monkeypatch, tmp_path: Path) -> None:
    """One engine for all of it: each that is started takes seconds."""
    failing = tmp_path / "failing"
    monkeypatch.setenv(FAIL_LOADING, str(failing))
    others = unnamed_files()  # Of engines that other tests put to sleep in this process: they end with it.
    async with served() as (engine, http):
        first = await answers(http)
        assert [cached for _, cached in first] == [0, 0]
        pid = engine.pid
        assert (await http.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
        assert not Path(f"/proc/{pid}").exists()
        terms = {term["term"]: term["measured_bytes"] for term in (await http.get("/memory")).json()["terms"]}
        assert {name for name, size in terms.items() if size} == {"front", "kv_pool"}
        assert 0 < terms["kv_pool"] < 64 * MIB
        assert unnamed_files() == others + 2

        assert (await http.post("/wake_up")).json()["status"] == "awake"
        assert unnamed_files() == others
        again = await answers(http)
        assert [text for text, _ in again] == [text for text, _ in first]
        assert all(cached >= 190 for _, cached in again), again

        # What was restored may sleep once more, and is kept for the next try of an engine that cannot wake.
        await http.post("/sleep")
        failing.touch()
        assert (await http.post("/wake_up")).status_code >= 500
        failing.unlink()
        await http.post("/wake_up")
        again = await answers(http)
        assert [text for text, _ in again] == [text for text, _ in first]
        assert all(cached >= 190 for _, cached in again), again

        await http.post("/sleep?level=1")
        assert unnamed_files() == others + 2
        await http.post("/sleep?level=2")  # Of one that sleeps.
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert unnamed_files() == others
        await http.post("/wake_up")
        last = await answers(http)
        assert last == first
