"""What a load is read from: lengths as people write them, files of prompts, logs to replay."""

from __future__ import annotations

import json
import re
from typing import Any

from holdfast.bench.load.bounded_files import content_of, lines_in, rows_in
from holdfast.bench.load.load import Arrival, LengthRange
from holdfast.errors import ConfigurationError
from holdfast.planner.inputs.traffic import read_requests
from holdfast.units import parse_tokens, shorten

NO_TIMES = "HF163"
_RANGE = re.compile(r"\s*(\d+[kKmM]?)\s*(?:-|\.\.)\s*(\d+[kKmM]?)\s*")


def parse_lengths(text: str, *, field: str) -> LengthRange:
    """`512`, or `100-1000`: drawn evenly between the two."""
    found = _RANGE.fullmatch(text)
    low, high = (found[1], found[2]) if found else (text, text)
    lengths = LengthRange(parse_tokens(low, field=field), parse_tokens(high, field=field))
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigurationError(
            f"--{field}: {shorten(text)!r} is no range of tokens",
            needed="a number of tokens from 1 on, or two with the smaller first",
            found=shorten(text),
            fix=f"--{field} 512, or --{field} 100-1000",
            field=field,
        )
    return lengths


def parse_share(text: str, *, field: str) -> float:
    """`5%` or `0.05`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigurationError(
            f"--{field}: {shorten(text)!r} is not a share",
            needed="a percentage, or a number from 0 to 1",
            fix=f"--{field} 5%",
            field=field,
        )
    return share


def read_prompts(path: str) -> tuple[Any, ...]:
    """Texts or lists of messages: one a line, as text, JSON text, or an object with `prompt`, `messages` or a batch's
    `body`; or ShareGPT's JSON list of `conversations`."""
    try:
        content = content_of(path)
        found = _conversations(content) if content[:1024].lstrip().startswith(b"[") else _lines(content)
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    if not found:
        raise _unreadable(path, "no prompt in it")
    return tuple(found)


def _unreadable(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--prompts: {shorten(path)} cannot be read",
        needed='lines of text or of JSON with "prompt" or "messages", or a ShareGPT file',
        found=shorten(why, 200),
        fix="--prompt 512 --output 128 makes prompts up",
        field="prompts",
    )


def _lines(content: bytes) -> list[Any]:
    found: list[Any] = []
    for number, line in lines_in(content):
        text = line.strip()
        if not text.startswith(("{", '"')):
            found.append(text)
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        row = row.get("body", row) if isinstance(row, dict) else row
        asked = (row.get("messages") or row.get("prompt")) if isinstance(row, dict) else row
        messages = isinstance(asked, list) and all(isinstance(message, dict) for message in asked)
        if not asked or not (isinstance(asked, str) or messages):
            raise ValueError(f"line {number}: neither prompt nor messages in {shorten(text)}")
        found.append(asked)
    return found


def _conversations(content: bytes) -> list[Any]:
    found = []
    for row in rows_in(content):
        turns = row.get("conversations") or row.get("conversation") if isinstance(row, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and isinstance(turns[0].get("value"), str):
            found.append(turns[0]["value"])
        elif isinstance(row, str):
            found.append(row)
    return found


def read_replay(source: str, *, speed: float = 1.0) -> tuple[Arrival, ...]:
    """Requests of a log at their own times, the first at 0."""
    logged = read_requests(source)
    timed = sorted((one for one in logged if one.start_s is not None), key=lambda one: one.start_s or 0.0)
    if not timed:
        raise ConfigurationError(
            f"traffic: the requests of {shorten(source)} have no times",
            code=NO_TIMES,
            needed="lines with a start, or with a time and a duration",
            found=f"{len(logged)} requests without",
            fix="--rate 4 --prompt 1000 --output 300",
            field="traffic",
        )
    first = timed[0].start_s or 0.0
    return tuple(
        Arrival(((one.start_s or 0.0) - first) / speed, max(1, one.prompt_tokens), max(1, one.output_tokens))
        for one in timed
    )
