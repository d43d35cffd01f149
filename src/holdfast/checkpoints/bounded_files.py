"""Reads foreign files and JSON within bounds: never waits on what is no file, never lets a text grow far in memory.

Knows nothing of what the text says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.errors import CheckpointError
from holdfast.units import MIB, format_bytes, shorten

MAX_SMALL_FILE_BYTES = 64 * MIB
MAX_JSON_TABLES = 1 << 20
MAX_JSON_ITEMS = 1 << 22
"""A tensor's entry has three tables or lists and about eight items; four times what the largest models need."""
MAX_JSON_DIGITS = 64
"""Of a whole number. tokenizer_config.json often has one of 31; those beyond some 300 have no float, and Python prints
none beyond 4,300."""
_MANY_DIGITS = re.compile(rb"\d{%d}" % (MAX_JSON_DIGITS + 1))
_GIT_LFS_POINTER = b"version https://git-lfs"


class OutsideError(CheckpointError):
    """A link leads out of the folders that a file may come from."""


def open_file(path: Path, within: Sequence[Path] | None = None) -> BinaryIO:
    """A regular file, opened for reading without buffers; a pipe or a device is refused instead of waited for.

    `within`: folders, all links followed, in one of which the file must lie wherever links lead (None: anywhere).
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        # Of what was opened, not of what the path leads to by now.
        if within is not None and not any(map(_path_of(descriptor, path).is_relative_to, within)):
            raise OutsideError(f"{path}: a link points outside the allowed folders")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: not a file", needed="a regular file")
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _path_of(descriptor: int, path: Path) -> Path:
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # no /proc, as outside of Linux
        return path.resolve()


def read_small(
    path: Path, limit_bytes: int = MAX_SMALL_FILE_BYTES, within: Sequence[Path] | None = None
) -> bytes | None:
    """The whole file; None when there is none. `within`: as for `open_file`."""
    try:
        with open_file(path, within) as file:
            size = os.fstat(file.fileno()).st_size
            raw = b"" if size > limit_bytes else file.read(size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from error
    if size > limit_bytes:
        raise CheckpointError(
            f"{path}: implausibly large", needed=f"at most {format_bytes(limit_bytes)}", found=format_bytes(size)
        )
    refuse_pointer(path, raw)
    return raw


def refuse_pointer(path: Path, start: bytes) -> None:
    """What `git clone` leaves in place of a large file where Git LFS is not installed; 8 bytes of its start suffice."""
    if len(start) >= 8 and start.startswith(_GIT_LFS_POINTER[: len(start)]):
        raise CheckpointError(
            f"{path}: a Git LFS pointer, not the file itself",
            needed="the file that it stands for",
            found="the text that git clone writes where Git LFS is not installed",
            fix="holdfast pull OWNER/NAME, which needs no git; or, with git-lfs installed, "
            f"git lfs install && git -C {shlex.quote(str(path.parent))} lfs pull",
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON table; None when there is no such file."""
    raw = read_small(path)
    return None if raw is None else parse_table(raw, str(path))


def parse_table(raw: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON table; `unique` refuses a name that stands in one table twice."""
    _check_growth(raw, where)
    try:
        # Only where there is such a number: a function of our own for each of a million takes a second.
        whole = _short_integer if _MANY_DIGITS.search(raw) else None
        parsed = json.loads(raw, object_pairs_hook=_unique if unique else None, parse_int=whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: its JSON cannot be read", found=shorten(str(error)), fix="download the model again"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: its JSON is not an object", found=type(parsed).__name__)
    return parsed


def reason(error: Exception) -> str:
    """Why a file could not be opened or read; without its path."""
    return (error.strerror if isinstance(error, OSError) else None) or shorten(str(error)) or type(error).__name__


def spell(value: object) -> str:
    """A foreign value as a message may show it: short, and with nothing that a terminal would obey or choke on."""
    return repr(shorten(value)) if isinstance(value, str) else shorten(value)


def _check_growth(raw: bytes, where: str) -> None:
    """Two bytes of text can become a list of 56: what opens a table or parts items is counted before it is parsed."""
    tables = raw.count(b"{") + raw.count(b"[")
    items = raw.count(b",")
    if tables > MAX_JSON_TABLES or items > MAX_JSON_ITEMS:
        raise CheckpointError(
            f"{where}: its JSON has implausibly many values",
            needed=f"at most {MAX_JSON_TABLES} objects and {MAX_JSON_ITEMS} items",
            found=f"{tables} and {items}",
        )


def _short_integer(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits, and the maximum is {MAX_JSON_DIGITS}")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table
