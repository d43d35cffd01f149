"""`holdfast ps` and `holdfast top` of a server with weights over VRAM and RAM: how the link and experts were used."""

from __future__ import annotations

import asyncio

import msgspec

from holdfast.cli.commands.running.ps import lines
from holdfast.cli.servers.state_screen import ServerLook, screen_lines
from holdfast.engine.fake import FakeEngine
from holdfast.observability.ledger import Ledger
from holdfast.records import ExpertUse, LinkUse
from holdfast.server.ui.state import AdapterState, HistoryState, LoadState, RequestsState, ServerState, UiState

HITS = "experts: 75% of uses found in VRAM; 20% computed by the CPU"
COPIED = "link ram-vram: 9.31 GiB copied at 50.0 GB/s of 55.0"


def a_state(adapters: list[AdapterState]) -> UiState:
    return UiState(
        server=ServerState(id="1", version="9.9", status="ready", progress="", uptime_s=5.0, restarts=0),
        model=None,
        load=LoadState(
            running=0, waiting=0, prompt_tokens_total=0, generation_tokens_total=0, preemptions_total=0,
            prefix_hit_share=None,
        ),
        memory=None,
        machine=[],
        requests=RequestsState(open=0, shown=[]),
        adapters=adapters,
        notices=[],
        time_s=0.0,
        history=HistoryState(interval_s=5.0, newest=0, fields=[], samples=[]),
    )  # fmt: skip


def used() -> Ledger:
    engine = FakeEngine()
    asyncio.run(engine.start())
    ledger = engine.memory()
    assert ledger is not None
    link = LinkUse(copied_bytes=10**10, busy_s=0.2, over_s=1.0, possible_bytes_per_s=55e9)
    return msgspec.structs.replace(ledger, links=[link], experts=ExpertUse(pairs=80, hits=60, host_pairs=16))


def test_in_a_list_of_servers() -> None:
    answer = {"url": "http://here", "status": "ready", "reason": None, "memory": msgspec.to_builtins(used())}
    shown = "\n".join(lines(answer))
    assert HITS in shown
    assert COPIED in shown


def test_adapters_that_run_and_the_last_decisions_are_on_the_screen() -> None:
    memory = msgspec.structs.replace(used(), decisions=[f"setting_{at} = {at} (said so)" for at in range(9)])
    adapters = [AdapterState(name=f"a{at:02}", base="m", running=at == 9, waiting=False) for at in range(10)]
    state = a_state(adapters)
    look = ServerLook(url="http://here", status="ready", reason="", memory=memory, state=state)
    shown = [line.plain for line in screen_lines(look, width=100)]
    at = shown.index("  LoRA adapters: 10")
    assert shown[at + 1] == "    a09  running, of m"
    assert shown[at + 9] == "    and 2 more: --json has them"
    at = shown.index("  decisions: 9")
    assert shown[at + 1] == "    3 before these: holdfast ps -v has them"
    assert shown[at + 7] == "    setting_8 = 8 (said so)"


def test_on_the_screen_within_its_width() -> None:
    look = ServerLook(url="http://here", status="ready", reason="", memory=used())
    shown = [line.plain for line in screen_lines(look, width=100)]
    assert any(HITS in line for line in shown)
    assert any(COPIED in line for line in shown)
    narrow = [line.plain for line in screen_lines(look, width=40) if "experts" in line.plain]
    assert narrow
    assert all(len(line) <= 40 for line in narrow)
