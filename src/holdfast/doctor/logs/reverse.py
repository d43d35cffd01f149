"""Logs whose newest line stands first, as `journalctl -r`, `tac` and viewers write them, put the right way round.

A plain file is read from its end, however large it is. Of a stream, or a packed file, the newest and the oldest part
are held, and what lies between is left out and said to be. Knows stamps of time and the shape of tracebacks, and
nothing else of what stands in a line.

    newest line first ─► stamps fall ─► file:   blocks from the end ─► lines turned ─► oldest line first
                                     └► stream: newest │ left out │ oldest, held ────┘
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain, pairwise

from holdfast.doctor.logs.prefilter import LOOKED_BYTES
from holdfast.doctor.logs.source import BLOCK_BYTES, LogSource
from holdfast.doctor.logs.unfold import Fold, fold_of

NEWEST_BYTES, OLDEST_BYTES = 48 * 1024 * 1024, 16 * 1024 * 1024
"""Of a stream that are held: where a server dies, and where it says what it was started with."""
STAMPS_LOOKED = 2000
"""All over the first block, to know in which order it stands."""
FALLS_LEAST = 2
RISES_SHARE = 0.1
"""Of the falls: so many are lines of several processes, a little out of order."""
STAMP_WITHIN_BYTES, JSON_STAMP_WITHIN_BYTES = 160, 4000
ENTRY_BYTES = 2 * BLOCK_BYTES
"""What is longer is no entry any more: it is cut."""
_MONTHS = {name: b"%02d" % at for at, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_CLOCK = rb"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_STAMP = re.compile(
    rb"(?P<day>\d{4}[-/]\d\d[-/]\d\d)(?:T| - | )(?P<day_clock>CLOCK)"
    rb"|\b(?P<month>MONTH) (?P<month_day>[ \d]\d) +(?P<month_clock>CLOCK)"  # journald, syslog
    rb"|\b(?P<short>\d\d-\d\d|[EWIF]\d{4}) (?P<short_clock>CLOCK)"  # vLLM; glog
    rb"|\b(?P<epoch>\d{10}\.\d{3,9})\b"
    rb'|"(?:ts|time|timestamp|__REALTIME_TIMESTAMP)" ?: ?"?(?P<ticks>\d{10}(?:\d{3}){0,3}\b)'
    rb"|^(?P<minutes>\d+)\.(?P<minutes_clock>\d\d\.\d{3}\.\d{3}) "  # llama-server's own clock
    rb"|^\W?(?P<clock>CLOCK)".replace(b"CLOCK", _CLOCK).replace(b"MONTH", b"|".join(_MONTHS))
)
_OF_THE_JOURNAL = b"-- "
"""Before what journalctl says itself: when it begins and ends."""
_HEADER, _FRAME = b"Traceback (most recent call last)", b'File "'

Stamp = tuple[str, bytes, bytes]
"""How it is written, its day, and its clock: two that are written alike can be compared."""


class Order(Enum):
    OLDEST_FIRST = 0
    NEWEST_FIRST = 1
    """Every line of it."""
    NEWEST_ENTRY_FIRST = 2
    """What was said at one time stands in its own order: a traceback is not turned."""


def stamp(line: bytes) -> Stamp | None:
    found = _STAMP.search(line, 0, JSON_STAMP_WITHIN_BYTES if line.startswith(b"{") else STAMP_WITHIN_BYTES)
    if found is None or found.lastgroup is None or line.startswith(_OF_THE_JOURNAL):
        return None
    day, clock = found["day"] or found["short"] or b"", found[found.lastgroup]
    if found["month"] is not None:
        day = _MONTHS[found["month"]] + found["month_day"]
    elif found["minutes"] is not None:
        day = found["minutes"].rjust(9)
    return found.lastgroup, day.replace(b"/", b"-").lstrip(b"EWIF"), clock.replace(b",", b".")


def order_of(start: bytes) -> Order:
    """By how the stamps run in the first block; where they are few, by tracebacks that stand on their heads."""
    lines = start.split(b"\n")
    stamps = [one for one in map(stamp, lines[:: 1 + len(lines) // STAMPS_LOOKED]) if one is not None]
    written = Counter(one[0] for one in stamps).most_common(1)
    falls = rises = 0
    for before, after in pairwise(one for one in stamps if one[0] == written[0][0]):
        falls, rises = falls + (after < before), rises + (after > before)
    if rises > RISES_SHARE * falls:
        return Order.OLDEST_FIRST
    upright = _upright(lines)
    if falls < FALLS_LEAST:
        return Order.NEWEST_FIRST if upright < 0 else Order.OLDEST_FIRST
    return Order.NEWEST_ENTRY_FIRST if upright > 0 else Order.NEWEST_FIRST


def _upright(lines: list[bytes]) -> int:
    """Tracebacks with their head above their frames, less those with it below."""
    upright = 0
    for above, line, below in zip([b"", *lines[:-1]], lines, [*lines[1:], b""], strict=True):
        before, head, _ = line.partition(_HEADER)
        if head:
            upright += _is_frame(below, before) - _is_frame(above, before)
    return upright


def _is_frame(line: bytes, before: bytes) -> bool:
    """Of the process that wrote this before the head of its traceback."""
    stands, frame, _ = line.partition(_FRAME)
    return bool(frame) and before.startswith(stands.rstrip())


class Turned:
    """A log, its oldest line first. Read once."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._lines = 0
        self.order = Order.OLDEST_FIRST
        """Known when the first block was given."""
        self.fold: Fold | None = None
        """At which its lines were cut; known with the order. Its blocks are given as they were cut."""
        self.left_out_bytes = 0
        """Of a log that had to be held to be turned, and was too large for that."""

    def blocks(self) -> Iterator[bytes]:
        """In UTF-8. Raises a ConfigurationError (HFD90)."""
        pieces = self._source.blocks()
        first = b""
        for piece in pieces:
            first += piece
            if len(first) >= BLOCK_BYTES:
                break
        self._look(first[:BLOCK_BYTES])
        if self.order is Order.OLDEST_FIRST:
            yield first
            yield from pieces
            return
        from_end = self._source.from_end() if len(first) >= BLOCK_BYTES else None
        for part in self._held(chain([first], pieces)) if from_end is None else [from_end]:
            yield from self._turned(part)

    def _look(self, first: bytes) -> None:
        """In which order it stands, and whether its lines were cut: before it was turned, or after."""
        self.fold = fold_of(first, upside_down=False)
        whole = first if self.fold is None else b"\n".join(map(b"".join, self.fold.groups(first.split(b"\n"))))
        self.order = order_of(whole)
        turned = fold_of(first, upside_down=True) if self.order is Order.NEWEST_FIRST else None
        if turned is not None and (self.fold is None or turned.joined > self.fold.joined):
            self.fold = turned

    @property
    def _cut_after(self) -> Fold | None:
        """Where every line was turned, and then cut: the parts of each stand in their own order."""
        every_line = self.order is Order.NEWEST_FIRST and self.fold is not None and not self.fold.upside_down
        return self.fold if every_line else None

    def number(self, number: int) -> int | None:
        """Of a line that was counted in the order it was given in: in the order it stands in; None: not known."""
        if self.order is Order.OLDEST_FIRST:
            return number
        turned = self.order is Order.NEWEST_FIRST and not self.left_out_bytes and self._cut_after is None
        return self._lines + 1 - number if turned else None

    def _held(self, pieces: Iterable[bytes]) -> list[Iterator[bytes]]:
        """Its oldest part and its newest, the last blocks first; together where nothing lies between."""
        newest: deque[bytes] = deque()
        oldest: deque[bytes] = deque()
        newest_bytes = oldest_bytes = 0
        for piece in pieces:
            if newest_bytes < NEWEST_BYTES:
                newest.append(piece)
                newest_bytes += len(piece)
                continue
            oldest.append(piece)
            oldest_bytes += len(piece)
            if oldest_bytes > OLDEST_BYTES:
                gone = len(oldest.popleft())
                oldest_bytes, self.left_out_bytes = oldest_bytes - gone, self.left_out_bytes + gone
        parts = [_drained(oldest), _drained(newest)]
        return parts if self.left_out_bytes else [chain(*parts)]

    def _turned(self, last_first: Iterable[bytes]) -> Iterator[bytes]:
        """Of blocks whose last comes first."""
        rest: bytes | None = None
        """What begins in a block, or in one before it, and ends behind it."""
        for block in last_first:
            lines = (block.removesuffix(b"\n") if rest is None else block + rest).split(b"\n")
            begun = self._begun(lines)
            rest = b"\n".join(lines[:begun])
            if begun == 1:
                rest = rest[:LOOKED_BYTES]  # No more of one line is looked at.
            if begun < len(lines):
                yield self._right_way_round(lines[begun:])
        if rest is not None:
            yield self._right_way_round(rest.split(b"\n"))

    def _begun(self, lines: list[bytes]) -> int:
        """How many of them may belong to what stands before them."""
        if sum(map(len, lines)) > ENTRY_BYTES:
            return 1
        if self._cut_after is not None:
            return next((at for at, line in enumerate(lines) if at and self._cut_after.begins(line)), len(lines))
        if self.order is Order.NEWEST_FIRST:
            return 1
        return len(_entries([b"", *lines[1:]])[0])  # The first may be the rest of a line, and its stamp none.

    def _right_way_round(self, lines: list[bytes]) -> bytes:
        self._lines += len(lines)
        if self._cut_after is not None:
            return b"\n".join(part for parts in reversed(self._cut_after.groups(lines)) for part in parts) + b"\n"
        if self.order is Order.NEWEST_FIRST:
            return b"\n".join(reversed(lines)) + b"\n"
        return b"\n".join(line for entry in reversed(_entries(lines)) for line in entry) + b"\n"


def _entries(lines: Iterable[bytes]) -> list[list[bytes]]:
    """Lines of one time, with those below them that have none."""
    entries: list[list[bytes]] = [[]]
    now: Stamp | None = None
    for line in lines:
        told = stamp(line)
        if told is not None and told != now:
            if now is not None:
                entries.append([])
            now = told
        entries[-1].append(line)
    return entries


def _drained(blocks: deque[bytes]) -> Iterator[bytes]:
    """From its end; each is let go when it was given."""
    while blocks:
        yield blocks.pop()
