"""What a tokenizer's regular expression may cost on the worst text; beyond a bound it is refused before it is run.

The library's engine goes back and tries again. A pattern with two ways through a loop takes twice the time for every
further character, `(a+)+b` or `(a|a)*b`; loops in a row that take the same characters, `.*.*.*.*!`, take a power of the
length. Both can be told from the pattern:

    two ways    two different paths through a loop that take the same text and end where they began
    power       the most loops, one behind the other, that all take one character
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from tokenizers import Regex, pre_tokenizers

from holdfast.text.tokenizer.files.regex_syntax import (
    Alternation,
    Atom,
    Concatenation,
    Look,
    Node,
    PatternError,
    Repeat,
    parse_pattern,
)

MAX_LOOPS = 3
"""In a row, taking the same character. Published tokenizers have at most two."""
MAX_WAYS = 1 << 14
"""Through the parts that are no loops, for one text."""
LONG_REPEAT = 8
"""A part that may be repeated more often than this counts as a loop."""
MAX_PLACES = 400
"""Characters a loop is written with, once short repeats are written out."""

_Set = frozenset[int]
_Sets = Callable[[Atom], _Set]


def check_pattern(pattern: str) -> int:
    """The fewest characters that it matches. Raises PatternError for what may take forever."""
    tree = parse_pattern(pattern)
    everything = _Cost(lambda atom: _ANYTHING).of(tree)
    if everything.loops > MAX_LOOPS or everything.ways > MAX_WAYS:
        _check_rows(tree)
    for loop in _loops(tree):
        if not _is_plain(loop.body):
            _check_loop(loop)
    return _shortest(tree)


def _shortest(node: Node) -> int:
    if isinstance(node, Atom):
        return 1
    if isinstance(node, Concatenation):
        return sum(map(_shortest, node.parts))
    if isinstance(node, Alternation):
        return min(map(_shortest, node.options))
    if isinstance(node, Repeat):
        return min(node.low * _shortest(node.body), 1 << 20)
    return 0


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Concatenation):
        return node.parts
    if isinstance(node, Alternation):
        return node.options
    return () if isinstance(node, Atom) else (node.body,)


def _is_loop(node: Node) -> bool:
    return isinstance(node, Repeat) and (node.high is None or node.high > LONG_REPEAT)


def _loops(node: Node) -> Iterator[Repeat]:
    """The outermost: what a loop holds is looked at with it, but for what only looks ahead or back."""
    if isinstance(node, Repeat) and _is_loop(node):
        yield node
        for look in _looks(node.body):
            yield from _loops(look.body)
    else:
        for child in _children(node):
            yield from _loops(child)


def _looks(node: Node) -> Iterator[Look]:
    if isinstance(node, Look):
        yield node
    else:
        for child in _children(node):
            yield from _looks(child)


def _is_plain(node: Node) -> bool:
    """One way through it: characters one after the other."""
    return isinstance(node, Atom) or (isinstance(node, Concatenation) and all(map(_is_plain, node.parts)))


def _atoms(node: Node) -> Iterator[Atom]:
    if isinstance(node, Atom):
        yield node
    for child in _children(node):
        yield from _atoms(child)


# ---- rows of loops


@dataclass(frozen=True, slots=True)
class _Row:
    loops: int = 0
    ways: int = 1


class _Cost:
    """Of one character: loops in a row that take it, and ways through the rest. `sets` says what an atom takes."""

    def __init__(self, sets: _Sets, character: int | None = None) -> None:
        self._sets, self._character = sets, character

    def takes(self, node: Node) -> bool:
        return any(self._character is None or self._character in self._sets(atom) for atom in _atoms(node))

    def of(self, node: Node) -> _Row:
        if isinstance(node, Atom) or not self.takes(node):
            return _Row()
        if isinstance(node, Look):
            return self.of(node.body)
        if isinstance(node, Alternation):
            rows = [self.of(option) for option in node.options if self.takes(option)]
            return _Row(max(row.loops for row in rows), sum(row.ways for row in rows))
        if isinstance(node, Repeat):
            if _is_loop(node):
                return _Row(loops=1)  # However it is made: there is one way through it, which is looked at below.
            body = self.of(node.body)
            high = node.high or 0
            varies = high - node.low + 1
            return _Row(body.loops * high, min(varies * body.ways ** max(high, 1), MAX_WAYS + 1))
        loops, ways = 0, 1
        for part in node.parts:
            row = self.of(part)
            loops, ways = loops + row.loops, min(ways * row.ways, MAX_WAYS + 1)
        return _Row(loops, ways)


def _check_rows(tree: Node) -> None:
    sets = _sets_of(tree)
    one_of_each = {
        frozenset(text for text, found in sets.items() if character in found): character
        for character in set().union(*sets.values())
    }
    for character in one_of_each.values():
        row = _Cost(lambda atom: sets[atom.text], character).of(tree)
        shown = ascii(chr(character))
        if row.loops > MAX_LOOPS:
            raise PatternError(f"{row.loops} consecutive loops match {shown}; at most {MAX_LOOPS} are allowed")
        if row.ways > MAX_WAYS:
            raise PatternError(f"there are too many ways to match a text of {shown}")


# ---- two ways through a loop


@dataclass(slots=True)
class _Places:
    """A part of a loop, by the places of its characters: which come first and last, whether all may be left out."""

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    empty: bool = True


class _Paths:
    """Which place follows which within a loop. A pair that follows by two rules is two ways already."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self.next: dict[int, set[int]] = {}
        self.twice = False

    def link(self, last: set[int], first: set[int]) -> None:
        for place in last:
            known = self.next.setdefault(place, set())
            self.twice = self.twice or not known.isdisjoint(first)
            known |= first

    def add(self, node: Node) -> _Places:
        if isinstance(node, Atom):
            if len(self.atoms) >= MAX_PLACES:
                raise PatternError(f"a loop has more than {MAX_PLACES} characters")
            self.atoms.append(node)
            place = len(self.atoms) - 1
            return _Places({place}, {place}, empty=False)
        if isinstance(node, Look):
            return _Places()
        if isinstance(node, Alternation):
            options = [self.add(option) for option in node.options]
            # Two options that may both be nothing are two ways to take nothing.
            self.twice = self.twice or sum(option.empty for option in options) > 1
            first = set().union(*(option.first for option in options))
            last = set().union(*(option.last for option in options))
            return _Places(first, last, any(option.empty for option in options))
        if isinstance(node, Repeat):
            return self.add_repeat(node)
        return self.row([self.add(part) for part in node.parts])

    def add_repeat(self, node: Repeat) -> _Places:
        if _is_loop(node):
            body = self.add(node.body)
            self.link(body.last, body.first)
            return _Places(body.first, body.last, body.empty or node.low == 0)
        copies = [self.add(node.body) for _ in range(node.high or 0)]
        for copy in copies[node.low :]:
            copy.empty = True
        # Which of several copies is left out makes no difference: each goes on to the one behind it alone.
        made = _Places()
        for number, copy in enumerate(copies):
            if number:
                self.link(copies[number - 1].last, copy.first)
            if number == 0:
                made.first = set(copy.first)
            if number + 1 >= node.low:
                made.last |= copy.last
        made.empty = node.low == 0 or bool(copies and copies[0].empty)
        return made

    def row(self, parts: list[_Places]) -> _Places:
        made = _Places()
        for part in parts:
            self.link(made.last, part.first)
            if made.empty:
                made.first |= part.first
            made.last = made.last | part.last if part.empty else set(part.last)
            made.empty = made.empty and part.empty
        return made


def _check_loop(loop: Repeat) -> None:
    refused = PatternError("a loop can match the same text in two ways")
    paths = _Paths()
    # Leaving out one turn of several is as many ways to do so.
    if paths.add(loop.body).empty:
        raise PatternError("a loop can repeat an empty match")
    paths = _Paths()
    paths.add(Repeat(loop.body, 0, None))
    if paths.twice:
        raise refused
    sets = _sets_of(loop.body)
    taken = [sets[atom.text] for atom in paths.atoms]
    if _two_ways(paths.next, taken):
        raise refused


def _two_ways(follows: Mapping[int, set[int]], taken: list[_Set]) -> bool:
    """Whether two paths part from one place, take the same characters, and meet again."""
    meets = {(a, b): bool(taken[a] & taken[b]) for a in range(len(taken)) for b in range(len(taken))}

    def steps(pair: tuple[int, int]) -> set[tuple[int, int]]:
        return {(a, b) for a in follows.get(pair[0], ()) for b in follows.get(pair[1], ()) if meets[a, b]}

    apart = {pair for place in follows for pair in steps((place, place)) if pair[0] != pair[1]}
    seen, waiting = set(apart), list(apart)
    while waiting:
        for pair in steps(waiting.pop()):
            if pair[0] == pair[1]:
                return True
            if pair not in seen:
                seen.add(pair)
                waiting.append(pair)
    return False


# ---- what an atom takes


_ALIKE = ((0x3400, 0xA000), (0xAC00, 0xD7A4), (0xD800, 0xF900), (0x17000, 0x18B00), (0x20000, sys.maxunicode))
"""Chinese, Korean, private use, Tangut, and what lies beyond the second plane."""
_ANYTHING: _Set = frozenset()
_CODE = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}|\\x([0-9A-Fa-f]{1,2})|\\u([0-9A-Fa-f]{4})")


@cache
def _sample() -> str:
    """Some characters of every kind: of long rows of one kind, such as Chinese and Korean, a few."""
    spans, start = [], 0
    for first, last in _ALIKE:
        spans += [range(start, first), range(first, last, 61)]
        start = last
    kept = (chr(code) for span in spans for code in span)
    return "".join(one for one in kept if unicodedata.category(one) not in ("Cn", "Cs"))


def _sets_of(node: Node) -> dict[str, _Set]:
    """What each atom takes of a sample, as the library itself says."""
    texts = dict.fromkeys(atom.text for atom in _atoms(node))
    written = "".join(texts)
    codes = [int(code, 16) for found in _CODE.findall(written) for code in found if code]
    spelled = written + "".join(chr(code) for code in codes if code <= sys.maxunicode)
    # The ends of ranges and their neighbours, where sets of few characters overlap if they do.
    near = {chr(code) for one in spelled for code in (ord(one) - 1, ord(one), ord(one) + 1) if 0 < code < 0xD800}
    sample = _sample() + "".join(sorted(near))
    return {text: _taken(text, sample) for text in texts}


def _taken(text: str, sample: str) -> _Set:
    try:
        left = pre_tokenizers.Split(Regex(text), "removed").pre_tokenize_str(sample)
    except Exception as problem:  # the library raises bare Exception for what it cannot compile
        raise PatternError(f"{text[:40]} cannot be compiled: {problem}") from problem
    ends = [0, *(place for _, span in left for place in span), len(sample)]
    return frozenset(ord(one) for start, end in list(pairwise(ends))[::2] for one in sample[start:end])
