"""Another memory budget while a server runs: the pool follows, answers go on, and a restart keeps it. Real SmolLM2."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast import LLM, SamplingParams
from holdfast.config import EngineConfig
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import find_model, open_tokenizer, plan_model
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.planner.serve import streamed
from holdfast.records import EngineInfo
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings
from holdfast.units import MIB, parse_bytes

pytestmark = pytest.mark.usefixtures("forked_starts")

SMALL = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "ram": 1100 * MIB}
ATTEMPTS = 9
"""To change budgets in the middle of short answers."""
PROMPTS = ["The capital of France is", "A list of colours:", "Once upon a time", "def fibonacci(n):"]


async def _answers(http: httpx.AsyncClient, tokens: int) -> list[str]:
    def body(prompt: str) -> dict[str, object]:
        return {"prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}

    found = await asyncio.gather(*(http.post("/v1/completions", json=body(prompt)) for prompt in PROMPTS))
    return [each.json()["choices"][0]["text"] for each in found]


async def _generated(http: httpx.AsyncClient) -> float:
    """Tokens, since the start."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


async def _changed_while_answering(
    engine: ProcessEngine, http: httpx.AsyncClient, alone: list[str]
) -> tuple[list[int], bool]:
    """Blocks after each change, and whether the answers went on beyond the last: an engine does not wait for a front
    that gets no processor for a while."""
    before = await _generated(http)
    streams = asyncio.create_task(_answers(http, 60))
    sizes = list[int]()
    for number, budget in enumerate(("780MiB", 900 * MIB, "1100MiB")):
        async with asyncio.timeout(PATIENCE_S):
            while await _generated(http) <= before + 4 * number:  # In the middle of their answers.
                await asyncio.sleep(0.005)
        changed = await http.post("/memory", json={"ram": budget})
        assert changed.status_code == 200, changed.text
        tier, kv = changed.json()["tiers"][0], changed.json()["kv"]
        assert tier["planned_bytes"] <= tier["budget_bytes"] == parse_bytes(budget)
        assert kv["blocks"] == engine.info.blocks
        sizes.append(kv["blocks"])
        # A pool that is too small for all is warned of, once, with its size of now.
        pools = [line for line in engine.info.lowered if line.startswith("kv_pool")]
        assert pools == [line for line in engine.info.decisions if line in pools]
        assert f'num_gpu_blocks="{kv["blocks"]}"' in (await http.get("/metrics")).text
    in_the_middle = not streams.done()
    assert await streams == alone
    return sizes, in_the_middle


async def _breathes(engine: ProcessEngine, http: httpx.AsyncClient) -> None:
    await engine.start()
    first = (await http.get("/memory")).json()
    alone = await _answers(http, 60)
    for _ in range(ATTEMPTS):
        sizes, in_the_middle = await _changed_while_answering(engine, http, alone)
        assert sizes[0] < sizes[1] < sizes[2] == first["kv"]["blocks"]
        if in_the_middle:
            break
    assert in_the_middle

    # Refused with the numbers, and nothing has changed.
    for asked, code in (({"ram": "300MiB"}, "HF110"), ({"ram": "900TiB"}, "HF110"), ({"vram": "1GiB"}, "HF320")):
        refused = await http.post("/memory", json=asked)
        assert (refused.status_code, refused.json()["error"]["holdfast"]["code"]) == (400, code)
    assert engine.info.blocks == sizes[2]
    # Nor do layers that are in memory leave it, though there is a folder for them.
    terms = {term["term"]: term["planned_bytes"] for term in first["terms"]}
    least = terms.pop("kv_pool") * (SMALL["max_model_len"] // 16 + 2) // (first["kv"]["blocks"] + 1)
    refused = await http.post("/memory", json={"ram": sum(terms.values()) + least - 10 * MIB})
    assert (refused.status_code, engine.info.blocks) == (400, sizes[2]), refused.text

    # A process that is started again has the budget of the last one.
    await http.post("/memory", json={"ram": "900MiB"})
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert await _answers(http, 8) == [
        text[: len(part)] for text, part in zip(alone, await _answers(http, 8), strict=True)
    ]
    assert (engine.restarts, engine.info.memory.budget_bytes) == (1, 900 * MIB)
    await engine.sleep()
    refused = await http.post("/memory", json={"ram": "1100MiB"})
    assert (refused.status_code, refused.json()["error"]["holdfast"]["fix"]) == (503, "POST /wake_up")


def test_a_budget_is_changed_while_answers_go_on(tmp_path) -> None:
    with asyncio.Runner() as runner:
        config = EngineConfig(**SMALL, nvme_path=str(tmp_path))
        model = find_model(config)
        engine = ProcessEngine(config, model, open_tokenizer(config, model), plan=plan_model(config, model))
        app = create_app(engine, ServerSettings(served_model_names=("smollm2",), may_change_memory=True))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here", timeout=PATIENCE_S)
        try:
            runner.run(_breathes(engine, http))
        finally:
            runner.run(engine.stop())


def test_a_model_larger_than_its_budget_is_read_from_a_disk(tmp_path, monkeypatch) -> None:
    """By itself, once there is a folder; as few layers as need be, and the same tokens."""
    monkeypatch.setattr(streamed, "IN_MEMORY", ())  # Some machines have such a folder for tests.
    small = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig(**small)
    plan = plan_model(config, find_model(config))
    needed = sum(size for term, size in plan.terms.items() if term != "kv_pool")
    needed += (1 + plan.engine.layout.peak_blocks(512, 64)) * plan.engine.layout.page_bytes
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answers(**settings: object) -> tuple[list[str], EngineInfo]:
        with LLM(**small, **settings) as llm:
            return [one.outputs[0].text for one in llm.generate(PROMPTS, greedy, use_tqdm=False)], llm.info

    plain, _ = answers()
    found, info = answers(ram=needed - 50 * MIB, nvme_path=str(tmp_path))
    assert found == plain
    assert info.memory is not None
    (nvme,) = info.memory.below
    assert 50 * MIB < nvme.terms[0].planned_bytes < 81 * MIB  # All layers are as much.
    assert any(line.startswith("streamed_layers = ") for line in info.lowered)
    for refused in ({}, {"nvme_path": str(tmp_path), "nvme": 4 * MIB}, {"nvme_path": str(tmp_path / "missing")}):
        with pytest.raises(HoldfastError):
            LLM(**small, ram=needed - 50 * MIB, **refused)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="Not a directory"):
        LLM(**small, ram=needed - 50 * MIB, nvme_path=str(tmp_path / "file"))
