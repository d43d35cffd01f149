"""`holdfast bench serve`, `throughput` and `latency`: vLLM's words, vLLM's result keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_completions import FakeSettings, running_fake

from holdfast.cli.main import main

KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx", "latencies", "queue_times",
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}
LATENCIES = {f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "std", "p99")}


def serve(url: str, *words: str) -> int:
    return main(["bench", "serve", "--base-url", url, "--random-input-len", "60", "--random-output-len", "6", *words])


def test_a_result_has_vllms_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "gpu=none")
    with running_fake(FakeSettings(slots=2)) as fake:
        words = ("--num-prompts", "12", "--max-concurrency", "3", "--goodput", "ttft:9000", "--disable-tqdm")
        assert serve(fake.url, *words, *kept, "--tokenizer", "x", "--temperature", "0") == 0
        found = json.loads((tmp_path / "r.json").read_text())
        assert found.keys() == KEYS | LATENCIES | {"gpu"}
        assert (found["completed"], found["failed"], found["request_rate"]) == (12, 0, "inf")
        assert found["max_concurrent_requests"] <= 3
        assert found["total_output_tokens"] == 72
        assert found["total_input_tokens"] == pytest.approx(12 * 60, rel=0.15)
        assert found["request_goodput"] == pytest.approx(12 / found["duration"])
        said = capsys.readouterr().out
        assert "Successful requests:                     12" in said
        assert "Maximum request concurrency:             3" in said
        assert "P99 ITL (ms):" in said
        words = (
            "--num-prompts",
            "6",
            "--request-rate",
            "50",
            "--percentile-metrics",
            "e2el",
            "--metric-percentiles",
            "50,99.5",
        )
        assert serve(fake.url, *words, *kept, "--save-detailed", "--endpoint", "/v1/chat/completions") == 0
        asked = [one for one in fake.close()["asked"] if one.get("stream")]
    found = json.loads((tmp_path / "r.json").read_text())
    assert found.keys() == KEYS | DETAILS | {"gpu"} | {
        "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p50_e2el_ms", "p99.5_e2el_ms",
    }  # fmt: skip
    assert [len(gaps) for gaps in found["itls"]] == [5] * 6
    assert {"prompt" in one for one in asked[:12]} == {True}
    assert {"messages" in one for one in asked[12:]} == {True}
    assert asked[0]["temperature"] == 0


def test_what_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--profile",), ("--dataset-name", "sonnet"), ("--dataset-name", "sharegpt"), ("--goodput", "fast")):
        with running_fake() as fake:
            assert serve(fake.url, "--num-prompts", "1", *words) == 2
        assert words[0] in capsys.readouterr().err


def test_a_ramp_rises_with_the_number_of_requests() -> None:
    from argparse import Namespace

    from holdfast.bench.as_vllm.serve import _phases
    from holdfast.bench.load.profile import arrival_times

    for strategy, middle in (("linear", 5.5), ("exponential", 10**0.5)):
        words = Namespace(ramp_up_strategy=strategy, ramp_up_start_rps=1.0, ramp_up_end_rps=10.0, num_prompts=200)
        times = [at for at, _ in zip(arrival_times(_phases(words), 1.0, arrivals="constant"), range(200), strict=False)]
        assert 10 / (times[105] - times[95]) == pytest.approx(middle, rel=0.1)
        assert 5 / (times[199] - times[194]) == pytest.approx(10, rel=0.1)


class QuickEngine:
    """Stands in for `LLM`, which other tests run."""

    def __init__(self, model: str | None, **settings: object) -> None:
        self.model, self.settings = model, settings
        self.batches: list[int] = []
        made.append(self)

    def generate(self, prompts: list[dict[str, list[int]]], params: object, use_tqdm: bool) -> list[object]:
        from types import SimpleNamespace

        self.batches.append(len(prompts))
        answer = SimpleNamespace(token_ids=[1, 2, 3])
        return [SimpleNamespace(prompt_token_ids=one["prompt_token_ids"], outputs=[answer]) for one in prompts]


made: list[QuickEngine] = []


def test_throughput_and_latency_have_vllms_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("holdfast.LLM", QuickEngine, raising=False)
    kept = tmp_path / "r.json"
    words = ("--model", "m", "--output-json", str(kept), "--max-model-len", "512", "--input-len", "8")
    assert main(["bench", "throughput", "--num-prompts", "5", "--num-warmups", "2", *words]) == 0
    found = json.loads(kept.read_text())
    assert found.keys() == {
        "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
    }  # fmt: skip
    assert found["total_num_tokens"] == 5 * (8 + 3)
    assert (made[0].model, made[0].settings, made[0].batches) == ("m", {"max_model_len": "512"}, [2, 5])
    assert main(["bench", "latency", "--num-iters", "3", "--num-iters-warmup", "1", "--batch-size", "4", *words]) == 0
    found = json.loads(kept.read_text())
    assert found.keys() == {"avg_latency", "latencies", "percentiles"}
    assert found["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert len(found["latencies"]) == 3
    assert made[1].settings["enable_prefix_caching"] is False
    assert made[1].batches == [4] * 4
