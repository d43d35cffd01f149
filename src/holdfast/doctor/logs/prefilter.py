"""Finds the lines of a block that contain a literal of some rule, without splitting it.

Every second 4-byte window is hashed into a table of the literals' 4-grams; hits are verified. Lines with the same set
of literals are one kind. Knows no rule.

    block ─► 4 bytes at every 2nd, hashed ─► in the table? ─► the literal's other 4 bytes too? ─► lines, kinds
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy
import numpy.typing

from holdfast.doctor.rules.required_literals import rarest

Integers = numpy.typing.NDArray[numpy.int64]
Words = numpy.typing.NDArray[numpy.uint32]

GRAM_BYTES = 4
LOOKED_BYTES = 64 * 1024
"""Of a line: what stands further on is not looked at."""
_TABLE_BITS = 19
_SPREAD = numpy.uint32(2654435761)
"""Knuth's, near 2**32 divided by the golden ratio."""
_SHIFT = numpy.uint32(32 - _TABLE_BITS)


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
    line_ends: int
    """In the whole block."""


class LinePrefilter:
    def __init__(self, literals: Iterable[str], *, hints: Iterable[str] = (), stops: Iterable[str] = ()) -> None:
        """Hints alone make no line worth reading, but another kind. What stands behind a stop makes no kind at all:
        it is somebody's words.
        """
        stopping = frozenset(stops)
        enough = {*literals, *stopping}
        self._literals = sorted({*enough, *hints})
        grams = [(*gram, number) for number, literal in enumerate(self._literals) for gram in _grams(literal.encode())]
        columns = list(zip(*grams, strict=True))
        order = numpy.argsort(_hashed(numpy.array(columns[0], numpy.uint32)), kind="stable")
        self._firsts, self._seconds = (numpy.array(column, numpy.uint32)[order] for column in columns[:2])
        self._deltas, self._ahead, self._numbers = (numpy.array(column, numpy.int64)[order] for column in columns[2:])
        self._padding = b"\n" * (GRAM_BYTES * (3 + int(abs(self._deltas).max()) // GRAM_BYTES))
        """As far as one looks before and behind a block."""
        slots, self._begins, self._many = numpy.unique(_hashed(self._firsts), return_index=True, return_counts=True)
        self._table = numpy.zeros(1 << _TABLE_BITS, numpy.bool_)
        self._table[slots] = True
        self._buckets = numpy.zeros(1 << _TABLE_BITS, numpy.uint16)
        """By a hash that is in the table: where its entries are, in `_begins` and `_many`."""
        self._buckets[slots] = numpy.arange(len(slots))
        self._stops = numpy.array([literal in stopping for literal in self._literals])
        self._enough = numpy.array([literal in enough for literal in self._literals])
        self._values = numpy.random.default_rng(1).integers(1, 2**63, len(self._literals), numpy.uint64)

    def lines(self, block: bytes) -> Screened:
        places, numbers = self._hits(block)
        every = numpy.frombuffer(block, numpy.uint8)
        newlines = breaks = numpy.flatnonzero(every == 10)
        if b"\r" in block:  # A progress bar draws itself over and over in one line.
            breaks = numpy.flatnonzero((every == 10) | (every == 13))
        begins, ends = numpy.concatenate(([0], breaks + 1)), numpy.append(breaks, len(block))
        hits = numpy.diff(numpy.searchsorted(places, breaks, side="right"), prepend=0, append=len(places))
        of_line = numpy.repeat(numpy.arange(len(hits)), hits)
        said = self._before_stops(places, numbers, of_line)
        if (ends - begins).max() > LOOKED_BYTES:
            said &= places - begins[of_line] < LOOKED_BYTES
        if not said.all():
            numbers, hits = numbers[said], numpy.bincount(of_line[said], minlength=len(hits))
        lines = numpy.flatnonzero(hits)
        counts = hits[lines]
        kinds, enough = self._values.take(numbers), self._enough.take(numbers)
        if len(lines):
            first = numpy.cumsum(counts) - counts
            kinds, enough = numpy.add.reduceat(kinds, first), numpy.logical_or.reduceat(enough, first)
        lines = lines[enough]
        starts = begins[lines]
        return Screened(
            starts=starts,
            ends=ends[lines],
            numbers=lines if breaks is newlines else numpy.searchsorted(newlines, starts),
            kinds=kinds[enough],
            literals=counts[enough],
            line_ends=len(newlines),
        )

    def _hits(self, block: bytes) -> tuple[Integers, Integers]:
        """Where literals stand, in order, and which they are."""
        front = len(self._padding)
        padded = self._padding + block + self._padding
        found, looked = [], []
        for shift in (front - GRAM_BYTES, front - GRAM_BYTES // 2):
            words = numpy.frombuffer(padded, numpy.uint32, len(block) // GRAM_BYTES + 2, shift)
            some = numpy.flatnonzero(self._table.take(_hashed(words), mode="clip"))
            found.append(some * GRAM_BYTES + shift)
            looked.append(words[some])
        places, here = numpy.concatenate(found), numpy.concatenate(looked)
        bucket = self._buckets.take(_hashed(here))
        many = self._many.take(bucket)
        entries = numpy.repeat(self._begins.take(bucket) - (numpy.cumsum(many) - many), many)
        entries += numpy.arange(len(entries))
        places = numpy.repeat(places, many)
        fours = _fours(padded)
        same = numpy.flatnonzero(fours[places + self._deltas.take(entries)] == self._seconds.take(entries))
        places, entries = places.take(same), entries.take(same)
        same = numpy.flatnonzero(fours[places] == self._firsts.take(entries))  # Others may have the same hash.
        places, entries = places.take(same), entries.take(same)
        starts = places + self._ahead.take(entries) - front
        order = numpy.argsort(starts, kind="stable")
        return starts.take(order), self._numbers.take(entries.take(order))

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
