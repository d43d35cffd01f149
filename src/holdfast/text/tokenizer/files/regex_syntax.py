"""Parses a regular expression of a tokenizer (Oniguruma's syntax) into a tree, as far as its cost depends on it.

What cannot be parsed is refused: back references, recursion, conditions, and whatever else no tokenizer needs. Knows
nothing of costs.

    Repeat ─► Concatenation ─► Atom, Atom, Alternation ─► ...

An Atom is one character; a Look is text that is looked at, not taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN_CHARS = 10_000
MAX_NESTING = 50


class PatternError(Exception):
    """Why a pattern is not accepted, for people."""


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """Takes one character of a set."""

    text: str
    """The set as the pattern spells it, to be asked of the library."""


@dataclass(frozen=True, slots=True, eq=False)
class Concatenation:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alternation:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    body: Node


Node = Atom | Concatenation | Alternation | Repeat | Look
NOTHING = Concatenation(())

_INTERVAL = re.compile(r"\{(?:(\d{1,6})?(,)?(\d{1,6})?)\}")
_OPTIONS = re.compile(r"\?([imWDSP]*)(?:-([imWDSP]*))?([:)])")
_NAMED = re.compile(r"\?(?:P?<(?![=!])[^>)]{1,64}>|'[^')]{1,64}')")
_PROPERTY = re.compile(r"[pP]\{\^?[^{}]{1,64}\}")
_CODE = re.compile(r"x\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|0[0-7]{0,2}")
_LOOKS = ("?=", "?!", "?<=", "?<!")
_ANCHORS = "bBAZzG"
_SETS = "dDwWsShHNO"
_LINE_END = Atom("[\\n-\\r\\x{85}\\x{2028}\\x{2029}]")
"""\\R; it also takes two characters, but always both of them where both are there."""


def parse_pattern(pattern: str) -> Node:
    """Raises PatternError."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"it has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are allowed")
    parser = _Parser(pattern)
    node = parser.choice()
    if parser.position < len(pattern):
        raise PatternError(f"unmatched ) at character {parser.position}")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.position = pattern, 0
        self.nesting = 0
        self.ignore_case = False

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def taken(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.pattern, self.position)
        if found is not None:
            self.position = found.end()
        return found

    def choice(self) -> Node:
        before = self.ignore_case  # An option that is set within a group ends with it.
        options = [self.sequence()]
        while self.peek("|"):
            self.position += 1
            options.append(self.sequence())
        self.ignore_case = before
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.position < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            part = self.one()
            while (repeated := self.repeated(part)) is not None:
                part = repeated
            parts.append(part)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repeated(self, node: Node) -> Node | None:
        """`node` with the quantifier that follows; None where none does."""
        if self.position >= len(self.pattern):
            return None
        sign = self.pattern[self.position]
        if sign in "*+?":
            self.position += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            if self.peek("?") or self.peek("+"):  # Lazy and possessive ones cost no more than others.
                self.position += 1
            return Repeat(node, low, high)
        interval = _INTERVAL.match(self.pattern, self.position)
        if interval is None or not (interval[1] or interval[3]):
            return None
        self.position = interval.end()
        if self.peek("?"):
            self.position += 1
        low = int(interval[1] or 0)
        if not interval[2]:
            return Repeat(node, low, low)
        high = None if interval[3] is None else int(interval[3])
        if high is not None and high < low:
            raise PatternError(f"the repetition {interval[0]} has a minimum above its maximum")
        return Repeat(node, low, high)

    def one(self) -> Node:
        sign = self.pattern[self.position]
        if sign == "(":
            return self.group()
        if sign == "[":
            return self.atom(self.bracket())
        if sign == "\\":
            return self.escape()
        if sign in "*+?":
            raise PatternError(f"nothing to repeat before {sign} at character {self.position}")
        self.position += 1
        if sign in "^$":
            return NOTHING
        return self.atom(sign if sign == "." else re.escape(sign))

    def atom(self, text: str) -> Atom:
        return Atom(f"(?i:{text})" if self.ignore_case else text)

    def group(self) -> Node:
        opened = self.position
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise PatternError(f"its groups are nested more than {MAX_NESTING} deep")
        self.position += 1
        before, looks = self.ignore_case, False
        if self.peek("?"):
            if (start := next((start for start in _LOOKS if self.peek(start)), None)) is not None:
                self.position += len(start)
                looks = True
            elif self.peek("?>"):
                self.position += 2
            elif self.taken(_NAMED) is None and self.options():
                self.nesting -= 1
                return NOTHING  # (?i) is for what follows in the group around it.
        body = self.choice()
        if not self.peek(")"):
            raise PatternError(f"the group at character {opened} is not closed")
        self.position += 1
        self.ignore_case = before
        self.nesting -= 1
        return Look(body) if looks else body

    def options(self) -> bool:
        """Takes what stands behind the bracket of (?i:...) and (?i); true for the latter."""
        opened = self.position
        found = self.taken(_OPTIONS)
        if found is None:
            raise PatternError(f"{self.pattern[opened - 1 : opened + 3]} at character {opened - 1} is not supported")
        if "i" in found[1]:
            self.ignore_case = True
        if "i" in (found[2] or ""):
            self.ignore_case = False
        return found[3] == ")"

    def bracket(self) -> str:
        start, depth = self.position, 0
        while self.position < len(self.pattern):
            sign = self.pattern[self.position]
            if sign == "\\":
                self.position += 1
            elif sign == "[":
                depth += 1
                if self.pattern.startswith("^", self.position + 1):
                    self.position += 1
                if self.pattern.startswith("]", self.position + 1):
                    self.position += 1  # A bracket that stands first stands for itself.
            elif sign == "]":
                depth -= 1
                if not depth:
                    self.position += 1
                    return self.pattern[start : self.position]
            self.position += 1
        raise PatternError(f"the set at character {start} is not closed")

    def escape(self) -> Node:
        start = self.position
        self.position += 1
        if self.position >= len(self.pattern):
            raise PatternError("it ends with a backslash")
        sign = self.pattern[self.position]
        if self.taken(_PROPERTY) or self.taken(_CODE):
            return self.atom(self.pattern[start : self.position])
        self.position += 1
        if sign in _ANCHORS:
            return NOTHING
        if sign == "R":
            return _LINE_END
        if sign in _SETS or sign in "tnrfvae" or not sign.isalnum():
            return self.atom(self.pattern[start : self.position])
        raise PatternError(f"\\{sign} at character {start} is not supported")
