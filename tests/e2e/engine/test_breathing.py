"""A server on a CPU whose KV pool gives its memory back while nobody asks. Real SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import find_model, open_tokenizer, plan_model
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import MIB

pytestmark = pytest.mark.usefixtures("forked_starts")

SMALL = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 * MIB}
PROMPT = "Numbers: " + " ".join(map(str, range(150)))


def make(**settings: object) -> ProcessEngine:
    config = EngineConfig.from_arguments(device="cpu", **SMALL, **settings)
    model = find_model(config)
    plan = plan_model(config, model, front_bytes=FRONT_BYTES)
    return ProcessEngine(config, model, open_tokenizer(config, model), plan=plan)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.05)


async def answer(http: httpx.AsyncClient) -> tuple[str, int]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    found = (await http.post("/v1/completions", json=body)).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_idle_server_gives_its_kv_cache_back_and_takes_it_when_asked() -> None:
    engine = make(idle_release=1)
    app = create_app(engine, ServerSettings(served_model_names=("smollm2",)))
    await engine.start()
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://here", timeout=PATIENCE_S
        ) as http:
            full = engine.info.blocks
            first, _ = await answer(http)
            await until(lambda: engine.info.blocks < full)
            # One sequence of full length and a little stays.
            assert 512 / 16 <= engine.info.blocks <= 512 / 16 + 8
            memory = (await http.get("/memory")).json()
            assert memory["kv"]["blocks"] == engine.info.blocks
            assert memory["kv"]["blocks_touched"] <= engine.info.blocks
            assert any("no request for 1 s" in line for line in memory["decisions"])
            again, cached = await answer(http)
            assert again == first
            assert cached > 0, "what fits the floor is still there"
            async with asyncio.timeout(PATIENCE_S):
                while engine.info.blocks < full:  # Where we are too slow to see it, it has been given back once more.
                    await answer(http)
            assert not any("no request" in line for line in engine.info.decisions)
    finally:
        await engine.stop()
