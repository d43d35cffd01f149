"""The page over HTTP: its files and their policy, its key, its state, and that --no-ui leaves it out.

What a browser makes of it is in tests/clients/test_page.py.
"""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.server.http.paths import UI_PAGES

STATIC = files("holdfast.server.ui") / "static"
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("path", ["/", *UI_PAGES.values()])
def test_each_file_comes_with_a_policy_that_allows_nothing_inline(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["content-type"].partition(";")[0] in (
        "text/html", "text/css", "text/javascript", "image/svg+xml",
    )  # fmt: skip


def test_the_files_are_all_there_are_and_load_nothing_from_elsewhere() -> None:
    assert {path.name for path in STATIC.iterdir()} == UI_PAGES.keys()
    for name in UI_PAGES:
        text = (STATIC / name).read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|Cookie", text)
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", page)


def test_both_paths_show_the_same_page(http: httpx.Client) -> None:
    assert http.get("/").text == http.get("/ui").text
    assert http.get("/ui/").headers["location"] == "../ui"


def test_the_state_tells_all_parts_and_nothing_that_was_said(launch) -> None:
    engine = FakeEngine()
    server = launch(engine)
    server.call(engine.pause)
    body = {"messages": [{"role": "user", "content": "my secret prompt"}], "stream": True}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body):
        server.until(lambda: engine.unfinished == 1)
        answer = client.get("/ui/state")
        state = answer.json()
    assert "secret" not in answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert state["server"]["status"] == "ready"
    assert state["requests"]["open"] == 1
    assert state["requests"]["shown"][0]["id"].startswith("chatcmpl-")
    assert state["memory"]["tiers"][0]["tier"] == state["machine"][0]["tier"] == "ram"
    assert {"load", "model", "adapters", "notices", "history"} <= state.keys()
    assert len(state["history"]["fields"]) == 16


def test_a_number_that_is_none_is_refused(http: httpx.Client) -> None:
    for wrong in ("x", "-1", "1.5", "9" * 99):
        assert http.get("/ui/state", params={"since": wrong}).status_code == 400


def test_under_a_key_the_page_is_open_and_what_it_shows_is_not(launch) -> None:
    with launch(api_key="secret").client() as client:
        assert all(client.get(path).status_code == 200 for path in ("/", *UI_PAGES.values()))
        assert client.get("/ui/state").status_code == 401
        assert client.get("/ui/nothing").status_code == 401
        assert client.get("/ui/state", headers=KEY).status_code == 200


def test_without_the_page_its_paths_are_unknown(launch) -> None:
    with launch(ui=False).client() as client:
        assert {client.get(path).status_code for path in ("/", "/ui/state", *UI_PAGES.values())} == {404}
        assert "/ui/state" not in client.get("/openapi.json").json()["paths"]
    with launch(ui=False, api_key="secret").client() as client:
        assert client.get("/").status_code == 401
        assert client.get("/", headers=KEY).status_code == 404


def test_a_page_that_watches_fills_neither_log_nor_metrics(launch) -> None:
    server = launch(api_key="secret")
    with server.client() as client:
        client.get("/")
        client.get("/ui/state", headers=KEY)
        client.get("/ui/state")
        assert [(line["path"], line["status"]) for line in server.wait_for_lines(1)] == [("/ui/state", 401)]
        assert 'handler="/ui/state"' not in client.get("/metrics", headers=KEY).text


def test_names_of_other_processes_are_told_to_this_machine_alone(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.server.ui import machine

    one = machine.Holder(name="postgres", pid=7, held_bytes=1)
    tier = machine.MachineTier(tier="ram", name="RAM", total_bytes=9, free_bytes=8, ours=True, holders=[one])
    server = launch()
    monkeypatch.setattr(server._app.state.ui._machine, "_look", lambda own_pids, tier_name: [tier])
    with server.client() as client:
        assert "postgres" in client.get("/ui/state").text
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
            assert "postgres" not in client.get("/ui/state", headers={header: "9.9.9.9"}).text


def test_a_server_that_loads_says_so(launch) -> None:
    with launch(FakeEngine(start_delay_s=60), wait=False).client() as client:
        state = client.get("/ui/state").json()
    assert (state["server"]["status"], state["model"], state["memory"]) == ("loading", None, None)


def test_behind_a_prefix_it_is_the_same(launch) -> None:
    with launch(root_path="/llm").client() as client:
        assert client.get("/llm/").text == client.get("/llm/ui").text == client.get("/").text
        assert client.get("/llm/ui/state").status_code == 200
