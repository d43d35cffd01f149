"""Many streams of a server at once, of prompts that differ in length: what its faults must not change."""

from __future__ import annotations

import asyncio

import openai
from deadlines import PATIENCE_S

STREAMS = 32
TOKENS = 16


async def stream(client: openai.AsyncOpenAI, place: int, begun: asyncio.Semaphore) -> str:
    text, first = "", True
    answer = await client.completions.create(
        model="tiny",
        prompt=f"Story number {place % 8}: " + "once upon a time " * (1 + place % 5),
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


async def all_streams(url: str, begun: asyncio.Semaphore | None = None) -> list[str]:
    begun = begun or asyncio.Semaphore(0)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        return list(await asyncio.gather(*(stream(client, place, begun) for place in range(STREAMS))))
