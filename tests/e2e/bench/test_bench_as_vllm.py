"""`holdfast bench serve`, `throughput` and `latency`: vLLM's words, vLLM's result keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    for words in (
        ("--profile",),
        ("--dataset-name", "sonnet"),
        ("--dataset-name", "sharegpt"),
        ("--dataset-name", "hf", "--dataset-path", "likaixin/InstructCoder", "--hf-split", "train"),
        ("--dataset-name", "random-mm", "--random-mm-base-items-per-request", "2"),
        ("--backend", "openai-embeddings"),
        ("--self-timed",),
        ("--extra-body", "[1]"),
        ("--extra-body", "[" * 100_000),
        ("--chat-template-kwargs", "yes"),
    ):
        assert serve("http://127.0.0.1:9", "--num-prompts", "1", *words) == 2  # Before a server is asked.
        said = capsys.readouterr().err
        assert words[0] in said
        assert "fix:" in said
    with running_fake() as fake:
        assert serve(fake.url, "--num-prompts", "1", "--goodput", "fast") == 2
    assert "--goodput" in capsys.readouterr().err
    for words in (
        ("throughput", "--profile"),
        ("throughput", "--dataset-name", "hf"),
        ("latency", "--use-beam-search"),
    ):
        assert main(["bench", *words]) == 2
        assert words[1] in capsys.readouterr().err


def test_datasets_of_files_are_sent_as_the_server_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake counts two tokens for three letters, and seven more for a prompt."""
    poem = tmp_path / "sonnet.txt"
    poem.write_text("".join(f"line {at:03} of a poem that has many of them\n" for at in range(60)))
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0.2 * at, "input_length": 64, "output_length": 4, "hash_ids": [1, 2, at]} for at in range(3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running_fake() as fake:
        words = ("--num-prompts", "3", "--save-result", "--save-detailed", "--result-dir", str(tmp_path))
        of_poem = ("--dataset-name", "sonnet", "--dataset-path", str(poem), "--num-warmups", "1")
        assert serve(fake.url, *words, *of_poem, "--result-filename", "s.json", "--backend", "openai-chat") == 0
        of_trace = ("--dataset-name", "timed_trace", "--dataset-path", str(trace))
        assert serve(fake.url, *words, *of_trace, "--result-filename", "t.json") == 0
        asked = [one for one in fake.close()["asked"] if one.get("stream")]
    capsys.readouterr()
    found = json.loads((tmp_path / "s.json").read_text())
    assert all(500 <= length <= 555 for length in found["input_lens"])
    assert found["output_lens"] == [150] * 3
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["output_lens"] == [4] * 3
    assert found["input_lens"] == pytest.approx([64] * 3, rel=0.2)
    assert [later - found["start_times"][0] for later in found["start_times"]] == pytest.approx([0, 0.2, 0.4], abs=0.15)
    first, second = (one["prompt"].split() for one in asked[-2:])
    assert first[: len(first) // 2] == second[: len(first) // 2]
    assert asked[-1]["ignore_eos"]


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
        self.lengths: list[int] = []
        made.append(self)

    def get_tokenizer(self) -> QuickEngine:
        return self

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[object]:
        from types import SimpleNamespace

        self.batches.append(len(prompts))
        self.lengths = [one.max_tokens for one in (params if isinstance(params, list) else [params])]
        answer = SimpleNamespace(token_ids=[1, 2, 3])
        ids = [self.encode(one) if isinstance(one, str) else one["prompt_token_ids"] for one in prompts]
        return [SimpleNamespace(prompt_token_ids=one, outputs=[answer]) for one in ids]


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


def test_throughput_takes_vllms_datasets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.LLM", QuickEngine, raising=False)
    talks, poem, burst = tmp_path / "talks.json", tmp_path / "poem.txt", tmp_path / "burst.csv"
    turns = [{"value": "a question of six words here"}, {"value": "an answer of five words"}]
    talks.write_text(json.dumps([{"conversations": turns}]))
    poem.write_text("one line of a poem\n" * 20)
    burst.write_text("Model,Request tokens,Response tokens\nGPT-4,11,6\n")

    def lengths(*words: str) -> tuple[list[int], int]:
        assert main(["bench", "throughput", "--model", "m", "--num-prompts", "4", *words]) == 0
        said = capsys.readouterr().out
        return made[-1].lengths, int(said.rpartition("prompt tokens:")[2].split()[0])

    of_talks = ("--dataset-name", "sharegpt", "--dataset-path", str(talks))
    assert lengths(*of_talks) == ([5] * 4, 24)
    assert lengths(*of_talks, "--output-len", "9", "--no-oversample") == ([9], 6)
    assert lengths("--dataset-name", "sharegpt", "--async-engine") == ([128] * 4, 4 * 1024)  # As vLLM: no file.
    made_of_lines, tokens = lengths(
        "--dataset-name", "sonnet", "--dataset-path", str(poem), "--input-len", "60", "--prefix-len", "20"
    )
    assert made_of_lines == [150] * 4
    assert 4 * 50 < tokens <= 4 * 60
    assert lengths("--dataset-name", "burstgpt", "--dataset-path", str(burst)) == ([6] * 4, 44)
    repeated = ("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2")
    assert lengths(*repeated) == ([128] * 4, 4 * 512)
    some, tokens = lengths("--random-range-ratio", "0.5", "--input-len", "100", "--output-len", "20")
    assert all(10 <= length <= 30 for length in some)
    assert 200 <= tokens <= 600


def test_throughput_measures_as_many_requests_as_were_asked_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.LLM", QuickEngine, raising=False)
    mixed, texts = tmp_path / "mixed.jsonl", tmp_path / "texts.jsonl"
    rows = [{"prompt": "a text"}, {"messages": [{"role": "user", "content": "a message"}]}]
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text(json.dumps(rows[0]) + "\n")
    words = ("bench", "throughput", "--model", "m", "--dataset-name", "custom", "--num-prompts", "6", "--dataset-path")
    opened = len(made)
    assert main([*words, str(mixed)]) == 2
    said = capsys.readouterr().err
    assert "lists of messages" in said
    assert "--backend openai-chat" in said
    assert len(made) == opened  # Told before a model is loaded.
    assert main([*words, str(texts)]) == 0
    assert made[-1].batches == [6]
    assert main(["bench", "throughput", "--model", "m", "--num-prompts", "0"]) == 2
    assert "--num-prompts: must be a whole number, 1 or more" in capsys.readouterr().err
