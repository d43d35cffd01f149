"""Decision lines, log set-up, the throughput line and the start lines."""

from __future__ import annotations

import io
import json
import logging

import msgspec
import pytest

from holdfast.observability.decisions import Decision
from holdfast.observability.logs import ThroughputLog, detail_lines, json_lines, ready_lines, set_up_logging
from holdfast.observability.metrics.buckets import token_buckets
from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.records import AnswerDelta, EngineInfo, EngineStats, FinishReason, RequestTiming


def make_metrics(stats: EngineStats | None = None) -> ServingMetrics:
    return ServingMetrics("m", engines=[EngineSource(lambda: stats or EngineStats(), lambda: None)])


def value(metrics: ServingMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})


def test_decision_line():
    decision = Decision("dtype", "float32", "this CPU has no fast bfloat16", "measured")
    assert decision.line() == "dtype = float32 (measured): this CPU has no fast bfloat16"
    with pytest.raises(AttributeError):
        decision.field = "other"  # type: ignore[misc]


def test_logging_goes_to_the_stream_once_at_its_level():
    stream = io.StringIO()
    set_up_logging("warning", io.StringIO())
    set_up_logging("warning", stream)
    try:
        logging.getLogger("holdfast.x").info("quiet")
        logging.getLogger("holdfast.x").warning("loud")
        assert stream.getvalue().count("WARNING holdfast.x: loud\n") == 1
        assert "quiet" not in stream.getvalue()
    finally:
        root = logging.getLogger("holdfast")
        root.handlers.clear()
        root.propagate = True
        root.setLevel(logging.NOTSET)


def test_json_lines_stay_one_line_each():
    stream = io.StringIO()
    write = json_lines(stream)
    write({"path": "a\nb"})
    write({"path": "ü"})
    assert [json.loads(line)["path"] for line in stream.getvalue().splitlines()] == ["a\nb", "ü"]


def test_throughput_line():
    now_s = 100.0
    stats = EngineStats(
        running=2, waiting=3, blocks_total=200, blocks_used=50, prefix_queries_total=40, prefix_hits_total=10
    )
    metrics = make_metrics()
    log = ThroughputLog(metrics, lambda: stats, clock=lambda: now_s)
    metrics.count_tokens(prompt=300, generated=50)
    now_s = 110.0
    assert log.line() == (
        "Avg prompt throughput: 30.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 3 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    stats = EngineStats()
    assert log.line() is not None, "one line says that it became quiet"
    assert log.line() is None


def test_ready_lines_have_what_people_look_for():
    info = EngineInfo(
        model="smollm2",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        block_size=16,
        blocks=1024,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        prefix_caching=True,
        parameters=134_515_008,
        weights_bytes=1 << 29,
        kv_pool_bytes=1 << 30,
        attention_backend="paged (torch)",
        decisions=[
            "attention = paged (default): the only one on a CPU",
            "sampling defaults = top_p 0.9 (model)",
            "kv_store = 1 GiB in /kv, 10 GiB written a day at most (set): size: set with kv_store_size",
            "kv_store_ram = 99 MiB (planner): only one of its parts",
            "idle_release = 60 s (set): without a request for so long",
            "yield_to_neighbours = on (set): others that leave less",
        ],
    )
    text = "\n".join(ready_lines(info, ["gpt-4o"]))
    for part in (
        "# KV blocks: 1,024 of 16 tokens",
        "KV cache size: 16,384 tokens",
        "Maximum concurrency for 8,192 tokens per request: 2.00x",
        "135M parameters, dtype float32, device cpu, served as gpt-4o",
        "64 sequences, 2,048 tokens per step",
        "top_p 0.9",
        "Decision: kv_store = 1 GiB in /kv, 10 GiB written a day at most",
        "Decision: idle_release = 60 s",
        "Decision: yield_to_neighbours = on",
    ):
        assert part in text
    assert "served as" not in ready_lines(info, ["smollm2"])[0]
    for dtype, line in (
        ("bfloat16", "in fp8_e4m3: half of bfloat16's bytes"),
        ("float32", "in fp8_e4m3: a quarter of float32's bytes"),
    ):
        smaller = msgspec.structs.replace(info, dtype=dtype, kv_dtype="fp8_e4m3")
        assert f"KV cache size: 16,384 tokens, {line}" in ready_lines(smaller)
    details = "\n".join(detail_lines(info))
    for part in ("Parallel size: 1", "paged (torch)", "only one", "kv_store_ram"):
        assert part in details
        assert part not in text


def test_times_come_from_the_engine():
    metrics = make_metrics()
    meter = metrics.open_request(prompt_tokens=7, max_tokens=9, n=1)
    timing = RequestTiming(arrival_s=10.0, scheduled_s=10.5, first_token_s=12.0, finished_s=15.0)
    meter.delta(AnswerDelta(token_ids=[1]))
    meter.delta(AnswerDelta(token_ids=[2, 3], finish_reason=FinishReason.LENGTH, timing=timing))
    meter.close()
    assert value(metrics, "e2e_request_latency_seconds_sum") == 5.0
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "request_prefill_time_seconds_sum") == 1.5
    assert value(metrics, "request_decode_time_seconds_sum") == 3.0
    assert value(metrics, "request_inference_time_seconds_sum") == 4.5
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 0
    assert metrics.token_totals() == (7, 3)


def test_what_was_left_open_counts_as_aborted():
    metrics = make_metrics()
    meter = metrics.open_request(prompt_tokens=7, max_tokens=9, n=3)
    meter.delta(AnswerDelta(index=1, token_ids=[1], finish_reason=FinishReason.STOP))
    meter.close()
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 2


def test_steps_fill_the_histogram():
    metrics = make_metrics()
    for tokens in (0, 3, 300):
        metrics.observe_step(EngineStats(step_tokens=tokens))
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_sum") == 303
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 1


def test_token_buckets():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(1) == (1,)
