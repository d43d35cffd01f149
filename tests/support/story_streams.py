"""Many streams of a server at once, of prompts that differ in length: what its faults must not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import openai
from deadlines import PATIENCE_S

from holdfast import LLM, SamplingParams

STREAMS = 32
TOKENS = 16


def prompt_of(place: int) -> str:
    return f"Story number {place % 8}: " + "once upon a time " * (1 + place % 5)


def told_by_one(tiny_model: Path) -> list[str]:
    """What the streams of an engine that nothing happens to say, without a server."""
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    settings = {"tokenizer": "smollm2", "dtype": "float32", "threads": 1, "kv_cache_memory_bytes": "64MiB"}
    with LLM(str(tiny_model), load_format="dummy", **settings) as llm:
        outputs = llm.generate([prompt_of(place) for place in range(STREAMS)], greedy, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


async def stream(client: openai.AsyncOpenAI, place: int, begun: asyncio.Semaphore, model: str = "tiny") -> str:
    text, first = "", True
    answer = await client.completions.create(
        model=model,
        prompt=prompt_of(place),
        max_tokens=TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in answer:
        text += "".join(choice.text for choice in chunk.choices)
        if first:
            begun.release()
            first = False
    return text


async def all_streams(url: str, begun: asyncio.Semaphore | None = None, models: Sequence[str] = ("tiny",)) -> list[str]:
    """`models`: which of them is asked, by turns."""
    begun = begun or asyncio.Semaphore(0)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked = [stream(client, place, begun, models[place % len(models)]) for place in range(STREAMS)]
        return list(await asyncio.gather(*asked))
