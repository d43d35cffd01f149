"""/metrics after known traffic over a real engine process: exact, however an answer ends."""

from __future__ import annotations

import asyncio
import time

import httpx
import psutil
import pytest
from deadlines import PATIENCE_S
from standing_still import StandingStill, stopped


@pytest.fixture(scope="module")
def standing_still(tmp_path_factory: pytest.TempPathFactory) -> StandingStill:
    return StandingStill(tmp_path_factory.mktemp("standing-still"))


@pytest.fixture(scope="module")
def server(module_server, endless_arguments, standing_still: StandingStill):
    """Of all tests here, in their order: the first finds it unused."""
    return module_server(*endless_arguments, environment=standing_still.environment).wait_ready()


def ask(server, **changes: object) -> dict:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True} | changes
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


STEPS = ("vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum")
PER_ANSWER = (
    "e2e_request_latency",
    "request_queue_time",
    "request_prefill_time",
    "request_decode_time",
    "request_inference_time",
)


def test_values_after_known_traffic(server) -> None:
    text = ask(server)["choices"][0]["text"]
    assert server.metrics(*STEPS) == [40, 3 + 39]  # 3 prompt tokens, then 39 times one

    stop = text[len(text) // 2 :][:4]
    stopped = ask(server, stop=[stop], max_tokens=60_000)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    length = stopped["usage"]["completion_tokens"]
    assert 0 < length < 40
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    # The engine hears of the stop a little later, and may have taken a step or some more by then.
    steps, tokens = server.metrics(*STEPS)
    assert length <= steps - 40 < 60_000
    assert tokens == 42 + 3 + (steps - 40) - 1

    ask(server, prompt=list(range(100, 140)), max_tokens=5, n=2)
    for name in PER_ANSWER:
        assert server.metric(f"vllm:{name}_seconds_count") == 4, name
    assert server.metric("vllm:request_success_total") == 4
    assert server.metric("vllm:prompt_tokens_total") == 3 + 3 + 40
    assert server.metric("vllm:generation_tokens_total") == 40 + length + 10
    assert server.metric("vllm:request_generation_tokens_sum") == 40 + length + 10
    assert server.metric("vllm:time_to_first_token_seconds_count") == 3
    assert server.metric("vllm:inter_token_latency_seconds_count") == 39 + length - 1 + 2 * 4
    assert server.metric("vllm:prefix_cache_queries_total") == 3 + 3 + 2 * 40
    assert server.metric("vllm:prefix_cache_hits_total") == 32  # the second answer finds the first one's two blocks
    assert server.metric("vllm:num_preemptions_total") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_adds_no_step(server) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    names = (*STEPS, "vllm:e2e_request_latency_seconds_count")
    before = server.metrics(*names)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
    server.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    steps, tokens, whole = (now - then for now, then in zip(server.metrics(*names), before, strict=True))
    assert (tokens, whole) == (3 + steps - 1, 0)


def test_times_go_on_over_a_death(server, standing_still: StandingStill) -> None:
    """The answer began when the first engine began it, not when the second did."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}
    names = ("request_queue_time", "request_prefill_time", "e2e_request_latency")
    names = tuple(f"vllm:{name}_seconds_sum" for name in names)
    before = server.metrics(*names)
    standing_still.ask_for(100)  # In the middle of the answer, however slow the test is.
    asked_s = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line)
        first_s = time.monotonic() - asked_s
        asyncio.run(stopped([psutil.Process(server.engine_pid)])).kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert "restarting it" in server.log
    queued_s, prefilled_s, whole_s = (now - then for now, then in zip(server.metrics(*names), before, strict=True))
    assert 0 < queued_s + prefilled_s <= first_s
    assert whole_s > first_s
