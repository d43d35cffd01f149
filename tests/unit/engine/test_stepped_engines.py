"""Engines that scripts step, or let a thread step: cancelling one request, or an engine's end, lets nobody hang."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast import AsyncLLMEngine, SamplingParams
from holdfast.engine.offline.stepped import SteppedEngine
from holdfast.errors import EngineError, SleepingError
from holdfast.records import RequestOutput

WAIT_S = 20.0


class Stepped:
    """Ends every request in one step. `gate` holds an add or a step up, `entered` says that it is there."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.gate, self.entered = threading.Event(), threading.Event()
        self.running: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request_id: str, *_: object, **__: object) -> None:
        self.running.append(request_id)
        if not self.broken:
            self._wait()

    def step(self) -> list[RequestOutput]:
        if self.broken:
            self._wait()
            raise EngineError("broken")
        ended, self.running = self.running, []
        return [
            RequestOutput(request_id=name, prompt=None, prompt_token_ids=[1], outputs=[], finished=True)
            for name in ended
        ]

    def _wait(self) -> None:
        self.entered.set()
        self.gate.wait(WAIT_S)

    def abort_request(self, request_id: str) -> None:
        self.running.remove(request_id)
        self.aborted.append(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def shutdown(self) -> None:
        self.gate.set()


async def first_of(engine: AsyncLLMEngine, name: str) -> str:
    async for output in engine.generate("x", SamplingParams(), name):
        return output.request_id
    return ""


async def held_and_queued(engine: AsyncLLMEngine, stepped: Stepped) -> list[asyncio.Task[str]]:
    held = asyncio.create_task(first_of(engine, "held"))
    assert await asyncio.to_thread(stepped.entered.wait, WAIT_S)
    queued = asyncio.create_task(first_of(engine, "queued"))
    while engine._work.empty():
        await asyncio.sleep(0)
    return [held, queued]


async def test_cancelling_ends_one_request_and_no_others() -> None:
    stepped = Stepped()
    engine = AsyncLLMEngine(cast("SteppedEngine", stepped))
    try:
        tasks = await held_and_queued(engine, stepped)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stepped.gate.set()
        assert await asyncio.wait_for(first_of(engine, "after"), WAIT_S) == "after"
        assert stepped.aborted == ["held"]
    finally:
        engine.shutdown()


async def test_who_is_queued_when_the_engine_dies_is_told() -> None:
    stepped = Stepped(broken=True)
    engine = AsyncLLMEngine(cast("SteppedEngine", stepped))
    tasks = await held_and_queued(engine, stepped)
    stepped.gate.set()
    for task in tasks:
        with pytest.raises(EngineError, match="broken"):
            await asyncio.wait_for(task, WAIT_S)
    with pytest.raises(EngineError, match="has ended"):
        await asyncio.wait_for(first_of(engine, "late"), WAIT_S)
    engine.shutdown()


class Core:
    """Takes one answer, and is interrupted in its first step."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def add(self, request: Any) -> None:
        if self.entered:
            raise EngineError("full")
        self.entered.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.entered = [name for name in self.entered if name != request_id]

    def step(self) -> None:
        raise KeyboardInterrupt

    def start_over(self) -> None:
        self.entered.clear()


def stepped_over(core: Core | None, answers: int) -> SteppedEngine:
    def engine() -> Core:
        if core is None:
            raise SleepingError("this LLM is sleeping")
        return core

    requests = [SimpleNamespace(request=SimpleNamespace(request_id=f"0#{index}")) for index in range(answers)]
    llm = SimpleNamespace(
        _check_priority=lambda *_: None,
        _adapters=SimpleNamespace(one_each=lambda *_: [None]),
        _prepare=lambda *_, **__: SimpleNamespace(output=SimpleNamespace(), answers=requests),
        _turn=threading.Lock(),
        _engine=engine,
    )
    return SteppedEngine(llm)


@pytest.mark.parametrize(("core", "said"), [(None, "sleeping"), (Core(), "full")])
def test_a_request_that_is_not_taken_leaves_nothing_open(core: Core | None, said: str) -> None:
    engine = stepped_over(core, answers=2)
    with pytest.raises(EngineError, match=said):
        engine.add_request("a", "x", SamplingParams(n=2))
    assert not engine.has_unfinished_requests()
    assert core is None or not core.entered


def test_an_interrupted_step_leaves_nothing_open() -> None:
    core = Core()
    engine = stepped_over(core, answers=1)
    engine.add_request("a", "x", SamplingParams())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert not core.entered
