"""vLLM's datasets out of files: which prompts, how long, when; and what is refused, with what works instead."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.bench import target
from holdfast.bench.as_vllm import datasets, serve, serve_dataset, throughput
from holdfast.bench.load.load import Load
from holdfast.bench.load.prompts import RequestMaker
from holdfast.errors import ConfigurationError


def words(text: str) -> int:
    return len(text.split())


def written(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(*given: str) -> Any:
    """What `bench serve` would send: of a server that counts a token for two characters, and five for its template."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(list(given))
    serve_dataset.check(arguments)
    found = serve_dataset.requests_of(arguments, lambda texts: (0.5, 5.0))
    load = Load(url="http://127.0.0.1:1", path="/v1/completions", **serve_dataset.load_fields(arguments, found))
    maker = RequestMaker(load)
    count = load.requests or 3
    return load, [json.loads(maker.conversation(at).ask().body) for at in range(count)]


def test_a_conversation_is_asked_as_long_as_it_was_answered(tmp_path: Path) -> None:
    def conversation(prompt: str, answer: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}

    rows = [
        conversation("a question of thirty letters", "an answer"),
        conversation("no", "too short a question"),
        conversation("a question of many letters", "x" * 5000),
        conversation("another question of letters", "an answer that is somewhat longer"),
        {"conversations": [{"from": "human", "value": "nobody answered this one"}]},
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows))
    given = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--disable-shuffle", "--num-prompts", "3")
    load, sent = asked(*given)
    assert [one["prompt"] for one in sent] == [rows[at]["conversations"][0]["value"] for at in (0, 3, 0)]  # type: ignore[index]
    assert [one["max_tokens"] for one in sent] == [4, 16, 4]
    load, sent = asked(*given[:-1], "9", "--no-oversample", "--sharegpt-output-len", "7")
    assert [one["max_tokens"] for one in sent] == [7, 7, 7]  # An answer that is too long is none then.
    assert load.requests == 3
    shuffled = [one["prompt"] for one in asked(*given[:4], "--num-prompts", "2", "--seed", "3")[1]]
    assert shuffled == [one["prompt"] for one in asked(*given[:4], "--num-prompts", "2", "--seed", "3")[1]]


def test_prompts_of_lines_may_say_how_long_each_answer_is(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", [{"prompt": f"p{at}", "output_tokens": 10 + at} for at in range(3)])
    given = ("--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "3")
    _, sent = asked(*given, "--custom-output-len", "-1")
    assert sorted((one["prompt"], one["max_tokens"]) for one in sent) == [("p0", 10), ("p1", 11), ("p2", 12)]
    assert {one["max_tokens"] for one in asked(*given)[1]} == {256}
    bad = written(tmp_path / "q.jsonl", [{"prompt": "p"}])
    with pytest.raises(ConfigurationError, match="cannot be read as custom"):
        asked("--dataset-name", "custom", "--dataset-path", bad, "--custom-output-len", "-1")


def test_benchmarks_of_speculation_are_asked_by_their_first_turn(tmp_path: Path) -> None:
    rows = [{"turns": [f"{kind} {at}", "and?"], "category": kind} for kind in ("math", "writing") for at in range(2)]
    path = written(tmp_path / "question.jsonl", rows)
    given = ("--dataset-name", "spec_bench", "--dataset-path", path, "--num-prompts", "4")
    assert sorted(one["prompt"] for one in asked(*given)[1]) == ["math 0", "math 1", "writing 0", "writing 1"]
    _, sent = asked(*given, "--spec-bench-category", "math", "--spec-bench-output-len", "9")
    assert {(one["prompt"], one["max_tokens"]) for one in sent} == {("math 0", 9), ("math 1", 9)}
    with pytest.raises(ConfigurationError, match="spec_bench"):
        asked(*given, "--spec-bench-category", "cooking")
    written(tmp_path / "throughput_1k.jsonl", [{"messages": [{"role": "user", "content": "long"}], "category": "a"}])
    folder = ("--dataset-name", "speed_bench", "--dataset-path", str(tmp_path), "--num-prompts", "1")
    _, sent = asked(*folder, "--speed-bench-dataset-subset", "throughput_1k")
    assert [(one["prompt"], one["max_tokens"]) for one in sent] == [("long", 4096)]


def test_sonnets_begin_alike_and_are_as_long_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "sonnet.txt"
    path.write_text("".join(f"line {at:03} of a poem that has many of them\n\n" for at in range(60)))
    given = ("--dataset-name", "sonnet", "--dataset-path", str(path), "--num-prompts", "5")
    _, sent = asked(*given)
    prompts = [one["prompt"] for one in sent]
    lengths = [5 + 0.5 * len(prompt) for prompt in prompts]
    assert all(500 < length <= 552 for length in lengths)
    assert len(set(prompts)) == 5
    common = prompts[0][: min(at for at, pair in enumerate(zip(*prompts, strict=False)) if len(set(pair)) > 1)]
    assert 180 < 5 + 0.5 * len(common) < 225
    assert {one["max_tokens"] for one in sent} == {150}
    assert len(asked(*given, "--input-len", "200", "--sonnet-prefix-len", "0")[1][0]["prompt"]) < 400
    for flags in (("--sonnet-input-len", "10"), ("--sonnet-prefix-len", "600")):
        with pytest.raises(ConfigurationError) as refused:
            asked(*given, *flags)
        assert flags[0] in str(refused.value)


def test_lengths_of_a_table_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = ["5,ChatGPT,1,2,3,x", "6,GPT-4,40,0,40,x", *(f"7,GPT-4,{20 + at},{5 + at},9,x" for at in range(4))]
    path.write_text(head + "\n".join(rows))
    given = ("--dataset-name", "burstgpt", "--dataset-path", str(path))
    load, sent = asked(*given, "--num-prompts", "4")
    assert sorted(load.lengths) == [(20 + at, 5 + at) for at in range(4)]
    assert [(words(one["prompt"]), one["max_tokens"]) for one in sent] == list(load.lengths)
    assert len(asked(*given, "--num-prompts", "9")[0].lengths) == 9
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="read as burstgpt"):
        asked(*given)


def test_a_trace_has_times_and_common_beginnings(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000 + 500 * at, "input_length": 40, "output_length": 3 + at, "hash_ids": [1, 2, 10 + at]}
        for at in range(3)
    ]
    path = written(tmp_path / "trace.jsonl", rows)
    given = ("--dataset-name", "timed_trace", "--dataset-path", path, "--timed-trace-sec-multiplier", "0.001")
    load, _ = asked(*given)
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in load.replay] == [
        (0.0, 40, 3), (0.5, 40, 4), (1.0, 40, 5),
    ]  # fmt: skip
    assert asked(*given, "--no-self-timed")[0].replay == ()
    found = datasets.timed_trace(
        path, 2, labels=("timestamp", "input_length", "output_length", "hash_ids"), seconds=0.001
    )
    first, second = (prompt.split() for prompt in serve_dataset.prompts_of_chunks(found, 16, 1.0))
    assert len(first) == len(second) == 40
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    with pytest.raises(ConfigurationError, match="--self-timed is of requests that have times"):
        asked("--self-timed")
    with pytest.raises(ConfigurationError, match="timed_trace"):
        asked(*given, "--timed-trace-label-input-length", "prompt")


def test_what_the_server_would_refuse_is_refused_before_a_text_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a trace may say any length: a text of it would be made first, in this process."""

    def no_text(*_: object) -> None:
        raise AssertionError("a text is made")

    poem = tmp_path / "poem.txt"
    poem.write_text("a line of a poem\n" * 9)
    row = {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]}
    trace = written(tmp_path / "trace.jsonl", [row, row | {"input_length": 100_000_000}])
    lines = written(tmp_path / "p.jsonl", [{"prompt": "p", "output_tokens": 5000}])
    monkeypatch.setattr(target, "counted_by_server", lambda load, texts: (0.5, 5.0))
    monkeypatch.setattr(target, "calibrated", lambda load: load)
    monkeypatch.setattr(serve_dataset, "prompts_of_chunks", no_text)
    monkeypatch.setattr(datasets, "sonnet", no_text)
    server = target.Target(url="http://127.0.0.1:1", model="m", max_model_len=4096)
    for words_given in (
        ("--dataset-name", "timed_trace", "--dataset-path", trace),
        ("--dataset-name", "timed_trace", "--dataset-path", trace, "--no-self-timed"),
        ("--dataset-name", "sonnet", "--dataset-path", str(poem), "--input-len", "4000"),
        ("--dataset-name", "custom", "--dataset-path", lines, "--custom-output-len", "-1"),
    ):
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        load = Load(url="http://127.0.0.1:1", path="/v1/completions")
        with pytest.raises(ConfigurationError, match="longer than the server's context"):
            serve._with_prompts(load, parser.parse_args(list(words_given)), server)


def test_prompts_that_are_too_many_to_be_held_are_refused_where_no_server_says_how_long_they_may_be(
    tmp_path: Path,
) -> None:
    long = datasets.DatasetRequests(lengths=((10**8, 1),) * 3, chunks=((1,),) * 3)
    with pytest.raises(ConfigurationError, match="would be made before the first is sent") as refused:
        serve_dataset.prompts_of_chunks(long, 16, 1.0)
    assert str(refused.value.fix).startswith("--num-prompts 2 ")
    poem = tmp_path / "poem.txt"
    poem.write_text("a line of a poem\n" * 9)
    with pytest.raises(ConfigurationError, match="would be made before the first is sent"):
        asked("--dataset-name", "sonnet", "--dataset-path", str(poem), "--input-len", "10000000")
    short = datasets.DatasetRequests(lengths=((20, 1),) * 2, chunks=((1, 2, 3), (1, 2, 4)))
    first, second = serve_dataset.prompts_of_chunks(short, 10**12, 1.0)  # As much of a chunk as there is room for.
    assert first == second
    assert words(first) == 20


def test_a_sample_of_texts_has_of_prompts_and_answers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of a prompt is a token of four characters, one of an answer a token of two."""
    counted: list[str] = []

    def tokens(load: Load, text: str) -> int:
        counted.append(text)
        return 7 + round(text.count("p") / 4 + text.count("a") / 2)

    monkeypatch.setattr(target, "_prompt_tokens", tokens)
    load = Load(url="http://127.0.0.1:1")
    pairs = [text for _ in range(4000) for text in ("p" * 60, "a" * 60)]
    each, _ = target.counted_by_server(load, pairs)
    assert 0.3 < each < 0.45
    first = counted.copy()
    assert target.counted_by_server(load, pairs)[0] == each
    assert counted == first * 2  # The same in every run.
    assert target.counted_by_server(load, ["p" * 60]) == pytest.approx((0.25, 7), abs=1)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("random", ""),
        ("sonnet", ""),
        ("prefix_repetition", "input"),
        ("sharegpt", "input"),
        ("custom", "input"),
        ("spec_bench", "input"),
        ("speed_bench", "input"),
        ("burstgpt", "input output"),
        ("timed_trace", "input output"),
    ],
)
def test_a_length_that_would_change_nothing_is_refused(name: str, kinds: str) -> None:
    checks = [(serve, serve_dataset.check), (throughput, throughput._check)]
    for command, check in checks if name in throughput.DATASETS else checks[:1]:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        for kind in ("input", "output"):
            given = ("--dataset-name", name, "--dataset-path", "no/such/file", f"--{kind}-len")
            if kind in kinds:
                with pytest.raises(ConfigurationError, match=f"--{kind}-len says nothing of --dataset-name {name}: "):
                    check(parser.parse_args([*given, "100"]))
                continue
            check(parser.parse_args([*given, "100"]))
            with pytest.raises(ConfigurationError, match=f"--{kind}-len 0"):  # Else taken for one that is not given.
                check(parser.parse_args([*given, "0"]))
        check(parser.parse_args(["--dataset-name", "custom", "--dataset-path", "f", "--output-len", "-1"]))


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_unit_of_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigurationError, match="--timed-trace-sec-multiplier"):
        asked("--timed-trace-sec-multiplier", seconds)


def test_ranges_may_differ_for_prompts_and_outputs() -> None:
    load, _ = asked("--random-range-ratio", '{"input": 0.5}', "--random-input-len", "100", "--random-output-len", "10")
    assert (load.prompt.low, load.prompt.high, load.output.low, load.output.high) == (50, 150, 10, 10)
    for text in ("1.5", "much", '{"input": 2}', "[1]"):
        with pytest.raises(ConfigurationError, match="--random-range-ratio"):
            datasets.parse_range_ratio(text)


def test_what_needs_a_download_or_pictures_is_refused_with_what_works() -> None:
    for name in datasets.REFUSED:
        with pytest.raises(ConfigurationError) as refused:
            asked("--dataset-name", name, "--dataset-path", "x", "--hf-split", "train")
        assert name in refused.value.message
        assert "--dataset-name custom" in (refused.value.fix or "") or "random" in (refused.value.fix or "")
    for name in ("sonnet", "sharegpt", "poems"):
        with pytest.raises(ConfigurationError, match=name):
            asked("--dataset-name", name)
    with pytest.raises(ConfigurationError) as refused:
        asked("--dataset-name", "sonnet", "--dataset-path", "no/such/file")
    assert "No such file" in str(refused.value)
