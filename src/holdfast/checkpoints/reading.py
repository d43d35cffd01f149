"""Reads foreign files and JSON within bounds: never waits on what is no file, never lets a text grow far in memory.

Knows nothing of what the text says.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.errors import CheckpointError
from holdfast.units import MIB, format_bytes, shorten

MAX_SMALL_FILE_BYTES = 64 * MIB
MAX_JSON_TABLES = 1 << 20
MAX_JSON_ITEMS = 1 << 22
"""A tensor's entry has three tables or lists and about eight items; four times what the largest models need."""


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened for reading without buffers; a pipe or a device is refused instead of waited for."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a file", needed="a regular file")
    return open(descriptor, "rb", buffering=0)


def read_small(path: Path, limit_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes | None:
    """The whole file; None when there is none."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = b"" if size > limit_bytes else file.read(size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size > limit_bytes:
        raise CheckpointError(
            f"{path}: absurdly large", needed=f"at most {format_bytes(limit_bytes)}", found=format_bytes(size)
        )
    return raw


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON table; None when there is no such file."""
    raw = read_small(path)
    return None if raw is None else parse_table(raw, str(path))


def parse_table(raw: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON table; `unique` refuses a name that stands in one table twice."""
    _check_growth(raw, where)
    try:
        parsed = json.loads(raw, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: its JSON cannot be read", found=shorten(str(error)), fix="download the model again"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: its JSON is not a table", found=type(parsed).__name__)
    return parsed


def spell(value: object) -> str:
    """A foreign value as a message may show it: short, and with nothing that a terminal would obey or choke on."""
    return repr(shorten(value)) if isinstance(value, str) else shorten(value)


def _check_growth(raw: bytes, where: str) -> None:
    """Two bytes of text can become a list of 56: what opens a table or parts items is counted before it is parsed."""
    tables = raw.count(b"{") + raw.count(b"[")
    items = raw.count(b",")
    if tables > MAX_JSON_TABLES or items > MAX_JSON_ITEMS:
        raise CheckpointError(
            f"{where}: its JSON holds absurdly many values",
            needed=f"at most {MAX_JSON_TABLES} tables and {MAX_JSON_ITEMS} items",
            found=f"{tables} and {items}",
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table
