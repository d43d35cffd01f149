"""One request finds no memory for even its smallest step: it ends with its own error, and nobody else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast import LLM, SamplingParams
from holdfast.engine.process.fault_injection import NO_MEMORY, with_faults

POOR = 31_337
TOKENS = 300


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


async def test_only_the_poor_one_ends(start_server, tiny_arguments) -> None:
    server = start_server(*tiny_arguments, environment={NO_MEMORY: str(POOR)}).wait_ready()
    engine = server.engine_pid
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        prompts = [[place, 5, 6] for place in range(100, 104)]
        undisturbed = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        aboard = [asyncio.create_task(ask(client, prompt)) for prompt in prompts]
        async with asyncio.timeout(PATIENCE_S):
            while server.metric("vllm:generation_tokens_total") < len(prompts) * (TOKENS + 1):
                await asyncio.sleep(0.005)
        refused = await ask(client, [100, 5, POOR, 7])
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "out_of_memory"
        assert refused.json()["error"]["holdfast"]["code"] == "HF441"
        body: dict[str, Any] = {"model": "tiny", "prompt": [POOR], "max_tokens": 9, "ignore_eos": True, "stream": True}
        streamed = await client.post("/v1/completions", json=body)
        assert streamed.status_code == 200
        assert '"out_of_memory"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        answers = await asyncio.gather(*aboard)
        assert [answer.json()["choices"] for answer in answers] == [one.json()["choices"] for one in undisturbed]
    assert server.engine_pid == engine
    assert server.stop() == 0


def test_offline_the_others_are_not_lost(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_MEMORY, str(POOR))
    with LLM(
        model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=8 << 20
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        alone = llm.generate([[7, 8, 9], [5, 6]], params, use_tqdm=False)
        core = llm._engine()
        core.runner = with_faults(core.runner)
        first, poor, last = llm.generate([[7, 8, 9], [POOR, 3], [5, 6]], params, use_tqdm=False)
    assert (poor.outputs[0].finish_reason, poor.outputs[0].stop_reason) == ("error", "HF441")
    assert poor.finished
    assert [one.outputs[0].token_ids for one in (first, last)] == [one.outputs[0].token_ids for one in alone]
