"""What stands in the files of vLLM's datasets, row by row, and what is said of a row that is none: its file, its line
and what is wrong. Which of the rows are asked, and how, is not known here."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from typing import Any

from holdfast.bench.load.bounded_files import content_of, lines_in, rows_in
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

MOST_TOKENS_EACH = 1 << 27
"""More no request can have."""
WRONG = (KeyError, ValueError, TypeError, OverflowError)
"""What a row raises that has not what it is asked for."""


def unreadable(path: str, name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--dataset-path: {shorten(path, 200)} cannot be read as {name}",
        needed={
            "sharegpt": "ShareGPT's JSON: a list of objects with conversations",
            "sonnet": "a text with some lines",
            "burstgpt": "BurstGPT's CSV, with Model, Request tokens and Response tokens",
            "spec_bench": "Spec-Bench's question.jsonl: lines with turns and category",
            "speed_bench": "a folder with SPEED-Bench's SUBSET.jsonl: lines with messages and category",
            "timed_trace": "lines of JSON with timestamp, input_length and output_length, or as the labels say",
        }.get(name, 'lines of JSON with "prompt", and "output_tokens" where no length is set'),
        found=shorten(why, 200),
        fix="--dataset-name random --random-input-len 1024 --random-output-len 128",
        field="dataset_path",
    )


def wrong_row(path: str, name: str, number: int, why: Exception | str) -> ConfigurationError:
    """`number`: of its line."""
    told = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return unreadable(path, name, f"line {number}: {told}")


def numbered_lines(path: str, name: str) -> list[tuple[int, str]]:
    """Those with anything in them, by their numbers from 1."""
    try:
        found = list(lines_in(content_of(path)))
        if not found:
            raise ValueError("nothing in it")
    except (OSError, ValueError) as error:
        raise unreadable(path, name, str(error)) from error
    return found


def lines_of(path: str, name: str) -> list[str]:
    return [line for _, line in numbered_lines(path, name)]


def rows_of(path: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """By the numbers of their lines."""
    for number, line in numbered_lines(path, name):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise wrong_row(path, name, number, f"{shorten(line)}: {error}") from error
        if not isinstance(row, dict):
            raise wrong_row(path, name, number, f"{shorten(line)} is no object")
        yield number, row


def table_of(path: str, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV, by the numbers of their lines."""
    numbered = numbered_lines(path, name)
    rows = csv.DictReader(line for _, line in numbered)
    try:
        for row in rows:
            yield numbered[rows.line_num - 1][0], row
    except csv.Error as error:
        raise wrong_row(path, name, numbered[rows.line_num - 1][0], error) from error


def conversations_of(path: str) -> list[tuple[str, str]]:
    """What a person said first, and what was answered."""
    try:
        pairs = [pair for row in rows_in(content_of(path)) if (pair := _two_turns(row)) is not None]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise unreadable(path, "sharegpt", str(error)) from error
    if not pairs:
        raise unreadable(path, "sharegpt", "no conversation of two turns")
    return pairs


def _two_turns(row: Any) -> tuple[str, str] | None:
    turns = row.get("conversations") or row.get("conversation") if isinstance(row, dict) else None
    first = turns[:2] if isinstance(turns, list) else []
    said = [text for turn in first if isinstance(turn, dict) and isinstance(text := turn.get("value"), str)]
    return (said[0], said[1]) if len(said) == 2 else None


def number_in(row: dict[str, Any], key: str) -> float:
    """As a number or as its text. Raises one of WRONG."""
    value = row[key]
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError(f"{shorten(key)} is {shorten(value)}")
    return number


def tokens_in(row: dict[str, Any], key: str) -> int:
    """Whole; some tables write 12.0. Raises one of WRONG."""
    number = number_in(row, key)
    if not 0 <= number <= MOST_TOKENS_EACH:
        raise ValueError(f"{shorten(key)} is {shorten(row[key])}, not 0 to {MOST_TOKENS_EACH:,} tokens")
    return int(number)
