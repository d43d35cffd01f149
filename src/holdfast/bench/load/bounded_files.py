"""Files of prompts and of datasets, read within a bound: whole, line by line, or row by row of a JSON list. What stands
in a row is the caller's to know."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from holdfast.units import GIB, format_bytes

FILE_LIMIT_BYTES = 2 * GIB
"""ShareGPT_V3_unfiltered_cleaned_split.json, which most take, has 0.63 GiB."""


def content_of(path: str) -> bytes:
    """Raises OSError and ValueError."""
    with opened(path) as file:
        content = file.read(os.fstat(file.fileno()).st_size)
        if file.read(1):
            raise ValueError("more in it than its size says")
    return content


def opened(path: str) -> IO[bytes]:
    """Nothing but a regular file: how much any other has in it is not known before its end. Raises OSError and
    ValueError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # A pipe would be waited for.
    status = os.fstat(descriptor)
    why = "" if stat.S_ISREG(status.st_mode) else "not a regular file"
    if status.st_size > FILE_LIMIT_BYTES:
        why = (
            f"{format_bytes(status.st_size)}; at most {format_bytes(FILE_LIMIT_BYTES)} are read, which takes two to"
            " three times as much memory"
        )
    if why:
        os.close(descriptor)
        raise ValueError(why)
    return os.fdopen(descriptor, "rb")


def lines_in(content: bytes) -> Iterator[tuple[int, str]]:
    """Those with anything in them, by their numbers from 1. A line ends where a line of JSON does: other characters
    that end a line of text may stand within one."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if line.strip():
            yield number, line.decode("utf-8").rstrip("\r\n")


def rows_in(content: bytes) -> Iterator[Any]:
    """Of a JSON list, one parsed after the other: a large file at once takes several times its size. Raises ValueError
    and RecursionError."""
    try:
        rows = msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.ValidationError:  # No list.
        raise
    except msgspec.DecodeError:  # What only Python's parser takes: half of a surrogate pair, NaN.
        yield from json.loads(content)
        return
    for row in rows:
        yield json.loads(bytes(row))
