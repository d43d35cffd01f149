"""A server with a store of KV pages on disk, killed and started again: what was asked twice is not computed again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from deadlines import PATIENCE_S

from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.uses import _read_header
from holdfast.prefix_store.inspection import StoreInspection

PAGE_TOKENS = 16
PROMPT = "The keeper of the lighthouse wrote down every ship that passed. " * 24


def ask(server, prompt: str = PROMPT) -> tuple[str, int]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def kill(server) -> None:
    """The front end and its engine, at once and without a word."""
    front = psutil.Process(server.process.pid)
    for process in (*front.children(recursive=True), front):
        process.kill()
    server.process.wait(PATIENCE_S)


def stored_tokens(folder: Path) -> int:
    """Whose pages whoever opens the store would find."""
    with StoreInspection(folder) as store:
        return PAGE_TOKENS * sum(model.pages for model in store.listing().models)


def noted_tokens(folder: Path) -> int:
    """Whose first use is on the disk."""
    found = 0
    for path in folder.glob("*.uses"):
        with path.open("rb") as file:
            found += PAGE_TOKENS * _read_header(file.fileno(), Calls())[0]
    return found


def until(good: Callable[[], bool]) -> None:
    """What is written behind is written."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not good():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_prefix_outlives_a_server_that_is_killed(start_server, tiny_arguments, tmp_path: Path) -> None:
    store = ["--kv-store", str(tmp_path / "kv"), "--kv-store-size", "64MiB", "--enable-prompt-tokens-details"]
    first = start_server(*tiny_arguments, *store).wait_ready()
    text, cached = ask(first)
    assert cached == 0
    again, cached = ask(first)
    assert (again, cached > 200) == (text, True)
    until(lambda: stored_tokens(tmp_path / "kv") >= cached)
    ask(first, "Anything else.")  # The numbers are those of the last step.
    assert first.metric("holdfast:kv_store_bytes") > 0
    kill(first)

    second = start_server(*tiny_arguments, *store).wait_ready()
    # Told before a first step.
    assert httpx.get(f"{second.url}/memory", timeout=PATIENCE_S).json()["kv_store"]["held_bytes"] > 0
    after, found = ask(second)
    assert (after, found) == (text, cached)
    names = ("vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total")
    queries, hits = second.metrics(*names)
    assert queries >= hits == found
    (by_tier,) = second.metrics("holdfast:kv_tier_hit_tokens_total")
    assert by_tier == found
    page = httpx.get(f"{second.url}/metrics", timeout=PATIENCE_S).text
    by_source = {line.partition('source="')[2] for line in page.splitlines() if "by_source_total{" in line}
    assert {f'external_kv_transfer"}} {found:.1f}', 'local_cache_hit"} 0.0'} <= by_source
    loaded, of_all_tiers = second.metrics("holdfast:kv_tier_loaded_bytes_total", "vllm:kv_offload_load_bytes_total")
    assert loaded == of_all_tiers > 0
    memory = httpx.get(f"{second.url}/memory", timeout=PATIENCE_S).json()
    (disk,) = memory["kv_tiers"]
    assert (disk["tier"], disk["hit_tokens_total"]) == ("disk", found)
    assert memory["kv_store"]["total_bytes"] == 64 << 20
    assert str(tmp_path) not in str(memory["kv_store"])
    assert any(line.startswith("kv_store = ") for line in memory["decisions"])
    assert "kv_store" in {term["term"] for term in memory["terms"]}
    # Another salt is another tenant.
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "cache_salt": "another"}
    answer = httpx.post(f"{second.url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
    assert not (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")


def test_a_prefix_that_was_asked_once_before_a_restart_is_written_when_it_is_asked_again(
    start_server, tiny_arguments, tmp_path: Path
) -> None:
    store = ["--kv-store", str(tmp_path / "kv"), "--kv-store-size", "64MiB", "--enable-prompt-tokens-details"]
    by_itself = ["--idle-release", "60", "--yield-to-neighbours"]
    texts, found = [], []
    # Written behind: first what was used, then the pages.
    for written in (noted_tokens, stored_tokens, stored_tokens):
        server = start_server(*tiny_arguments, *store, *by_itself).wait_ready()
        said = server.log
        assert f"Decision: kv_store = 64.00 MiB in {tmp_path / 'kv'}, 640.00 MiB written a day at most (set)" in said
        assert "Decision: idle_release = 60 s (set)" in said
        assert "Decision: yield_to_neighbours = on (set)" in said
        text, cached = ask(server)
        texts.append(text)
        found.append(cached)
        until(lambda written=written: written(tmp_path / "kv") > 200)
        kill(server)
    assert texts[0] == texts[1] == texts[2]
    assert found[:2] == [0, 0]
    assert found[2] > 200
