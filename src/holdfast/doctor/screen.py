"""Finds the few lines of a block of a log that could matter, and what kind of line each is, without splitting it.

Four bytes at every second place are looked up in a table of four bytes out of each literal; the few that are there
are compared once more, exactly. Lines with the same literals in them are of one kind. Knows no rule and reads no line.

    block ─► 4 bytes at every 2nd, hashed ─► in the table? ─► the literal's other 4 bytes too? ─► lines, kinds
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy
import numpy.typing

from holdfast.doctor.literals import rarest

Integers = numpy.typing.NDArray[numpy.int64]
Words = numpy.typing.NDArray[numpy.uint32]

GRAM_BYTES = 4
LOOKED_BYTES = 64 * 1024
"""Of a line: what stands further on is not looked at."""
_TABLE_BITS = 19
_SPREAD = numpy.uint32(2654435761)
"""Knuth's, near 2**32 divided by the golden ratio."""
_SHIFT = numpy.uint32(32 - _TABLE_BITS)
_PADDING = b"\n" * 8


@dataclass(frozen=True, slots=True)
class Screened:
    """Lines in which some literal stands: where they begin and end, which they are, and of what kind."""

    starts: Integers
    ends: Integers
    numbers: Integers
    """Line ends before it."""
    kinds: numpy.typing.NDArray[numpy.uint64]
    literals: Integers
    """How many stand in it."""


class Screen:
    def __init__(self, literals: Iterable[str], *, hints: Iterable[str] = (), stops: Iterable[str] = ()) -> None:
        """Hints alone make no line worth reading, but another kind. What stands behind a stop makes no kind at all:
        it is somebody's words.
        """
        stopping = frozenset(stops)
        enough = {*literals, *stopping}
        self._literals = sorted({*enough, *hints})
        entries = sorted(
            (first, second, delta, ahead, number)
            for number, literal in enumerate(self._literals)
            for first, second, delta, ahead in _grams(literal.encode())
        )
        columns = list(zip(*entries, strict=True))
        self._firsts, self._seconds = (numpy.array(column, numpy.uint32) for column in columns[:2])
        self._deltas, self._ahead, self._numbers = (numpy.array(column, numpy.int64) for column in columns[2:])
        self._table = numpy.zeros(1 << _TABLE_BITS, numpy.bool_)
        self._table[_hashed(self._firsts)] = True
        alike = numpy.unique(self._firsts, return_counts=True)[1]
        self._alike = numpy.repeat(alike, alike)
        """Entries with the same first four bytes."""
        self._most = int(alike.max())
        self._stops = numpy.array([literal in stopping for literal in self._literals])
        self._enough = numpy.array([literal in enough for literal in self._literals])
        self._values = numpy.random.default_rng(1).integers(1, 2**63, len(self._literals), numpy.uint64)

    def lines(self, block: bytes) -> Screened:
        padded = block + _PADDING
        places, numbers = self._hits(padded)
        every = numpy.frombuffer(padded, numpy.uint8)[: len(block)]
        newlines = numpy.flatnonzero(every == 10)
        # A progress bar draws itself over and over in one line.
        breaks = numpy.flatnonzero((every == 10) | (every == 13)) if b"\r" in block else newlines
        of_line = numpy.searchsorted(breaks, places)
        begins = numpy.concatenate(([0], breaks + 1))
        near = places - begins[of_line] < LOOKED_BYTES
        places, numbers, of_line = places[near], numbers[near], of_line[near]
        said = self._before_stops(places, numbers, of_line)
        of_line, numbers = of_line[said], numbers[said]
        first = numpy.flatnonzero(numpy.diff(of_line, prepend=-1))
        lines, counts = of_line[first], numpy.diff(first, append=len(of_line))
        kinds, enough = self._values[numbers], self._enough[numbers]
        if len(first):
            kinds, enough = numpy.add.reduceat(kinds, first), numpy.logical_or.reduceat(enough, first)
        lines = lines[enough]
        starts = begins[lines]
        return Screened(
            starts=starts,
            ends=numpy.append(breaks, len(block))[lines],
            numbers=numpy.searchsorted(newlines, starts),
            kinds=kinds[enough],
            literals=counts[enough],
        )

    def _hits(self, padded: bytes) -> tuple[Integers, Integers]:
        """Where literals stand, in order, and which they are."""
        found, looked = [], []
        for shift in (0, GRAM_BYTES // 2):
            whole = (len(padded) - shift) // GRAM_BYTES
            words = numpy.frombuffer(padded[shift : shift + whole * GRAM_BYTES], numpy.uint32)
            some = numpy.flatnonzero(self._table.take(_hashed(words), mode="clip"))
            found.append(some * GRAM_BYTES + shift)
            looked.append(words[some])
        places, here = numpy.concatenate(found), numpy.concatenate(looked)
        fours = _fours(padded)
        low = numpy.minimum(numpy.searchsorted(self._firsts, here), len(self._firsts) - 1)
        known = numpy.flatnonzero(self._firsts[low] == here)
        places, low = places[known], low[known]
        high = low + self._alike[low]
        begins, numbers = [], []
        for step in range(self._most):
            some = numpy.flatnonzero(low + step < high)
            if not len(some):
                break
            entry = low[some] + step
            there = places[some] + self._deltas[entry]
            inside = (there >= 0) & (there <= len(padded) - GRAM_BYTES)
            some, entry, there = some[inside], entry[inside], there[inside]
            same = fours[there] == self._seconds[entry]
            begins.append(places[some[same]] + self._ahead[entry[same]])
            numbers.append(self._numbers[entry[same]])
        if not begins:
            return places[:0], places[:0]
        starts, which = numpy.concatenate(begins), numpy.concatenate(numbers)
        order = numpy.argsort(starts, kind="stable")
        return starts[order], which[order]

    def _before_stops(
        self, places: Integers, numbers: Integers, of_line: Integers
    ) -> numpy.typing.NDArray[numpy.bool_]:
        stops = numpy.flatnonzero(self._stops[numbers])
        if not len(stops):
            return numpy.ones(len(places), numpy.bool_)
        stopped, first = numpy.unique(of_line[stops], return_index=True)
        at = numpy.minimum(numpy.searchsorted(stopped, of_line), len(stopped) - 1)
        behind = (stopped[at] == of_line) & (places > places[stops[first]][at])
        return numpy.asarray(~behind)


def _hashed(words: Words) -> Words:
    return (words * _SPREAD) >> _SHIFT


def _fours(padded: bytes) -> Words:
    """The four bytes at every place, without a copy."""
    return numpy.ndarray((len(padded) - GRAM_BYTES + 1,), numpy.dtype("<u4"), padded, 0, (1,))


def _grams(literal: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Four bytes of it wherever it begins, at an even place or an odd one; four others to compare; how far they are
    from the ones; and how far its first byte is, where the ones begin before it.
    """
    if len(literal) < GRAM_BYTES - 1:
        raise ValueError(f"{literal!r} is too short to be looked for")
    if len(literal) > GRAM_BYTES:
        last = len(literal) - GRAM_BYTES
        at = rarest(literal, GRAM_BYTES + 1)
        other = last if at <= last // 2 else 0
        for one in (at, at + 1):
            yield _number(literal[one:]), _number(literal[other:]), other - one, 0
        return
    for byte in range(256):
        gram = _number(bytes((byte,)) + literal)
        yield gram, gram if len(literal) < GRAM_BYTES else _number(literal), int(len(literal) == GRAM_BYTES), 1
    if len(literal) == GRAM_BYTES:
        yield _number(literal), _number(literal), 0, 0
        return
    for byte in range(256):
        gram = _number(literal + bytes((byte,)))
        yield gram, gram, 0, 0


def _number(four: bytes) -> int:
    return int.from_bytes(four[:GRAM_BYTES], "little")
