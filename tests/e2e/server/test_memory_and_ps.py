"""/memory over HTTP, and `holdfast ps` that asks it: ready or not, one server or several, for people and programs."""

from __future__ import annotations

import json

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast.cli.main import main
from holdfast.engine.fake import FakeEngine


def test_memory_is_served_as_json(launch) -> None:
    server = launch(FakeEngine())
    found = httpx.get(f"{server.url}/memory", timeout=PATIENCE_S).json()
    assert found["version"] == 1
    assert found["model"] == "fake"
    assert sum(term["measured_bytes"] or 0 for term in found["terms"]) == found["tiers"][0]["measured_bytes"] > 0
    assert 'holdfast:memory_bytes{kind="measured"' in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text


def test_there_is_nothing_to_account_for_while_loading(launch) -> None:
    server = launch(FakeEngine(start_delay_s=3600), wait=False)
    refused = httpx.get(f"{server.url}/memory", timeout=PATIENCE_S)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "loading"
    assert "Retry-After" in refused.headers


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"rum": "1GiB"}, "rum"), ({}, None), ({"ram": "1GiB", "vram": "1GiB"}, None), ({"ram": "much"}, "ram"),
        ({"ram": True}, "ram"), ({"ram": 0}, "ram"), ({"vram": [1]}, "vram"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_read_is_refused(launch, asked, param) -> None:
    with launch(may_change_memory=True).client() as http:
        refused = http.post("/memory", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", ["", " ", "{}", '{"ram": null}'])
def test_a_body_without_a_budget_is_told_what_belongs_there(launch, body) -> None:
    with launch(may_change_memory=True).client() as http:
        said = http.post("/memory", content=body, headers={"content-type": "application/json"}).json()["error"]
        assert "changes one budget, and this body has none" in said["message"]
        assert "GET /memory shows the budget in force" in said["holdfast"]["fix"]


def test_a_budget_is_not_changed_by_just_anybody(http) -> None:
    refused = http.post("/memory", json={"ram": "1GiB"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_enabled")
    assert "--api-key" in refused.json()["error"]["message"]


def test_ps_shows_a_ready_server_with_its_table(launch, capsys: pytest.CaptureFixture[str]) -> None:
    server = launch(FakeEngine())
    assert main(["ps", f"127.0.0.1:{server.port}"]) == 0
    said = capsys.readouterr().out
    assert f"{server.url}  ready  fake" in said
    assert "kv_pool" in said
    assert "unaccounted" not in said
    assert main(["ps", "-v", f"127.0.0.1:{server.port}"]) == 0
    said = capsys.readouterr().out
    assert "unaccounted" in said
    assert "front (pid" in said


def test_ps_says_which_of_several_is_not_ready(launch, capsys: pytest.CaptureFixture[str]) -> None:
    ready, loading = launch(FakeEngine()), launch(FakeEngine(start_delay_s=3600), wait=False)
    assert main(["ps", "--json", ready.url, loading.url + "/v1", "http://127.0.0.1:1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [server["status"] for server in found] == ["ready", "loading", "unreachable"]
    assert found[0]["memory"]["version"] == 1
    assert found[1]["memory"] is None
    assert found[2]["reason"]


def test_ps_takes_no_nonsense_for_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "ftp://x"]) == 2
    assert "is not the address of a server" in capsys.readouterr().err
