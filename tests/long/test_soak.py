"""Half an hour of mixed long and short requests: as fast at the end as at the beginning, no byte and no page lost.

HOLDFAST_SOAK_MINUTES shortens it (at least 6). Results are printed: run with -s to see them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time

import httpx
import psutil
import pytest

MINUTES = max(6.0, float(os.environ.get("HOLDFAST_SOAK_MINUTES", "30")))
WARM_UP_S = 120.0
WINDOW_S = min(300.0, (MINUTES * 60 - WARM_UP_S) / 3)
CLIENTS = 12
MIX = [(24, 48), (400, 16), (64, 96), (900, 32), (24, 12), (150, 64), (24, 160), (600, 8)]
"""(prompt, output) tokens. Each client walks through all of them again and again, so that every window of some
minutes sees the same work; which tokens, which sampling and who leaves early is drawn anew each time."""


class Load:
    def __init__(self, url: str) -> None:
        self.url = url
        self.finished = 0
        self.left_early = 0
        self.random = random.Random(0)

    async def client(self, place: int, until_s: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            turn = place
            while time.monotonic() < until_s:
                prompt_length, output_length = MIX[turn % len(MIX)]
                turn += 1
                await self.one(client, prompt_length, output_length)

    async def one(self, client: httpx.AsyncClient, prompt_length: int, output_length: int) -> None:
        draw = self.random
        shared = list(range(1000, 1000 + prompt_length // 2)) if draw.random() < 0.5 else []
        prompt = shared + [draw.randrange(100, 40000) for _ in range(prompt_length - len(shared))]
        asked = {
            "model": "soak", "prompt": prompt, "max_tokens": output_length, "ignore_eos": True, "stream": True,
            "temperature": draw.choice([0.0, 0.8]), "top_p": draw.choice([1.0, 0.9]), "seed": draw.randrange(1 << 30),
            "repetition_penalty": draw.choice([1.0, 1.1]),
        }  # fmt: skip
        leaves = draw.random() < 0.03
        events = 0
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    events += 1
                    if leaves and events == 5:
                        self.left_early += 1
                        return
        assert events >= 1
        self.finished += 1


def tokens_computed(server) -> float:
    """So far, by the server's own counters: they grow with every step, so that a window's edge cuts no request."""
    prompts = server.metric("vllm:prompt_tokens_total") - server.metric("vllm:prefix_cache_hits_total")
    return prompts + server.metric("vllm:generation_tokens_total")


def rate(counted: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    (first_s, first), *_, (last_s, last) = [point for point in counted if begin_s <= point[0] <= end_s]
    return (last - first) / (last_s - first_s)


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_half_an_hour_of_mixed_requests(start_server) -> None:
    server = start_server(
        "--kv-cache-memory-bytes",
        "192MiB",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "8",
        "--served-model-name",
        "soak",
        "--threads",
        os.environ.get("HOLDFAST_SOAK_THREADS", "2"),
        "--disable-access-log",
    ).wait_ready()
    processes = {"front": psutil.Process(server.process.pid), "engine": psutil.Process(server.engine_pid)}
    load = Load(server.url)
    begin_s = time.monotonic()
    end_s = begin_s + MINUTES * 60
    clients = [asyncio.create_task(load.client(place, end_s)) for place in range(CLIENTS)]
    sizes: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}
    counted: list[tuple[float, float]] = []
    while time.monotonic() < end_s and not any(task.done() for task in clients):
        for name, process in processes.items():
            sizes[name].append((time.monotonic(), process.memory_info().rss))
        counted.append((time.monotonic(), await asyncio.to_thread(tokens_computed, server)))
        await asyncio.sleep(5)
    await asyncio.gather(*clients)

    first = rate(counted, begin_s + WARM_UP_S, begin_s + WARM_UP_S + WINDOW_S)
    last = rate(counted, end_s - WINDOW_S, end_s)
    print(
        f"\n{load.finished} requests, {load.left_early} left early,"
        f" {server.metric('vllm:num_preemptions_total'):.0f} preemptions;"
        f" {first:.1f} tokens/s in the first window, {last:.1f} in the last: {last / first:.3f}"
    )
    for name, found in sizes.items():
        early = [size for when, size in found if begin_s + WARM_UP_S <= when < begin_s + WARM_UP_S + WINDOW_S]
        late = [size for when, size in found if when >= end_s - WINDOW_S]
        print(
            f"{name}: {statistics.median(early) / 2**20:.1f} MiB early, {statistics.median(late) / 2**20:.1f} MiB late"
        )
        assert statistics.median(late) < statistics.median(early) + (16 << 20), f"{name} grows"
    assert last > 0.95 * first
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
