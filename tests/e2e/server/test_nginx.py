"""Through a real nginx with default proxy settings events still come one by one."""

from __future__ import annotations

import httpx
from deadlines import PATIENCE_S


def test_each_event_passes_before_the_next_token_exists(launch, proxy):
    server = launch()
    url = proxy(server.port)
    server.call(server.engine.pause)
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.headers["cache-control"] == "no-cache"
        lines = (line for line in response.iter_lines() if line)
        for _ in range(5):
            server.call(server.engine.step)
            assert next(lines).startswith("data: {")
        assert next(lines) == "data: [DONE]"
