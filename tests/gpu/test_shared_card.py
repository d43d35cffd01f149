"""Two servers on one card that is too small for both KV pools: who is idle gives its pool back, who is asked takes it,
and in float32 each answers as it did alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from holdfast.config import EngineConfig
from holdfast.engine.core.neighbours import MARGIN_SHARE
from holdfast.engine.core.pool_memory import LEAST_VRAM_MARGIN_BYTES
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.hardware.nvidia import probe
from holdfast.records import SamplingParams
from holdfast.units import GIB

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 4096,
    "max_num_seqs": 64, "max_num_batched_tokens": 512, "vram": "32GiB", "kv_ram": "1GiB", "idle_release": 1,
}  # fmt: skip
ROUNDS = 2
ANSWERS, TOKENS = 24, 64
"""Together they take some times the pages of an idle server, and far fewer than its full pool has."""
GROWN_S = 40.0
"""For a pool that gave way, which waits for 10 s to see that its neighbour has left."""


class Server:
    """`floor`: blocks that it keeps while nobody asks."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine, self.full, self.floor = engine, engine.info.blocks, 0
        self._asked = self._answered = 0
        self._alone: list[list[int]] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        assert engine.info.memory is not None
        self._page_bytes = engine.info.memory.page_bytes

    @property
    def blocks(self) -> int:
        return self._engine.info.blocks

    @property
    def resizes(self) -> int:
        return self._engine.stats().pool_resizes_total

    @property
    def said(self) -> str:
        """Of its pool, when it was changed last."""
        return next((line for line in self._engine.info.decisions if line.startswith("kv_pool = ")), "")

    @property
    def to_give_bytes(self) -> int:
        return (self.full - self.floor) * self._page_bytes

    async def ask(self) -> None:
        """Prompts that it has answered before. What ended in an error is raised."""
        self._asked += 1
        dice, asked = random.Random(11), list[Any]()
        for number in range(ANSWERS):
            prompt = [dice.randrange(3, 100_000) for _ in range(dice.randrange(200, 500))]
            asked.append(self._answer(prompt, f"{self._asked}-{number}"))
        async with asyncio.timeout(60):
            found = await asyncio.gather(*asked)
        self._alone = self._alone or found
        assert found == self._alone
        assert self._engine.restarts == 0
        self._answered += 1

    async def _answer(self, prompt: list[int], name: str) -> list[int]:
        params, tokens = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), list[int]()
        async for delta in await self._engine.generate(prompt, params, request_id=name):
            tokens += delta.token_ids
        assert len(tokens) == TOKENS
        return tokens

    def begin(self) -> None:
        """It is asked again and again from now on."""
        self._over.clear()
        self._asking = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        while not self._over.is_set():
            await self.ask()

    async def end(self) -> None:
        """The last answers have come."""
        self._over.set()
        if self._asking is not None:
            await self._asking

    async def until(self, true: Callable[[], bool], seconds: float = 60.0) -> float:
        """Whatever ends its answers is raised."""
        began_s = time.monotonic()
        while not true():
            if self._asking is not None and self._asking.done():
                await self._asking
            assert time.monotonic() - began_s < seconds, f"it did not come about: {self}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s

    async def until_idle(self) -> None:
        """It has given back what it can."""
        await self.until(lambda: self.blocks == self.floor)

    async def until_full(self) -> float:
        return await self.until(lambda: self.blocks == self.full)

    async def until_answered(self) -> None:
        """Once more, from here on."""
        before = self._answered
        await self.until(lambda: self._answered > before)

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._engine.stop()

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.full}, {self.resizes} resizes, {self.said}"


@asynccontextmanager
async def serving(model: str, **settings: Any) -> AsyncIterator[Server]:
    """Idle: it has answered, and given back what it can."""
    config = EngineConfig.from_arguments(model=model, **(SETTINGS | settings))
    found = find_model(config)
    engine = ProcessEngine(config, found, None, plan=plan_model(config, found, front_bytes=FRONT_BYTES))
    await engine.start()
    server = Server(engine)
    try:
        await server.ask()
        await server.until(lambda: server.blocks < server.full)
        server.floor = server.blocks
        yield server
    finally:
        await server.stop()


def free() -> int:
    return probe().gpus[0].free_bytes


async def take_turns(first: Server, second: Server, free: Callable[[], int]) -> None:
    """One is asked, has its full pool at once, and gives it back; the other does nothing meanwhile."""
    idle_free = free()
    for asked, other in ((first, second), (second, first)) * ROUNDS:
        before = asked.resizes, other.resizes
        asked.begin()
        await asked.until_full()
        assert idle_free - free() > 0.8 * asked.to_give_bytes
        await asked.end()
        await asked.until_idle()
        assert idle_free - free() < 0.1 * asked.to_give_bytes
        assert other.blocks == other.floor
        assert (asked.resizes, other.resizes) == (before[0] + 2, before[1]), "nothing goes to and fro"


async def take_what_the_other_leaves(first: Server, second: Server) -> None:
    """Where the other is asked already, what is left is enough; all is had when the other has stopped."""
    before = first.resizes, second.resizes
    second.begin()
    await second.until_full()
    first.begin()
    await first.until(lambda: first.blocks > first.floor)
    assert first.blocks < first.full
    await first.until_answered()
    assert second.blocks == second.full
    await second.end()
    waited_s = await first.until_full()
    print(f"all of its pool {waited_s:.1f} s after the other was asked last")
    await first.end()
    await first.until_idle()
    assert second.blocks == second.floor
    assert second.resizes == before[1] + 2
    assert first.resizes <= before[0] + 4, "a try in between may have found some more"


async def give_way(first: Server, second: Server) -> None:
    """Who yields gives way to one that is asked at the same time, and stays so; when that is idle it grows again."""
    before = first.resizes, second.resizes
    first.begin()
    await first.until_full()
    second.begin()
    waited_s = await second.until_full()
    print(f"it gave way, and the other had all of its pool {waited_s:.1f} s after it was asked")
    assert first.blocks < first.full // 2
    assert "others hold" in first.said
    await first.until_answered()
    await second.until_answered()
    assert second.blocks == second.full
    assert first.resizes == before[0] + 2, "nothing goes to and fro"
    assert second.resizes <= before[1] + 3
    await second.end()
    await second.until_idle()
    waited_s = await first.until(lambda: first.blocks > first.full // 2, GROWN_S)
    print(f"{first.blocks} of {first.full} blocks {waited_s:.1f} s after the other was idle")
    await first.end()
    assert first.resizes == before[0] + 3
    assert second.blocks == second.floor


async def test_two_servers_whose_pools_do_not_both_fit_share_a_card(
    shape: Callable[[str], str], neighbour: Any
) -> None:
    """The first also yields to neighbours: it leaves them a margin, and gives way to the second while it is asked."""
    model = shape("1B")
    async with serving(model, yield_to_neighbours=True) as first, serving(model) as second:
        give = min(first.to_give_bytes, second.to_give_bytes)
        margin = max(LEAST_VRAM_MARGIN_BYTES, int(probe().gpus[0].total_bytes * MARGIN_SHARE))
        room = give + give // 4 + margin
        assert 3 * margin < room < 2 * give, "for one pool and the margin, and not for two"
        await first.until_idle()
        await asyncio.to_thread(neighbour.take, room)
        print(f"{free() / GIB:.1f} GiB are free beside pools that give back {give / GIB:.1f} each")
        await take_turns(first, second, free)
        await take_what_the_other_leaves(first, second)
        await give_way(first, second)
