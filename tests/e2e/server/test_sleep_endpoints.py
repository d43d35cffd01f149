"""/sleep, /wake_up and /is_sleeping: only where they were asked for, and nothing that could be misread."""

from __future__ import annotations

import re

import pytest

PATHS = [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]


def sleep_state(http) -> dict[str, float]:
    found = re.findall(r'vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} (\S+)', http.get("/metrics").text)
    return {state: float(value) for state, value in found}


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_nobody_sleeps_unless_it_was_allowed(http, method, path):
    response = http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "not_enabled")
    assert "--enable-sleep-mode" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=keep", "mode"),
        ("/sleep?tags=weights", "tags"), ("/wake_up?tags=weights", "tags"), ("/wake_up?level=1", "level"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(launch, path, param):
    server = launch(enable_sleep_mode=True)
    with server.client() as http:
        response = http.post(path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_open_streams_end_with_the_reason(launch):
    server = launch(enable_sleep_mode=True)
    server.call(server.engine.pause)
    with server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as stream:
            server.until(lambda: server.engine.unfinished == 1)
            assert http.post("/sleep").json() == {"status": "sleeping", "level": 1}
            assert b'"sleeping"' in stream.read()
        assert http.get("/health").json() == {"status": "sleeping"}
        assert sleep_state(http) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
        refused = http.post("/v1/completions", json={"prompt": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
        assert refused.json()["error"]["holdfast"]["fix"] == "POST /wake_up"
        assert http.post("/wake_up?tags=weights&tags=kv_cache").json() == {"status": "awake", "tags": None}
        assert sleep_state(http) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        assert http.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
