"""Logs in, lines worth reading out: files, gz, standard input, in bounded memory and at the speed of a copy.

A log of gigabytes says the same few things over and over. A line that was seen before, its digits aside, and meant
nothing then, is passed over by one look into a set; only lines that are new or meant something are read.

    block ─► split ─► same, without digits ─► seen and meant nothing? ─► could any rule care? ─► keep(Line)
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from holdfast.doctor.lines import LONGEST, Line, read_line
from holdfast.doctor.rulebook import rulebook
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

BLOCK_BYTES = 1024 * 1024
KEYS_HELD = 60_000
KEY_BYTES = 300
"""Longer lines are looked at each time: together the keys held stay under 30 MB."""
STORM_LINES = 2000
"""Of one kind that are read; more of the same tell nothing new."""
UNREADABLE = "HFD90"
_GZIP = 31
"""zlib's word for a stream with a gzip header."""

_DIGITS = b"0123456789abcdef"
"""And letters of hex, so that ids make no line a new one."""
_PROMPTS = ("Received request", "Added request", "prompt:")
"""Words of a user, which are no words of the engine."""
_ERRORS = (
    "rror",
    "ERROR",
    "xception",
    "raceback",
    "File ",
    "FATAL",
    "CRITICAL",
    "ault",
    "dumped",
    "Abort",
    "panick",
    "--> ",
)


class Sift:
    """Blocks of bytes in, lines to `keep`, which answers whether the line meant anything. Valid until `close`."""

    def __init__(self, keep: Callable[[Line], bool]) -> None:
        self._keep = keep
        self._nothing: set[bytes] = set()
        self._told: dict[bytes, int] = {}
        self._rest = b""
        self._number = 0

    def feed(self, block: bytes) -> None:
        block = self._rest + block
        end = block.rfind(b"\n")
        if end < 0 and len(block) < BLOCK_BYTES:
            self._rest = block
            return
        self._rest = block[end + 1 :] if end >= 0 else b""
        self._lines(block[:end] if end >= 0 else block)

    def close(self) -> None:
        if self._rest:
            self._lines(self._rest)
            self._rest = b""

    def _lines(self, block: bytes) -> None:
        raw = block.split(b"\n")
        keys = block.translate(None, _DIGITS).split(b"\n")
        nothing = self._nothing
        for at in [at for at, key in enumerate(keys) if key not in nothing]:
            self._look(raw[at], keys[at], self._number + at + 1)
        self._number += len(raw)

    def _look(self, raw: bytes, key: bytes, number: int) -> None:
        if key in self._nothing:  # Since the block began.
            return
        meant = False
        text = raw[:LONGEST].decode("utf-8", "replace")
        if worth_reading(text):
            for part in text.split("\r"):  # A progress bar draws itself over and over in one line.
                if part:
                    meant = self._keep(read_line(part, number)) or meant
        if len(key) > KEY_BYTES:
            return
        if meant:
            times = self._told.get(key, 0) + 1
            if len(self._told) < KEYS_HELD:
                self._told[key] = times
            if times < STORM_LINES:
                return
        if len(self._nothing) >= KEYS_HELD:
            self._nothing.clear()
        self._nothing.add(key)


def worth_reading(text: str) -> bool:
    """Whether any rule could care, or it looks like an error that none knows."""
    known = any(word in text for word in _ERRORS) or rulebook().anything.search(text) is not None
    return known and not any(word in text[:400] for word in _PROMPTS)


def blocks(source: str) -> Iterator[bytes]:
    """Of a file, a gz file (however it is called), or `-`: standard input."""
    with contextlib.ExitStack() as stack:
        try:
            stream: IO[bytes] = sys.stdin.buffer if source == "-" else stack.enter_context(Path(source).open("rb"))
            raw = iter(lambda: stream.read(BLOCK_BYTES), b"")
            first = next(raw, b"")
            if first.startswith(b"\x1f\x8b"):
                yield from _inflated(chain([first], raw))
            else:
                yield first
                yield from raw
        except (OSError, zlib.error) as error:
            raise ConfigurationError(
                f"the log {shorten(source)} cannot be read", code=UNREADABLE, needed="a file, or - for standard input",
                found=str(error), field="log", fix="holdfast doctor server.log; kubectl logs POD | holdfast doctor -",
            ) from error  # fmt: skip


def _inflated(compressed: Iterable[bytes]) -> Iterator[bytes]:
    """Block by block, so that no huge file is ever held; one that was cut short ends early."""
    unpack = zlib.decompressobj(_GZIP)
    for piece in compressed:
        rest = piece
        while rest:
            yield unpack.decompress(rest, BLOCK_BYTES)
            rest = unpack.unconsumed_tail
            if unpack.eof:
                rest, unpack = unpack.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP)
