"""Every query of vLLM's public Grafana boards finds data after traffic: names, labels and groupings."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.engine.fake import FakeEngine
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings

MODEL = '{model_name="$model_name"}[$__rate_interval]'
DEPLOYMENT = '{model_name=~"$Deployment_id"}[$__rate_interval]'

# vLLM's examples: prometheus_grafana/grafana.json, then dashboards/grafana/performance_statistics.json and
# query_statistics.json. Quantiles of the same histogram stand here once.
QUERIES = [
    *[
        f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_bucket{MODEL})))"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ],
    *[
        f"rate(vllm:{name}_sum{MODEL}) / rate(vllm:{name}_count{MODEL})"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ],
    *[
        f"rate(vllm:{name}{MODEL})"
        for name in (
            "generation_tokens_total", "prompt_tokens_total", "request_decode_time_seconds_sum",
            "request_max_num_generation_tokens_sum", "request_prefill_time_seconds_sum",
            "request_queue_time_seconds_sum",
        )
    ],
    f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{MODEL}))",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{MODEL}))",
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',
    'vllm:num_requests_running{model_name="$model_name"}',
    'vllm:num_requests_waiting{model_name="$model_name"}',
    *[
        f"(sum(increase(vllm:{name}_sum[$__range])) / sum(increase(vllm:{name}_count[$__range])))"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ],
    *[
        f"histogram_quantile(0.50, sum by(le) (rate(vllm:{name}_bucket[$__range])))"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    ],
    "rate(vllm:iteration_tokens_total_count[$__interval])",
    "rate(vllm:generation_tokens_total[$__interval])",
    "rate(vllm:prompt_tokens_total[$__interval])",
    f"histogram_quantile(0.90, sum by(le, model_name) (rate(vllm:e2e_request_latency_seconds_bucket{DEPLOYMENT})))",
    f"histogram_quantile(0.90, sum by(le, model_name) (rate(vllm:request_prompt_tokens_bucket{DEPLOYMENT})))",
    f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{DEPLOYMENT}))",
    f"sum by (model_name) ( rate(vllm:request_success_total{DEPLOYMENT}) )",
    f"sum by (model_name) (rate(vllm:generation_tokens_total{DEPLOYMENT}))",
    f"sum(rate(vllm:prompt_tokens_total{DEPLOYMENT})) / sum(rate(vllm:request_success_total{DEPLOYMENT}))",
    "label_values(vllm:generation_tokens_total,model_name)",
    "label_values(vllm:request_success_total,model_name)",
]  # fmt: skip

OLDER_NAMES = [
    "vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc", "vllm:num_requests_swapped",
    "vllm:gpu_prefix_cache_hit_rate", "vllm:prefix_cache_hit_rate", "vllm:time_per_output_token_seconds_bucket",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:request_inference_time_seconds_sum", "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:cache_config_info", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total",
]  # fmt: skip

_SELECTOR = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_BY = re.compile(r"by\s*\(([^)]*)\)")


@pytest.fixture(scope="module")
def series() -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of everything /metrics says after some requests."""

    async def scene() -> str:
        engine = FakeEngine()
        await engine.start()
        app = create_app(engine, ServerSettings(served_model_names=("some/model",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=120) as http:
            for _ in range(2):
                await http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 5})
            await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
            return (await http.get("/metrics")).text

    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(asyncio.run(scene()))
        for sample in family.samples
    ]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_returns_data(series, query):
    written = query.replace("$model_name", "some/model").replace("$Deployment_id", "some/.*")
    grouped = {label.strip() for labels in _BY.findall(written) for label in labels.split(",")}
    selectors = _SELECTOR.findall(written)
    assert selectors
    for name, labels in selectors:
        wanted = _LABEL.findall(labels)
        found = [
            (its, value)
            for other, its, value in series
            if other == name
            and all(
                re.fullmatch(expected if how == "=~" else re.escape(expected), its.get(label, ""))
                for label, how, expected in wanted
            )
        ]
        assert found, f"no series for {name}"
        assert all(grouped <= its.keys() for its, _ in found), name
        # A rate of nothing is no data to a ratio or a quantile.
        if name.endswith(("_count", "_bucket", "_total")):
            assert max(value for _, value in found) > 0, name


def test_one_model_for_the_boards_own_choice(series):
    assert {labels["model_name"] for name, labels, _ in series if name.startswith("vllm:")} == {"some/model"}


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_names_of_older_boards(series, name):
    assert any(other == name for other, _, _ in series)


def test_the_hit_rate_under_all_its_names(series):
    values = {name: value for name, _, value in series}
    rate = values["vllm:prefix_cache_hits_total"] / values["vllm:prefix_cache_queries_total"]
    assert 0 < rate < 1
    assert values["vllm:prefix_cache_hit_rate"] == values["vllm:gpu_prefix_cache_hit_rate"] == rate
