"""Half an hour of mixed long and short requests, and an hour of conversations that return over all KV tiers: as fast at
the end as at the beginning, no byte and no page lost.

HOLDFAST_SOAK_MINUTES sets their lengths (at least 6, and 3). Results are printed, of conversations as one JSON line:

    HOLDFAST_SOAK_MINUTES=60 pytest -m long -s tests/long/test_soak.py -k conversations
    HOLDFAST_SOAK_MINUTES=8 HOLDFAST_SOAK_DEVICE=cuda pytest -m long -s tests/long/test_soak.py -k conversations
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path

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


# --- conversations that return, over all tiers ---

DEVICE = os.environ.get("HOLDFAST_SOAK_DEVICE", "cpu")
TIER_MINUTES = max(3.0, float(os.environ.get("HOLDFAST_SOAK_MINUTES", "8" if DEVICE == "cuda" else "60")))
CONVERSATIONS = 24
LONGEST_TOKENS = 900
STORE_BYTES = 192 << 20
DAILY_WRITES = "1TiB"
"""More than is written: with the usual ten times the store's size nothing would be, after a minute of this."""
POOL_BYTES = (256 if DEVICE == "cuda" else 64) << 20
GIVEN_UP_BYTES = POOL_BYTES // 4
EVENTS = 12
"""In all: the engine sleeps and wakes, or the budget is made smaller and larger again."""


class Conversations:
    """They come back in any order: some of them to the pool, some to tiers below it, some to nothing."""

    def __init__(self, url: str) -> None:
        self.url, self.random = url, random.Random(1)
        self.histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        self.taken: set[int] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.under_way = self.finished = self.cancelled = self.cached_tokens = 0

    async def client(self, until_s: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            while time.monotonic() < until_s:
                await self.open.wait()
                number = self.random.choice([one for one in range(CONVERSATIONS) if one not in self.taken])
                self.taken.add(number)
                self.under_way += 1
                try:
                    await self.turn(client, number)
                finally:
                    self.under_way -= 1
                    self.taken.remove(number)

    async def turn(self, client: httpx.AsyncClient, number: int) -> None:
        draw = self.random
        history = self.histories[number]
        if len(history) > LONGEST_TOKENS - 140 or draw.random() < 0.02:
            history.clear()
        history += [draw.randrange(100, 40000) for _ in range(draw.randrange(20, 90))]
        asked = {
            "model": "soak", "prompt": history, "max_tokens": draw.randrange(4, 40), "ignore_eos": True, "stream": True,
            "temperature": 0.0, "return_token_ids": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        leaves, events, answer = draw.random() < 0.05, 0, list[int]()
        async with client.stream("POST", "/v1/completions", json=asked) as found:
            assert found.status_code == 200, (await found.aread()).decode()
            async for line in found.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line[6:])
                assert "error" not in told, line
                for choice in told["choices"]:
                    answer += choice.get("token_ids") or []
                details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
                self.cached_tokens += details.get("cached_tokens") or 0
                events += 1
                if leaves and events == 3:
                    self.cancelled += 1
                    return
        history += answer
        self.finished += 1

    async def quiet(self) -> None:
        """Nobody asks, and nobody is answered."""
        self.open.clear()
        while self.under_way:
            await asyncio.sleep(0.05)


class Upheavals:
    """What somebody does to the server meanwhile: half of it while answers run."""

    def __init__(self, load: Conversations, tier: str) -> None:
        self.load, self.tier = load, tier
        self.sleeps = self.budgets = 0
        self.paused_s = 0.0

    async def next(self) -> None:
        await (self.sleep() if self.sleeps <= self.budgets // 2 else self.budget())

    async def sleep(self) -> None:
        began_s = time.monotonic()
        await self.load.quiet()
        async with httpx.AsyncClient(base_url=self.load.url, timeout=300) as client:
            (await client.post("/sleep?level=1")).raise_for_status()
            await asyncio.sleep(1)
            (await client.post("/wake_up")).raise_for_status()
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.2)
        self.sleeps += 1
        self.paused_s += time.monotonic() - began_s
        self.load.open.set()

    async def budget(self) -> None:
        async with httpx.AsyncClient(base_url=self.load.url, timeout=300) as client:
            ledger = (await client.get("/memory")).json()
            terms = [one for one in ledger["terms"] if one["tier"] == self.tier]
            whole = sum(one["planned_bytes"] for one in terms)
            for size in (whole - GIVEN_UP_BYTES, whole):
                answer = await client.post("/memory", json={self.tier: size})
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(2)
        self.budgets += 1


COUNTED = {
    "prompts": "vllm:prompt_tokens_total", "generated": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total", "dropped": "holdfast:kv_store_dropped_writes_total",
    "missed": "holdfast:kv_store_missed_pages_total", "failed_copies": "holdfast:kv_tier_failed_copies_total",
}  # fmt: skip


class Samples:
    """Of the server, every few seconds: tokens, CPU time, memory and disk."""

    def __init__(self, server, store: Path) -> None:
        self._server, self._store = server, store
        self._ended_s, self._alive = 0.0, dict[int, float]()
        self.rows: list[dict[str, float]] = []

    def take(self, paused_s: float) -> None:
        front = psutil.Process(self._server.process.pid)
        rss = {"front": front.memory_info().rss, "engine": 0}
        seconds = dict[int, float]()
        for process in (front, *front.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                seconds[process.pid] = used.user + used.system
                if "holdfast.engine.process.entry" in " ".join(process.cmdline()):
                    rss["engine"] = process.memory_info().rss
        # What those used who have ended since is not forgotten.
        self._ended_s += sum(used for pid, used in self._alive.items() if pid not in seconds)
        self._alive = seconds
        disk = sum(path.stat().st_blocks * 512 for path in self._store.glob("*"))
        counted = dict(zip(COUNTED, self._server.metrics(*COUNTED.values()), strict=True))
        self.rows.append({
            "at_s": time.monotonic() - paused_s, "cpu_s": self._ended_s + sum(seconds.values()), "disk": disk, **rss,
            **counted, "tokens": counted["prompts"] + counted["generated"],
            **{f"{tier}_{name}": value for tier, told in self._tiers().items() for name, value in told.items()},
        })  # fmt: skip

    def _tiers(self) -> dict[str, dict[str, float]]:
        told = httpx.get(f"{self._server.url}/memory", timeout=300).json().get("kv_tiers", [])
        names = {"hit_tokens": "hit_tokens_total", "stored": "stored_bytes_total"}
        return {one["tier"]: {short: one[name] for short, name in names.items()} for one in told}

    def gained(self, name: str, *, last: bool | None = None) -> float:
        """None: of the whole run. What a counter lost, because its process began anew, is not taken off."""
        rows = self.rows if last is None else self.window(last=last)
        told = [row[name] for row in rows if name in row]
        return sum(max(0.0, after - before) for before, after in itertools.pairwise(told))

    def window(self, *, last: bool) -> list[dict[str, float]]:
        """A third of the run, without its first fifth, in which everything fills."""
        begin, end = self.rows[0]["at_s"], self.rows[-1]["at_s"]
        begin += (end - begin) / 5
        third = (end - begin) / 3
        first_s, last_s = (end - third, end) if last else (begin, begin + third)
        return [row for row in self.rows if first_s <= row["at_s"] <= last_s]

    def rate(self, by: str, *, last: bool) -> float:
        """Tokens of prompts and answers, by seconds that passed or by those of the CPU."""
        rows = self.window(last=last)
        return self.gained("tokens", last=last) / max(1e-9, rows[-1][by] - rows[0][by])

    def median_mib(self, name: str, *, last: bool) -> float:
        return statistics.median(row[name] for row in self.window(last=last) if row[name]) / 2**20


@pytest.mark.long
@pytest.mark.timeout(TIER_MINUTES * 60 + 900)
async def test_conversations_that_return_over_all_tiers(start_server, tmp_path: Path) -> None:
    tier, store = ("vram" if DEVICE == "cuda" else "ram"), tmp_path / "kv"
    server = start_server(
        *os.environ.get("HOLDFAST_SOAK_MODEL", "").split(), "--device", DEVICE, "--max-model-len", "1024",
        "--max-num-seqs", "8", "--served-model-name", "soak", "--disable-access-log", "--enable-sleep-mode",
        "--kv-cache-memory-bytes", str(POOL_BYTES), "--kv-store", str(store), "--kv-store-size", str(STORE_BYTES),
        "--kv-store-daily-writes", DAILY_WRITES,
        "--enable-prompt-tokens-details", "--yield-to-neighbours",
        *(["--kv-ram", str(STORE_BYTES)] if DEVICE == "cuda" else ["--threads", "2"]),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ).wait_ready()  # fmt: skip
    load = Conversations(server.url)
    upheavals, samples = Upheavals(load, tier), Samples(server, store)
    begin_s = time.monotonic()
    end_s = begin_s + TIER_MINUTES * 60
    clients = [asyncio.create_task(load.client(end_s)) for _ in range(CLIENTS)]
    done = 0
    while time.monotonic() < end_s and not any(task.done() for task in clients):
        await asyncio.to_thread(samples.take, upheavals.paused_s)
        if time.monotonic() > begin_s + (done + 1) * TIER_MINUTES * 60 / (EVENTS + 1) and done < EVENTS:
            await upheavals.next()
            done += 1
        await asyncio.sleep(2)
    await asyncio.gather(*clients)
    by = "at_s" if DEVICE == "cuda" else "cpu_s"
    # Others may share a CPU: what a token costs of it is the server's own.
    first, last = samples.rate(by, last=False), samples.rate(by, last=True)
    memory = {
        name: [round(samples.median_mib(name, last=late), 1) for late in (False, True)] for name in ("front", "engine")
    }
    most_disk = max(row["disk"] for row in samples.rows)
    stored = server.metric("holdfast:kv_store_bytes")
    tiers = {name.removesuffix("_stored") for row in samples.rows for name in row if name.endswith("_stored")}
    written_mib = [round(samples.gained("disk_stored", last=late) / 2**20, 1) for late in (False, True)]
    figures = {
        "device": DEVICE, "minutes": TIER_MINUTES, "requests": load.finished, "cancelled": load.cancelled,
        "cached_tokens": load.cached_tokens, "sleeps": upheavals.sleeps, "budgets": upheavals.budgets,
        "store_mib": round(stored / 2**20, 1), "written_to_disk_mib": written_mib,
        "hit_tokens": {tier: samples.gained(f"{tier}_hit_tokens") for tier in sorted(tiers)},
        **{name: samples.gained(name) for name in ("preemptions", "dropped", "missed", "failed_copies")},
        "tokens_per_s": [round(samples.rate("at_s", last=late), 1) for late in (False, True)],
        "tokens_per_cpu_s": [round(samples.rate("cpu_s", last=late), 1) for late in (False, True)],
        "throughput_ratio": round(last / first, 3), "rss_mib": memory,
        "disk_mib": [round(most_disk / 2**20, 1), STORE_BYTES / 2**20],
    }  # fmt: skip
    print("\n" + json.dumps(figures))
    assert upheavals.sleeps >= 2
    assert upheavals.budgets >= 2
    assert load.cached_tokens > 0
    assert load.cancelled > 0
    assert stored > 0
    assert all(written_mib), "pages are written to the end"
    # Not of each: on a fast GPU computing may be sooner than a disk.
    assert sum(samples.gained(f"{tier}_hit_tokens", last=True) for tier in tiers) > 0, "tiers are used to the end"
    assert memory["front"][1] < memory["front"][0] + 24, "the front end grows"
    assert memory["engine"][1] < memory["engine"][0] + 64, "the engine grows"
    assert most_disk < STORE_BYTES * 1.1 + (8 << 20), "the store is larger than its limit"
    assert last > 0.9 * first, "it becomes slower"
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0
