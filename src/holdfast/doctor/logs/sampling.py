"""A log in, the lines worth reading out: in bounded memory, and at a bounded cost however much a server says.

A log of gigabytes says the same few things over and over. prefilter.py finds the lines that could matter and sorts them
into kinds; of each kind the first are read and then a few in each block, and of all kinds no more than can be paid
for, the rarest first. The end of a log, where servers die, is read whole.

    block ─► screen ─► lines of some kind ─► seldom enough? ─► Line ─► keep
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy

from holdfast.doctor.logs.line import Line, read_lines
from holdfast.doctor.logs.prefilter import LOOKED_BYTES, Integers, LinePrefilter, Screened
from holdfast.doctor.logs.source import BLOCK_BYTES, blocks
from holdfast.doctor.logs.unwrap import LOOKED, may_go_on, whole, with_what_is_near
from holdfast.doctor.rules.load import rulebook

__all__ = ["LOOKED_BYTES", "Sift", "blocks", "screen", "worth_reading"]

END_BYTES = 256 * 1024
END_LINES = 800
"""The end that is read whole: so many bytes, and of the lines in it that could matter so many."""
KIND_LINES = 60
"""Of one kind that are all read; then so many of each block:"""
BLOCK_KIND_LINES = 2
SAVED_LINES = 1000
BLOCK_LINES = 8
"""Of all kinds: each block earns so many, and what is not spent is saved for later ones."""
KINDS_HELD = 100_000
_KEPT_BYTES = 16 * 1024 * 1024
"""More than screening a block takes, all arrays together."""

_ERRORS = (
    "Error", "ERROR", "Exception", "Traceback", 'File "', "File /", "File <", "--> ", "FATAL", "CRITICAL", "Interrupt",
    "SystemExit", "StopIteration", "Segmentation fault", "core dumped", "Aborted", "Bus error", "SIGSEGV", "SIGABRT",
    "panicked at", "terminate called", "ROCm error", "HIP error", "CUDA error", "HSA_STATUS_ERROR",
    "error loading model: ", " E srv ", " E llama_", " E gguf_", " E ggml_", " E cmn ",
)  # fmt: skip
"""How errors look that no rule knows, and tracebacks."""


@cache
def screen() -> LinePrefilter:
    # The C library takes from it what to keep: else it hands its memory back after each block, to ask for it again.
    numpy.empty(_KEPT_BYTES, numpy.uint8)
    book = rulebook()
    frames = (literal for mark in book.frames for literal in mark.pattern.literals)
    quoted = (word for pattern in book.quoted for word in pattern.literals if not word.isalnum())
    return LinePrefilter((*book.literals, *_ERRORS), hints=frames, stops=quoted)


class Sift:
    """Blocks of bytes in, lines to `keep`. Valid until `close`."""

    def __init__(self, keep: Callable[[Line], object]) -> None:
        self._keep = keep
        self._screen = screen()
        self._seen: dict[int, int] = {}
        self._saved = SAVED_LINES
        self._rest = b""
        self._within = False
        """Of a line too long to be held."""
        self._number = 1

    def feed(self, block: bytes) -> None:
        if self._within:
            end = block.find(b"\n")
            if end < 0:
                return
            block = block[end:]
            self._within = False
        self._rest += block
        if len(self._rest) < BLOCK_BYTES + END_BYTES:
            return
        held = len(self._rest) - END_BYTES
        end = max(self._rest.rfind(b"\n", 0, held), self._rest.rfind(b"\r", 0, held))
        if end < 0 and b"\n" not in self._rest:
            self._read(self._rest[:LOOKED_BYTES])
            self._rest, self._within = b"", True
        elif end >= 0:
            self._read(self._rest[: end + 1])
            self._rest = self._rest[end + 1 :]

    def close(self) -> None:
        """The end of the log."""
        self._read(self._rest, ends=True)
        self._rest = b""

    def _read(self, block: bytes, *, ends: bool = False) -> None:
        found = self._screen.lines(block)
        chosen = self._chosen(found)
        if ends:
            last = numpy.arange(max(0, len(found.starts) - END_LINES), len(found.starts))
            chosen = numpy.union1d(chosen, last)
        for start, end, number in zip(
            found.starts[chosen].tolist(), found.ends[chosen].tolist(), found.numbers[chosen].tolist(), strict=True
        ):
            text = block[start : min(end, start + LOOKED_BYTES)].decode("utf-8", "replace")
            lines = read_lines(text, self._number + number)
            if len(lines) == 1 and may_go_on(lines[0]):
                lines = [self._whole(lines[0], block, start, end)]
            for line in lines:
                self._keep(line)
        self._number += found.line_ends

    def _whole(self, line: Line, block: bytes, start: int, end: int) -> Line:
        below = block[end + 1 : end + 1 + LOOKED].decode("utf-8", "replace")
        joined = whole(line, below)
        if joined is not line:
            return joined
        return with_what_is_near(line, block[max(0, start - LOOKED) : start].decode("utf-8", "replace"), below)

    def _chosen(self, found: Screened) -> Integers:
        """The lines to read, by their kinds: those seen seldom, as many as there are savings for."""
        kinds, of_line, counts = numpy.unique(found.kinds, return_inverse=True, return_counts=True)
        names = kinds.tolist()
        before = numpy.array([self._seen.get(kind, 0) for kind in names], numpy.int64)
        if len(self._seen) > KINDS_HELD:
            self._seen.clear()
        self._seen.update(zip(names, (before + counts).tolist(), strict=True))
        order = numpy.argsort(of_line, kind="stable")
        rank = numpy.empty(len(order), numpy.int64)
        rank[order] = numpy.arange(len(order)) - (numpy.cumsum(counts) - counts)[of_line[order]]
        allowed = numpy.maximum(KIND_LINES - before, BLOCK_KIND_LINES)
        chosen = numpy.flatnonzero(rank < allowed[of_line])
        self._saved = min(SAVED_LINES, self._saved + BLOCK_LINES)
        if len(chosen) > self._saved:
            seen = (before[of_line] + rank)[chosen]
            rarest = numpy.lexsort((-found.literals[chosen], seen))
            chosen = numpy.sort(chosen[rarest[: self._saved]])
        self._saved -= len(chosen)
        return chosen


def worth_reading(text: str) -> bool:
    """Whether any rule could care, or it looks like an error that none knows."""
    return any(word in text for word in _ERRORS) or rulebook().anything.search(text) is not None
