"""The page in a real Chromium: what is seen of memory, requests and chats, by whom, and after a server's restart.

Screenshots of a run are kept where HOLDFAST_SCREENSHOTS names a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from chromium import Chromium, Page, program
from fake_server import FakeServer

from holdfast.engine.fake import FakeEngine, say
from holdfast.engine.requests.adapters import Loaded
from holdfast.observability.ledger import ProcessMemory, make_ledger
from holdfast.records import AdapterRef, EngineInfo, EngineStats, MemoryTerm, RankMemory
from holdfast.server.run import bind
from holdfast.server.ui.machine import Holder, MachineTier
from holdfast.units import GIB

pytestmark = pytest.mark.skipif(
    program() is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)

TILES = "document.querySelectorAll('#tiles li').length === 8"
ANSWER = "#messages .assistant .said"

Launch = Callable[..., FakeServer]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def launch() -> Iterator[Launch]:
    running: list[FakeServer] = []

    def start(engine: FakeEngine | None = None, **settings: object) -> FakeServer:
        running.append(FakeServer(engine or FakeEngine(), settings))
        return running[-1].start()

    yield start
    for server in running:
        server.stop()


def keep(page: Page, name: str) -> None:
    folder = os.environ.get("HOLDFAST_SCREENSHOTS")
    if folder:
        page.screenshot(Path(folder) / f"{name}.png")


def tile(page: Page, name: str) -> str:
    parts = "[...document.querySelectorAll('#tiles li')].map((one) => [...one.children].map((part) => part.innerText))"
    tiles = page.run(parts)
    return str(dict(tiles)[name])


@contextlib.contextmanager
def streams(url: str, count: int) -> Iterator[None]:
    """So many requests stay open meanwhile."""
    opened, done = threading.Event(), threading.Event()

    async def one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        body = b'{"prompt": "hello", "max_tokens": 2000, "stream": true}'
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode() + body)
        assert b"200" in await reader.readline()
        return writer

    async def all_of_them() -> None:
        writers = await asyncio.gather(*(one() for _ in range(count)))
        opened.set()
        while not done.is_set():
            await asyncio.sleep(0.05)
        for writer in writers:
            writer.close()

    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()), daemon=True)
    thread.start()
    assert opened.wait(120)
    try:
        yield
    finally:
        done.set()
        thread.join(60)


def test_the_map_shows_what_is_planned_measured_and_free(browser: Chromium, launch: Launch) -> None:
    server = launch()
    page = browser.open(server.url + "/")
    page.wait(TILES)
    page.wait("document.querySelectorAll('.tier tbody tr').length > 5")
    page.click("#tiers summary")
    text = page.text("#tiers")
    assert "RAM" in text
    assert all(name in text for name in ("kv_pool", "front", "unaccounted", "free"))
    device, planned, measured = page.run(
        "[...document.querySelectorAll('.bar')].map(bar => [bar.getAttribute('aria-label'), bar.children.length])"
    )
    assert device[0].startswith("now: this server")
    assert planned[0].startswith("planned: ")
    assert planned[1] == 2
    assert measured[0].startswith("measured: ")
    assert page.run("document.querySelectorAll('#kv-map rect').length") == 480
    assert "of 1,024 pages" in page.text("#kv-text")
    assert page.text("#status").startswith("ready")
    assert page.problems() == []
    keep(page, "map")


def test_a_chat_streams_with_its_settings_and_its_logprobs(browser: Chromium, launch: Launch) -> None:
    engine = FakeEngine(say("Paris is <b>it</b>."), token_delay_s=0.01)
    server = launch(engine)
    page = browser.open(server.url + "/ui")
    page.wait(TILES)
    page.run("document.querySelector('#chat-form details').open = true")
    page.type("#system", "Be short.")
    page.type("#temperature", "0.3")
    page.type("#max-tokens", "64")
    page.type("#prompt", "Which <i>town</i>?")
    page.press("Enter")
    page.wait("document.querySelector('#chat-status').textContent.includes('stop')")
    # What models and people write is text, never HTML.
    assert page.text(ANSWER) == "Paris is <b>it</b>."
    assert page.text("#messages .user .said") == "Which <i>town</i>?"
    assert page.run("document.querySelectorAll('#messages b, #messages i').length") == 0
    assert "tokens/s" in page.text("#chat-status")
    params = engine.received[-1][1]
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.3, 64, 5)
    prompt = bytes(token for token in engine.received[-1][0] if token < 256).decode()
    assert "Be short." in prompt
    page.point(f"{ANSWER} .t")
    page.wait("!document.querySelector('#token').hidden")
    assert "%" in page.text("#token")
    # The same by keyboard.
    page.run("document.querySelector('#messages .assistant').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("[...document.querySelectorAll('.t')].indexOf(document.querySelector('.pointed'))") >= 1
    assert page.problems() == []
    keep(page, "chat")


def test_ranks_of_two_machines_have_a_row_each(browser: Chromium, launch: Launch) -> None:
    engine = FakeEngine()
    report = engine.info.memory
    assert report is not None
    server = launch(engine)
    ranks = [
        RankMemory(rank=rank, pid=70 + rank, threads=1, heads=2, kv_heads=1, first_layer=15 * rank, layers=15,
                   planned_weights_bytes=GIB, weights_bytes=GIB, kv_pool_bytes=2 * GIB, node=rank)
        for rank in range(2)
    ]  # fmt: skip
    info = msgspec.structs.replace(engine.info, memory=msgspec.structs.replace(report, ranks=ranks))
    server.call(lambda: setattr(engine, "memory", lambda: make_ledger(info, EngineStats(), [])))
    page = browser.open(server.url + "/")
    page.wait("document.querySelectorAll('#rank-rows tr').length === 2")
    assert page.text("#ranks-text") == "on 2 nodes; Memory is that of node 0, which serves this page"
    cells = page.run("[...document.querySelectorAll('#rank-rows tr:last-child td')].map((one) => one.textContent)")
    assert cells == ["1", "1", "71", "15 to 29", "2", "1", "1.00 GiB", "2.00 GiB", "1"]
    keep(page, "ranks")


def test_each_device_has_its_own_map(browser: Chromium, launch: Launch) -> None:
    """Two GPUs, the engine on the second, and RAM, of which nothing was planned."""
    engine = FakeEngine()
    report = engine.info.memory
    assert report is not None
    server = launch(engine)
    terms = [
        MemoryTerm(tier="vram", term=name, planned_bytes=8 * GIB, measured_bytes=8 * GIB)
        for name in ("weights", "kv_pool")
    ]
    on_gpu = msgspec.structs.replace(report, tier="vram", terms=terms, budget_bytes=20 * GIB, held_bytes=17 * GIB)
    info = msgspec.structs.replace(engine.info, memory=on_gpu)
    front = ProcessMemory(name="front", pid=1, resident_bytes=GIB, peak_bytes=GIB)
    server.call(lambda: setattr(engine, "memory", lambda: make_ledger(info, EngineStats(), [front])))
    comfy = Holder(name="comfy", pid=7, held_bytes=5 * GIB)
    tiers = [
        MachineTier(tier=tier, name=name, total_bytes=24 * GIB, free_bytes=2 * GIB, ours=ours, holders=holders)
        for tier, name, ours, holders in (
            ("ram", "RAM", True, []), ("vram", "GPU 0: L4", False, [comfy]), ("vram", "GPU 1: L4", True, [comfy]),
        )
    ]  # fmt: skip
    server._app.state.ui._machine._look = lambda own_pids, tier: tiers
    page = browser.open(server.url + "/")
    page.wait("document.querySelectorAll('.tier').length === 3")
    assert page.run("[...document.querySelectorAll('.tier h3')].map((one) => one.textContent)") == [
        "GPU 1: L4", "RAM", "GPU 0: L4",
    ]  # fmt: skip
    first, second, third = page.run("[...document.querySelectorAll('.tier > p')].map((one) => one.textContent)")
    assert first.startswith("17.0 GiB held by this server, 16.0 GiB planned, of a budget of 20.0 GiB; others hold 5.00")
    assert second.startswith("1.00 GiB held by this server; others hold 21.0 GiB")
    assert third.startswith("0 B held by this server; others hold 22.0 GiB")
    page.click(".tier summary")
    assert "comfy" in page.text(".tier")
    assert "unaccounted" in page.text(".tier")
    keep(page, "gpus")


class Wordy(FakeEngine):
    """One whose plan says things that would do harm as HTML."""

    @property
    def info(self) -> EngineInfo:
        lines = ["dtype = <img src=x onerror=alert(1)> (model): why", "max_num_seqs = 4 (planner): <b>memory"]
        return msgspec.structs.replace(super().info, decisions=lines, lowered=lines[1:])


def test_decisions_warnings_and_adapters_are_shown_as_text(browser: Chromium, launch: Launch) -> None:
    known = [Loaded(AdapterRef("<i>sql</i>", 1, "/srv/sql", ""), "base", None, 0)]
    engine = Wordy()
    server = launch(engine, adapters=SimpleNamespace(listed=known, named=lambda name: known[0].ref))
    page = browser.open(server.url + "/")
    page.wait(TILES)
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert "dtype = <img src=x onerror=alert(1)> (model): why" in page.text("#decision-list")
    assert "(planner): <b>memory" in page.text("#notice-list")
    assert "fix: " in page.run("getComputedStyle(document.querySelector('#notice-list code'), '::before').content")
    assert "holdfast plan MODEL" in page.text("#notice-list code")
    assert page.text("#adapter-list").startswith("<i>sql</i> idle, of base")
    assert page.run("[...document.querySelector('#chat-model').options].map((one) => one.value)") == [
        "fake",
        "<i>sql</i>",
    ]
    assert page.run("document.querySelectorAll('main b img, main img, #notice-list b, #adapter-list i').length") == 0
    assert page.problems() == []


def test_a_model_without_a_chat_template_completes_text(browser: Chromium, launch: Launch) -> None:
    engine = FakeEngine(say(" a time"))
    engine._tokenizer.chat_template = None
    page = browser.open(launch(engine).url + "/")
    page.wait("document.querySelector('#chat-title').textContent === 'Completion'")
    page.type("#prompt", "Once upon")
    page.press("Enter")
    page.wait("document.querySelector('#chat-status').textContent.includes('stop')")
    assert page.run(f"document.querySelector('{ANSWER}').textContent") == " a time"
    assert bytes(token for token in engine.received[-1][0] if token < 256).decode() == "Once upon"
    page.point(f"{ANSWER} .t:nth-child(2)")
    page.wait("!document.querySelector('#token').hidden")


def test_an_answer_is_stopped_and_a_refusal_is_shown(browser: Chromium, launch: Launch) -> None:
    engine = FakeEngine(say("word " * 500), token_delay_s=0.02)
    server = launch(engine)
    page = browser.open(server.url + "/")
    page.wait(TILES)
    page.type("#prompt", "Go on")
    page.press("Enter")
    page.wait(f"document.querySelector('{ANSWER}').textContent.length > 20")
    page.click("#stop")
    page.wait("document.querySelector('#chat-status').textContent.includes('stopped')")
    server.until(lambda: len(engine.aborted) == 1)
    page.type("#prompt", "x" * 20_000)
    page.press("Enter")
    page.wait("document.querySelector('.failed')?.textContent.includes('maximum context length')")
    assert page.run("document.querySelector('#send').disabled") is False


def test_a_key_is_asked_for_and_kept_in_memory_alone(browser: Chromium, launch: Launch) -> None:
    server = launch(api_key="right-key")
    page = browser.open(server.url + "/")
    page.wait("!document.querySelector('#key-form').hidden")
    assert page.run("document.activeElement.id") == "key"
    assert page.run("document.querySelector('#board').hidden") is True
    keep(page, "key")
    page.type("#key", "wrong-key")
    page.press("Enter")
    page.wait("document.querySelector('#key-problem').textContent.includes('refused')")
    page.type("#key", "right-key")
    page.press("Enter")
    page.wait(TILES)
    page.type("#prompt", "hello")
    page.press("Enter")
    page.wait("document.querySelector('#chat-status').textContent.includes('stop')")
    kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.innerHTML])"
    assert "right-key" not in page.run(kept)
    page.call("Page.reload")
    page.wait("!document.querySelector('#key-form').hidden")


def test_a_server_that_restarts_is_found_again(browser: Chromium, launch: Launch) -> None:
    first = launch()
    page = browser.open(first.url + "/")
    page.wait(TILES)
    first.stop()
    page.wait("document.querySelector('#status').dataset.status === 'unreachable'")
    assert page.run("document.body.classList.contains('stale')") is True
    launch(FakeEngine(model="another"), listener=bind("127.0.0.1", first.port), served_model_names=("second",))
    page.wait("document.querySelector('#model').textContent.startsWith('second')")
    assert page.text("#status").startswith("ready")
    assert page.run("document.body.classList.contains('stale')") is False


def test_a_thousand_running_requests_are_watched_at_ease(browser: Chromium, launch: Launch) -> None:
    server = launch(FakeEngine(say("word " * 400), max_num_seqs=1000, token_delay_s=2.0, max_model_len=8192))
    page = browser.open(server.url + "/")
    page.wait(TILES)
    page.run(
        "longest = 0; new PerformanceObserver((list) => list.getEntries().forEach((task) => {"
        " longest = Math.max(longest, task.duration) })).observe({ type: 'longtask' })"
    )
    with streams(server.url, 1000):
        page.wait("document.querySelector('#requests-text').textContent === 'the oldest 100 of 1,000'")
        assert tile(page, "running") == "1,000"
        assert page.run("document.querySelectorAll('#request-rows tr').length") == 100
        page.wait("document.querySelector('#request-rows').textContent.includes('decode')")
        began = time.monotonic()
        size = page.run("fetch('ui/state').then((answer) => answer.text()).then((text) => text.length)")
        assert size < 150_000
        assert time.monotonic() - began < 5
        assert page.run("longest") < 500  # Milliseconds that the page did not answer to anybody, while it updates.
        keep(page, "thousand")
    page.wait("document.querySelector('#requests-text').textContent === 'none'")
    assert page.problems() == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Chromium, launch: Launch) -> None:
    server = launch()
    page = browser.open(server.url + "/", width=360, height=740, phone=True)
    page.wait(TILES)
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.run("document.querySelector('header a').click()")
    page.type("#prompt", "hello")
    page.press("Enter")
    page.wait("document.querySelector('#chat-status').textContent.includes('stop')")
    keep(page, "phone")


def test_dark_and_light_follow_the_system(browser: Chromium, launch: Launch) -> None:
    server = launch()
    grounds = []
    for dark in (False, True):
        page = browser.open(server.url + "/", dark=dark)
        page.wait(TILES)
        red = page.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
        grounds.append(int(red))
        keep(page, "dark" if dark else "light")
    assert grounds[0] > 200
    assert grounds[1] < 50


def test_everything_has_a_name_and_is_reached_by_keyboard(browser: Chromium, launch: Launch) -> None:
    page = browser.open(launch().url + "/")
    page.wait(TILES)
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "textbox", "spinbutton", "combobox", "checkbox", "img", "link", "table", "region", "log"}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in wanted - {"table"} and not node.get("ignored"):
            assert node.get("name", {}).get("value"), node
    levels = page.run("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    reached = set()
    for _ in range(40):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"prompt", "send", "clear", "temperature", "system", "chat-model", "logprobs", "svg"} <= reached
