"""Files of prompts and datasets: how large they may be, what is no file, and rows that are none, by their lines."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from holdfast.bench.as_vllm import datasets
from holdfast.bench.as_vllm.dataset_files import conversations_of, lines_of
from holdfast.bench.load import bounded_files
from holdfast.bench.load.inputs import read_prompts
from holdfast.errors import ConfigurationError
from holdfast.units import GIB

SHAREGPT_BYTES = 672_837_942
"""ShareGPT_V3_unfiltered_cleaned_split.json."""
LABELS = ("timestamp", "input_length", "output_length", "hash_ids")


def test_the_usual_file_of_sharegpt_may_be_read_and_a_larger_one_is_refused_unread(tmp_path: Path) -> None:
    sparse = tmp_path / "sharegpt.json"
    sparse.touch()
    os.truncate(sparse, SHAREGPT_BYTES)
    with bounded_files.opened(str(sparse)) as file:
        assert os.fstat(file.fileno()).st_size == SHAREGPT_BYTES
    os.truncate(sparse, 2 * GIB + 1)
    for read in (conversations_of, read_prompts, lambda path: lines_of(path, "sonnet")):
        with pytest.raises(ConfigurationError) as refused:
            read(str(sparse))
        said = "2.00 GiB; at most 2.00 GiB are read, which takes two to three times as much memory"
        assert refused.value.found == said


def test_what_has_no_size_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        for read in (conversations_of, read_prompts):
            with pytest.raises(ConfigurationError, match="cannot be read") as refused:
                read(path)
            assert refused.value.found == "not a regular file"


def test_a_large_list_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    """Of conversations of many turns two are taken. Parsed at once it took 6 times its size: one character beyond 16
    bits makes four bytes of every one."""
    turns = [{"from": "human", "value": f"{at} \U0001f600 " + "word " * 100} for at in range(20)]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns}] * 200, ensure_ascii=False))
    tracemalloc.start()
    try:
        found = conversations_of(str(path))
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [(turns[0]["value"], turns[1]["value"])] * 200
    assert most_bytes < 2 * path.stat().st_size


def test_what_only_pythons_parser_takes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = '[{"value": "half \\ud83d"}, {"value": "an answer"}]'
    path.write_text(f'[{{"conversations": {turns}, "score": NaN}}]')
    assert conversations_of(str(path)) == [("half \ud83d", "an answer")]
    for text in ('{"conversations": []}', "[" * 100_000, "", "[1"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="read as sharegpt"):
            conversations_of(str(path))


def test_a_separator_within_a_line_of_json_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one\u2028line"}\r\n\n{"prompt": "two"}\n')
    assert read_prompts(str(path)) == ("one\u2028line", "two")


@pytest.mark.parametrize(
    "row",
    [
        '{"timestamp": 0, "input_length": 1e400, "output_length": 1}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1e300}',
        '{"timestamp": 0, "input_length": true, "output_length": 1}',
        '{"timestamp": 0, "input_length": -1, "output_length": 1}',
        '{"timestamp": 1' + "0" * 400 + ', "input_length": 1, "output_length": 1}',
        '{"timestamp": Infinity, "input_length": 1, "output_length": 1}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1e308, "input_length": 1, "output_length": 1}',
        '{"timestamp": false, "input_length": 1, "output_length": 1}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1e400]}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "12"}',
        '{"timestamp": 0, "input_length": 1}',
        '{"timestamp": 0, "input_length": [1], "output_length": 1}',
        "[" * 100_000,
        "[1]",
    ],
)
def test_a_row_of_a_trace_that_is_none_is_told_with_its_file_and_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n\n' + row + "\n")
    with pytest.raises(ConfigurationError) as refused:
        datasets.timed_trace(str(path), 9, labels=LABELS, seconds=1000.0)
    assert "trace.jsonl" in refused.value.message
    assert str(refused.value.found).startswith("line 3: ")


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400, "nan", "few", "-3", "1e300", ""])
def test_a_row_of_a_table_that_is_none_is_told_with_its_line(tmp_path: Path, number: str) -> None:
    path = tmp_path / "burst.csv"
    for row in (f"GPT-4,{number},6", f"GPT-4,6,{number}"):
        path.write_text(f"Model,Request tokens,Response tokens\nGPT-4,11,6\n\n{row}\n")
        with pytest.raises(ConfigurationError) as refused:
            datasets.burstgpt(str(path), 2, seed=0)
        assert str(refused.value.found).startswith("line 4: ")


@pytest.mark.parametrize("tokens", ["true", "1e400", "0", '"many"', "null", "1" + "0" * 400])
def test_a_length_of_a_prompt_that_is_none_is_told_with_its_line(tmp_path: Path, tokens: str) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "p", "output_tokens": ' + tokens + "}\n")
    with pytest.raises(ConfigurationError) as refused:
        datasets.custom(str(path), 1, output=-1, seed=0, shuffle=False, oversample=True)
    assert str(refused.value.found).startswith("line 1: ")
    for row in ('{"prompt": [1, 2]}', '{"messages": ["no message"]}', '{"messages": {"role": "user"}}'):
        path.write_text(f'{{"prompt": "p"}}\n{row}\n')
        with pytest.raises(ConfigurationError) as refused:
            read_prompts(str(path))
        assert str(refused.value.found).startswith("line 2: ")


@pytest.mark.parametrize("text", ["[" * 100_000, "1" + "0" * 400, "true", '{"input": false}', "NaN", '{"output": []}'])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--random-range-ratio"):
        datasets.parse_range_ratio(text)
