"""What the page is told: requests in bounded number, notices with what helps, who else holds memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import msgspec
import pytest
from starlette.requests import Request

from holdfast.engine.fake import FakeEngine
from holdfast.engine.requests.adapters import Loaded
from holdfast.hardware.nvidia import GpuProcess, NvidiaGpu, NvidiaMachine
from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AdapterRef, AnswerDelta, EngineStats
from holdfast.server.settings import ServerSettings
from holdfast.server.ui.machine import Holder, MachineTier, MachineWatch, look
from holdfast.server.ui.notices import LogNotices, notices
from holdfast.server.ui.routes import _is_near
from holdfast.server.ui.state import SHOWN_REQUESTS, StateKeeper, requests_state


def metrics() -> ServingMetrics:
    return ServingMetrics("m", engines=[EngineSource(EngineStats, lambda: None)])


def ram(free_bytes: int = 50, *holders: Holder) -> MachineTier:
    return MachineTier(tier="ram", name="RAM", total_bytes=100, free_bytes=free_bytes, ours=True, holders=[*holders])


def test_of_a_thousand_requests_the_oldest_hundred_are_told() -> None:
    counted = metrics()
    for one in range(1000):
        counted.open_request(prompt_tokens=5, max_tokens=9, n=1, request_id=f"r{one}", model="m")
    found = requests_state(list(counted.open_meters), running=10)
    assert (found.open, len(found.shown)) == (1000, SHOWN_REQUESTS)
    assert [request.id for request in found.shown[:2]] == ["r0", "r1"]
    assert [request.state for request in found.shown] == ["prefill"] * 10 + ["waiting"] * 90
    assert len(msgspec.json.encode(found)) < 30_000


def test_a_request_with_a_token_is_decoding_and_has_a_speed() -> None:
    counted = metrics()
    first, second = (counted.open_request(prompt_tokens=5, max_tokens=9, n=1) for _ in range(2))
    first.arrival_s -= 2
    first.delta(AnswerDelta(token_ids=[1], cached_tokens=4))
    first._last_token_s[0] += 0.5
    first._generated[0] += 5
    found = requests_state([first, second], running=2).shown
    assert [request.state for request in found] == ["decode", "prefill"]
    assert found[0].tokens_per_s == pytest.approx(10, rel=0.01)
    assert (found[0].cached_tokens, found[0].generated_tokens, found[1].tokens_per_s) == (4, 6, None)


def sample(**figures: float) -> dict[str, float | None]:
    return {"running": 8, "waiting": 0, "kv_share": 0.2, "preemptions": 0} | figures


def told(engine: FakeEngine, recent: list[dict[str, float | None]], *machine: MachineTier) -> list[tuple[str, str]]:
    found = notices(engine, engine.info, engine.memory(), recent, machine, LogNotices())
    return [(notice.text, notice.fix or "") for notice in found]


def test_what_a_queue_waits_for_is_one_notice_with_a_flag() -> None:
    engine = FakeEngine(max_num_seqs=8)
    assert told(engine, []) == told(engine, [sample(), sample(waiting=3)]) == []
    [(text, fix)] = told(engine, [sample(preemptions=2, waiting=4, kv_share=1.0), sample(running=10)])
    assert "2 requests preempted" in text
    assert fix.startswith("--max-num-seqs 7")
    [(text, fix)] = told(engine, [sample(waiting=4, kv_share=0.97), sample(waiting=9, kv_share=0.99)])
    assert text == "the KV cache is full, and 4 requests or more wait"
    [(text, fix)] = told(engine, [sample(waiting=4)])
    assert "one of 8 places" in text
    assert fix.startswith("--max-num-seqs 16")


def test_an_engine_that_fails_and_ram_that_runs_short_are_told() -> None:
    engine = FakeEngine()
    engine.restarts, engine.hangs = 2, 1
    [(text, _)] = told(engine, [])
    assert text == "restarts of the engine process: 2, 1 of them because it hung"
    engine.die("it fell over")
    assert told(engine, [])[0][0] == "it fell over"
    short = ram(1, Holder(name="postgres", pid=7, held_bytes=90))
    assert told(FakeEngine(), [], short) == [
        ("RAM: 1 B of 100 B are free", "end postgres (pid 7), or serve with a smaller --ram")
    ]


def test_what_holds_now_is_not_told_again_as_a_line_of_the_log() -> None:
    heard, engine = LogNotices(), FakeEngine()
    info = msgspec.structs.replace(engine.info, lowered=["x = 1"])
    for text in ("lowered to fit in memory: x = 1", "another"):
        heard.emit(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING}))
    found = notices(engine, info, None, [], [], heard)
    assert [notice.text for notice in found] == ["lowered to fit in memory: x = 1", "another"]
    assert found[0].fix


def test_warnings_of_the_log_are_kept_without_paths_and_bounded() -> None:
    heard, logger = LogNotices(), logging.Logger("x")
    logger.addHandler(heard)
    logger.info("nothing")
    for number in range(30):
        logger.warning("%d: cannot read /srv/models/secret.gguf", number)
    logger.error("it ended [HF411] " + "x" * 9999)
    assert len(heard.kept) == 20
    assert heard.kept[0].text == "11: cannot read (a file)"
    assert (heard.kept[0].fix, heard.kept[-1].fix) == (None, "holdfast explain HF411")
    assert (heard.kept[-1].level, len(heard.kept[-1].text) < 500) == ("error", True)


def test_this_machine_is_looked_at() -> None:
    (found,) = look([], "ram")
    assert 0 < found.free_bytes < found.total_bytes
    assert found.ours


def test_of_several_gpus_the_engine_is_on_one_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {0: (GpuProcess(7, "comfy", 30), GpuProcess(8, "quake", None)), 1: (GpuProcess(5, "python", 60),)}
    gpus = tuple(
        NvidiaGpu(index=index, uuid=str(index), name="L4", total_bytes=100, free_bytes=40, processes=processes)
        for index, processes in held.items()
    )
    monkeypatch.setattr("holdfast.server.ui.machine.probe", lambda: NvidiaMachine(gpus=gpus))
    first, second = look([5], "vram")[1:]
    assert (first.name, first.ours, second.ours) == ("GPU 0: L4", False, True)
    assert [(one.name, one.held_bytes) for one in first.holders] == [("comfy", 30), ("quake", None)]
    assert second.holders == []
    # In a container the driver's pids are others: the engine takes the first.
    assert [tier.ours for tier in look([99], "vram")] == [True, True, False]
    assert len(look([5], "ram")) == 1


async def test_a_look_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.server.ui.machine.FIRST_LOOK_S", 0.01)
    go_on, looks = threading.Event(), []

    def hang(own_pids: object, tier: str) -> list[MachineTier]:
        looks.append(tier)
        go_on.wait(30)
        return [ram()]

    watch = MachineWatch(hang)
    assert await watch.tiers([], "ram") == await watch.tiers([], "ram") == []
    go_on.set()
    while not (found := await watch.tiers([], "ram")):
        await asyncio.sleep(0.01)
    assert (found, looks) == ([ram()], ["ram"])


async def test_adapters_are_told_with_what_they_do_and_without_paths() -> None:
    listed = [
        Loaded(AdapterRef(name, number, "/srv/x", ""), "/srv/models/base", None, 0) for number, name in enumerate("ab")
    ]
    engine = FakeEngine()
    await engine.start()
    engine.stats = lambda: EngineStats(running_adapters=["b"])  # type: ignore[method-assign]
    settings = ServerSettings(served_model_names=("m",), adapters=SimpleNamespace(listed=listed))  # type: ignore[arg-type]
    state = await StateKeeper(engine, settings, metrics()).state()
    assert [(one.name, one.base, one.running) for one in state.adapters] == [("a", "base", False), ("b", "base", True)]
    assert b"/srv" not in msgspec.json.encode(state.adapters)


async def test_all_that_ask_within_a_second_share_one_look() -> None:
    engine = FakeEngine()
    await engine.start()
    keeper = StateKeeper(engine, ServerSettings(served_model_names=("m",)), metrics())
    keeper._machine = MachineWatch(lambda own_pids, tier: [ram(50, Holder(name="x", pid=1, held_bytes=2))])
    asked = []
    engine.memory = lambda: asked.append(1)  # type: ignore[method-assign]
    keeper.history.take()
    asked.clear()
    first, second = await keeper.state(), await keeper.state(since=1, names_holders=False)
    assert len(asked) == 1
    assert (len(first.history.samples), len(second.history.samples)) == (1, 0)
    assert (len(first.machine[0].holders), second.machine[0].holders) == (1, [])
    assert first.server.status == "ready"
    assert first.model is not None
    assert first.model.can_chat


@pytest.mark.parametrize(
    ("client", "headers", "near"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, True),
        ("127.0.0.1", {"host": "localhost:8000"}, True),
        ("::1", {"host": "[::1]:8000"}, True),
        (None, {"host": "localhost"}, True),  # A Unix domain socket.
        ("10.0.0.7", {"host": "127.0.0.1:8000"}, False),
        ("127.0.0.1", {"host": "rebound.example:8000"}, False),
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"host": "[::1"}, False),
        ("127.0.0.1", {"host": "localhost", "origin": "https://elsewhere.example"}, False),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "10.0.0.7"}, False),
    ],
)
def test_names_of_processes_are_told_to_this_machine_alone(
    client: str | None, headers: dict[str, str], near: bool
) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked = Request({"type": "http", "client": client and (client, 9), "headers": pairs})
    assert _is_near(asked) == near
