"""Through a real nginx with default proxy settings events still come one by one."""

from __future__ import annotations

import time

import httpx

from holdfast.engine.fake import FakeEngine

TOKENS, PACE_S = 20, 0.03


def test_each_event_passes_before_the_next_token_exists(launch, proxy):
    server = launch()
    url = proxy(server.port)
    server.call(server.engine.pause)
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(5):
            server.call(server.engine.step)
            assert next(lines).startswith("data: {")
        assert next(lines) == "data: [DONE]"


def test_arrival_times_are_spread_as_the_tokens_are(launch, proxy):
    server = launch(FakeEngine(token_delay_s=PACE_S))
    url = proxy(server.port)
    body = {"prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    arrivals_s = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        assert response.headers["cache-control"] == "no-cache"
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals_s.append(time.monotonic())
    assert len(arrivals_s) == TOKENS
    # The engine needs at least 19 pauses; a proxy that gathers the answer would hand over all events at once.
    spread_s = arrivals_s[-1] - arrivals_s[0]
    assert spread_s > 0.5 * (TOKENS - 1) * PACE_S, arrivals_s
