"""Logs that a terminal, or `fold`, cut at a fixed width: recognised in their first block, and their lines joined again.

Where a line begins is learned from the log: what follows a line that was not cut begins one. Knows levels, processes
and stamps that only ever begin a line, and nothing else of what stands in it.

    first block ─► widest line ─► lines as wide, or whose next word did not fit ─► what follows begins no line ─► Fold
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from holdfast.doctor.logs.prefilter import LOOKED_BYTES

LEAST_COLUMNS, MOST_COLUMNS = 40, 400
"""Widths of terminals; and most logs that nobody cut have a wider line, and are not looked at further."""
LEAST_CUT, FEW_CUT = 3, 2
"""Lines that were cut: two of the same width are so by chance, but where most lines say when or by whom they are."""
CUT_SHARE = 0.9
"""Of the lines that look cut, whose next begins no line. A line may be just as wide as the terminal."""
BEGINNING_BYTES = 6
BEGINNINGS_HELD = 4096
NUMBERED_LINES = 1_000_000
"""Joined lines whose place in the file is remembered: 8 MB."""
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_DRESSED = re.compile(
    rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)(?:: | \d\d-\d\d \d\d:)"
    rb"|\((?:APIServer|EngineCore|\w*Worker)[\w ]*pid="
    rb"|\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d |\[rank\d+\]: "
)


@dataclass(frozen=True, slots=True)
class Fold:
    """How a log was cut."""

    columns: int
    measure: Callable[[bytes], int]
    """`fold` counts bytes, a terminal letters."""
    beginnings: frozenset[bytes]
    """Of lines of this log."""
    upside_down: bool
    """What was cut off a line stands above it: the log was cut, and turned then."""
    joined: int = 0
    """Lines of the first block that were cut."""

    def is_cut(self, line: bytes, following: bytes) -> bool:
        """Whether what follows is the rest of the line."""
        return _looks_cut(line, following, self.columns, self.measure) and not self.begins(following)

    def begins(self, line: bytes) -> bool:
        return not line.strip() or _beginning(line) in self.beginnings or _DRESSED.match(line) is not None

    def groups(self, lines: list[bytes]) -> list[list[bytes]]:
        """The parts of each line, for one that is not upside down."""
        groups: list[list[bytes]] = []
        for line in lines:
            if groups and self.is_cut(groups[-1][-1], line):
                groups[-1].append(line)
            else:
                groups.append([line])
        return groups


def fold_of(start: bytes, *, upside_down: bool) -> Fold | None:
    """By the first block of a log; None: its lines were not cut, or not at a width that can be known."""
    lines = start.split(b"\n")
    lines = lines[: len(lines) - 1 or None]  # The last may go on in the next block.
    measures: tuple[Callable[[bytes], int], ...] = (_bytes,) if start.isascii() else (_bytes, _letters)
    for measure in measures:
        widths = list(map(measure, lines))
        columns = max(widths)
        may_be_cut = widths.count(columns) + start.count(b" \n") + start.count(b" \r\n")
        if LEAST_COLUMNS <= columns <= MOST_COLUMNS and may_be_cut >= FEW_CUT:
            fold = _cut_at(columns, measure, lines[::-1] if upside_down else lines, upside_down=upside_down)
            if fold is not None:
                return fold
    return None


def _cut_at(columns: int, measure: Callable[[bytes], int], lines: list[bytes], *, upside_down: bool) -> Fold | None:
    pairs = list(pairwise(lines))
    cut = [_looks_cut(line, below, columns, measure) for line, below in pairs]
    beginnings = {_beginning(lines[0])}
    for is_cut, (_, below) in zip(cut, pairs, strict=True):
        if not is_cut and len(beginnings) < BEGINNINGS_HELD:
            beginnings.add(_beginning(below))
    fold = Fold(columns, measure, frozenset(beginnings), upside_down)
    rests = [below for is_cut, (_, below) in zip(cut, pairs, strict=True) if is_cut and not fold.begins(below)]
    dressed = sum(_DRESSED.match(line) is not None for line in lines)
    sure = dressed > len(lines) // 2 and not any(rest.startswith(b" ") for rest in rests)
    # A server that is restarted says the same lines again: what follows a wide one then is no other rest.
    different = len({rest.translate(_DIGITS) for rest in rests})
    enough = different >= (FEW_CUT if sure else LEAST_CUT) and len(rests) >= CUT_SHARE * sum(cut)
    return replace(fold, joined=len(rests)) if enough else None


def _looks_cut(line: bytes, following: bytes, columns: int, measure: Callable[[bytes], int]) -> bool:
    """As wide as a line can be; or cut at a blank, because the next word did not fit."""
    wide = measure(line)
    if wide == columns:
        return True
    if not line.rstrip(b"\r").endswith(b" "):
        return False
    word, blank, _ = following.partition(b" ")
    return wide + measure(word + blank) > columns


def _bytes(line: bytes) -> int:
    """What a progress bar drew over is not counted."""
    return len(_shown(line))


def _letters(line: bytes) -> int:
    return len(_shown(line).decode("utf-8", "replace"))


def _shown(line: bytes) -> bytes:
    if b"\r" in line:
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
    return line.expandtabs(8) if b"\t" in line else line


def _beginning(line: bytes) -> bytes:
    return line[:BEGINNING_BYTES].translate(_DIGITS)


class Unfolded:
    """Blocks of a log that was cut, the right way round, in; its lines as they were written, out. Read once."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._places = array("Q")
        self._line = 1

    def blocks(self, folded: Iterable[bytes]) -> Iterator[bytes]:
        rest = b""
        parts: list[bytes] = []
        """Of the line that is being put together."""
        for block in folded:
            *lines, rest = (rest + block).split(b"\n")
            rest = rest[: LOOKED_BYTES + BEGINNING_BYTES] if not lines else rest
            joined: list[bytes] = []
            for line in lines:
                parts = self._next(parts, line, joined)
            if joined:
                yield b"\n".join(joined) + b"\n"
        joined = []
        parts = self._next(parts, rest, joined) if rest else parts
        yield b"\n".join([*joined, b"".join(parts)])

    def _next(self, parts: list[bytes], line: bytes, joined: list[bytes]) -> list[bytes]:
        fits = len(parts) * self._fold.columns < LOOKED_BYTES  # No more of one line is looked at.
        if parts and fits and self._fold.is_cut(parts[-1], line):
            parts[-1] = parts[-1].rstrip(b"\r")
            parts.append(line)
        else:
            if parts:
                joined.append(b"".join(parts))
            parts = [line]
            if len(self._places) < NUMBERED_LINES:
                self._places.append(self._line)
        self._line += 1
        return parts

    def number(self, number: int) -> int | None:
        """Of a line that was joined: that of its first part, in the order it was given in; None: not known."""
        return self._places[number - 1] if number <= len(self._places) else None
