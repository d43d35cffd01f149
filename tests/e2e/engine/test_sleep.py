"""Sleep and wake: memory really given back, told in the ledger; the same answers afterwards. Real SmolLM2."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from holdfast import LLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.process.fault_injection import FAIL_LOADING
from holdfast.engine.startup.build import find_model, open_tokenizer, plan_model
from holdfast.errors import EngineError, SleepingError
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.hardware import resident
from holdfast.hardware.nvidia import probe, process_bytes
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import MIB

pytestmark = pytest.mark.usefixtures("forked_starts")

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 * MIB}


def held_bytes() -> int:
    """Where this process has its weights: on the GPU if there is one, else in RAM."""
    for gpu in probe().gpus:
        if (own := process_bytes(gpu.uuid, os.getpid())) is not None:
            return own
    now = resident()
    assert now is not None
    return now.now_bytes


def test_llm_gives_its_memory_back_and_takes_it_again() -> None:
    with LLM(**SMALL) as llm:

        def answer() -> str:
            return llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text

        before = answer()
        awake = held_bytes()
        llm.sleep()
        llm.sleep(level=2)
        assert awake - held_bytes() > 0.9 * llm.info.weights_bytes
        assert llm.is_sleeping()
        with pytest.raises(SleepingError):
            answer()
        llm.wake_up()
        assert answer() == before


class Served:
    """A real engine process and the application, without a socket between."""

    def __init__(self) -> None:
        config = EngineConfig(**SMALL)
        model = find_model(config)
        plan = plan_model(config, model, front_bytes=FRONT_BYTES)
        self.engine = ProcessEngine(config, model, open_tokenizer(config, model), plan=plan)
        self.app = create_app(self.engine, ServerSettings(served_model_names=("smollm2",), enable_sleep_mode=True))


def body(**more: object) -> dict[str, object]:
    return {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, **more}


async def _sleeps_and_wakes(served: Served, failing: Path) -> None:
    engine = served.engine
    with pytest.raises(EngineError):
        await engine.sleep()  # It has not begun.
    await engine.start()
    transport = httpx.ASGITransport(app=served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=120) as http:
        first = (await http.post("/v1/completions", json=body())).json()["choices"][0]["text"]
        vectors = (await http.post("/v1/embeddings", json={"input": ["a cat", "a kitten"]})).json()["data"]
        assert [len(vector["embedding"]) for vector in vectors] == [576, 576]
        assert sum(number**2 for number in vectors[1]["embedding"]) == pytest.approx(1, abs=1e-4)
        awake = (await http.get("/memory")).json()
        engine_bytes = next(each["resident_bytes"] for each in awake["processes"] if each["name"] == "engine")
        pid = engine.pid
        assert pid is not None

        # What runs is ended with a reason, or awaited.
        long = asyncio.create_task(http.post("/v1/completions", json=body(max_tokens=400, ignore_eos=True)))
        while engine.unfinished == 0:
            await asyncio.sleep(0)
        assert (await http.post("/sleep")).json() == {"status": "sleeping", "level": 1}
        ended = await long
        assert (ended.status_code, ended.json()["error"]["code"]) == (503, "sleeping")
        assert ended.json()["error"]["holdfast"]["code"] == "HF421"

        # The process is gone, and the books say so.
        assert not Path(f"/proc/{pid}").exists()
        assert engine.pid is None
        asleep = (await http.get("/memory")).json()
        held = {term["term"]: term["measured_bytes"] for term in asleep["terms"]}
        assert {name for name, size in held.items() if size} == {"front"}
        freed = awake["tiers"][0]["measured_bytes"] - asleep["tiers"][0]["measured_bytes"]
        assert freed > engine_bytes * 0.9  # The front is this test's own process, however large the tests made it.
        assert [process["name"] for process in asleep["processes"]] == ["front"]
        metrics = (await http.get("/metrics")).text
        assert 'kind="measured",model_name="smollm2",term="weights",tier="ram"} 0.0' in metrics

        # Alive and not ready; what needs no engine is answered.
        assert (await http.get("/health")).json() == {"status": "sleeping"}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "a b"})).status_code == 200
        for path, asked in (("/v1/completions", body()), ("/v1/embeddings", {"input": "a"})):
            refused = await http.post(path, json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
            assert refused.headers["retry-after"]
        assert (await http.post("/sleep")).status_code == 200

        # An engine that cannot wake up says why, and sleeps on.
        failing.touch()
        assert (await http.post("/wake_up")).json()["error"]["code"] == "engine_error"
        assert (engine.sleeping, engine.failure) == (True, None)
        failing.unlink()

        assert (await http.post("/wake_up")).json() == {"status": "awake", "tags": None}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/v1/completions", json=body())).json()["choices"][0]["text"] == first
        assert (await http.get("/health")).json() == {"status": "ready"}

        # Who waits lets the others finish.
        waiting = asyncio.create_task(http.post("/v1/completions", json=body(max_tokens=30, ignore_eos=True)))
        while engine.unfinished == 0:
            await asyncio.sleep(0)
        assert (await http.post("/sleep?mode=wait&level=2")).json() == {"status": "sleeping", "level": 2}
        assert (await waiting).json()["usage"]["completion_tokens"] == 30


def test_a_server_sleeps_and_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "failing"
    monkeypatch.setenv(FAIL_LOADING, str(failing))
    with asyncio.Runner() as runner:
        served = Served()
        try:
            runner.run(_sleeps_and_wakes(served, failing))
        finally:
            runner.run(served.engine.stop())
