"""Numbers after known traffic: exact in /metrics and in the access log."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from holdfast.engine.fake import FakeEngine


def samples(http) -> dict[str, float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model_name", None) != "fake" or labels.pop("engine", "0") != "0":
                continue
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


def test_values_after_known_traffic(launch):
    server = launch(FakeEngine(max_num_seqs=2))
    with server.client() as http:
        before = samples(http)
        assert before["vllm:request_success_total{finished_reason=stop}"] == 0
        # 40 prompt tokens, 41 generated (with the end); then the same cut at 5, two answers; then 3 prompts of 1.
        http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 100})
        http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 5, "n": 2})
        http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True})
        http.post("/v1/completions", json={"prompt": "x", "temperature": -1})
        after = samples(http)

    assert after["vllm:prompt_tokens_total"] == 40 + 40 + 3
    assert after["vllm:generation_tokens_total"] == 41 + 10 + 6
    assert after["vllm:request_success_total{finished_reason=stop}"] == 1 + 3
    assert after["vllm:request_success_total{finished_reason=length}"] == 2
    assert after["vllm:request_success_total{finished_reason=abort}"] == 0
    assert after["vllm:request_success_total{finished_reason=error}"] == 0
    assert after["vllm:prefix_cache_queries_total"] == 83
    assert after["vllm:prefix_cache_hits_total"] == 32
    assert after["vllm:gpu_prefix_cache_queries_total"] == 83
    assert after["vllm:gpu_prefix_cache_hits_total"] == 32
    assert after["vllm:gpu_prefix_cache_hit_rate"] == 32 / 83
    assert after["vllm:prompt_tokens_cached_total"] == 32
    assert after["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"] == 32
    assert after["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 83 - 32
    assert after["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 0
    assert after["vllm:request_prefill_kv_computed_tokens_count"] == 5
    assert after["vllm:request_prefill_kv_computed_tokens_sum"] == 83 - 32
    assert after["vllm:num_preemptions_total"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == after["vllm:gpu_cache_usage_perc"] == 0
    assert after["vllm:iteration_tokens_total_count"] == after["vllm:iteration_tokens_total_sum"] == 57
    assert after["vllm:time_to_first_token_seconds_count"] == 5
    assert after["vllm:inter_token_latency_seconds_count"] == 57 - 6
    assert after["vllm:time_per_output_token_seconds_count"] == 57 - 6
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert after[f"vllm:{name}_seconds_count"] == 6
    assert after["vllm:request_inference_time_seconds_count"] == 6
    assert after["vllm:request_prompt_tokens_count"] == 5
    assert after["vllm:request_prompt_tokens_sum"] == 83
    assert after["vllm:request_prompt_tokens_bucket{le=20.0}"] == 3
    assert after["vllm:request_generation_tokens_sum"] == 57
    assert after["vllm:request_params_max_tokens_sum"] == 100 + 5 + 3 * 16
    assert after["vllm:request_params_n_sum"] == 1 + 2 + 3
    config = next(name for name in after if name.startswith("vllm:cache_config_info"))
    assert re.search(r"block_size=16.*num_gpu_blocks=1024", config)


def test_gauges_while_requests_run_and_wait(launch):
    server = launch(FakeEngine(max_num_seqs=1))
    server.call(server.engine.pause)
    body = {"prompt": "x" * 40, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as first:
        server.until(lambda: server.engine.stats().running == 1)
        with http.stream("POST", "/v1/completions", json=body) as second:
            server.until(lambda: server.engine.stats().waiting == 1)
            during = samples(http)
            assert (during["vllm:num_requests_running"], during["vllm:num_requests_waiting"]) == (1, 1)
            assert during["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 1
            assert during["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 0
            assert during["vllm:kv_cache_usage_perc"] == 3 / 1024
            server.call(server.engine.resume)
            second.read()
        first.read()


def test_access_log(launch):
    server = launch()
    with server.client() as http:
        chat = {"messages": [{"role": "user", "content": "hello, hello, hello"}]}
        first = http.post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "mine-1"})
        http.post("/v1/chat/completions", json={**chat, "stream": True}, headers={"X-Request-Id": 'evil\\"id'})
        http.post("/v1/chat/completions", json={**chat, "model": "nobody"})
        http.post("/v1/completions", content=b"{")
        http.get("/health")
        http.get("/version")
        http.get("/nowhere")
    assert first.headers["x-request-id"] == "mine-1"
    lines = server.wait_for_lines(5)
    prompt_tokens = len("user" + "hello, hello, hello" + "assistant") + 3
    plain, streamed = lines[:2]
    assert plain["request_id"] == "mine-1"
    assert plain["id"] == first.json()["id"]
    assert (plain["method"], plain["path"], plain["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (plain["prompt_tokens"], plain["completion_tokens"], plain["cached_tokens"]) == (prompt_tokens, 20, 0)
    assert (plain["model"], plain["stream"], plain["finish_reason"]) == ("fake", False, "stop")
    assert plain["client"].startswith("127.0.0.1:")
    assert 0 <= plain["ttft_s"] <= plain["duration_s"]
    assert streamed["stream"] is True
    assert streamed["cached_tokens"] == 32
    assert re.fullmatch("[0-9a-f]{32}", streamed["request_id"])
    assert [line["status"] for line in lines] == [200, 200, 404, 400, 404]
    assert [line["completion_tokens"] for line in lines[2:]] == [None] * 3


def test_access_log_to_a_file(launch, tmp_path):
    server = launch(access_log=tmp_path / "access.jsonl")
    with server.client() as http:
        http.get("/load")
    server.stop()
    assert (tmp_path / "access.jsonl").read_text().count('"path":"/load"') == 1
