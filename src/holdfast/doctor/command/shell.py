"""Words as a shell takes them: quotes, lines that go on, what a shell puts in, where one command ends.

Runs and expands nothing; a word that a shell would fill in keeps its spelling, so that it can be written again. Knows
no engine and no flag.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_OPERATOR = re.compile(r"\d?>>?(?:&\d?)?|&>>?|<<?<?|&&|\|\|?&?|;;?|&|\n")
_REDIRECTS = re.compile(r"\d?>>?(?:&\d)?|&>>?|<")
_FILLED_IN = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[@*#?0-9])")
_DEFAULT = re.compile(r"\$\{[A-Za-z_]\w*:?-([^{}$]*)\}")
_SPACE = " \t\r\f\v"


class OpenQuote(ValueError):
    """A quote is opened and not closed."""


@dataclass(frozen=True, slots=True)
class Word:
    value: str
    """As the program gets it. What a shell would put in stands as it was written, unless a default says what it is."""
    start: int
    end: int
    """In the text."""
    expands: bool = False
    """A shell puts something in."""
    unknown: bool = False
    """And what is not told here."""
    operator: bool = False


def split(text: str) -> list[Word]:
    """All words and operators of a text, in order. A line's end is an operator unless a backslash stands before it."""
    return _Reader(text).words()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self._last = len(text.rstrip()) - 1
        self._unclosed: set[str] = set()
        """Brackets that are opened and never closed: they are looked for once."""

    def words(self) -> list[Word]:
        found: list[Word] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            operator = _OPERATOR.match(self.text, self.at)
            if letter in _SPACE or self._goes_on():
                self.at += 1 if letter in _SPACE else self._goes_on()
            elif letter == "#" and (found or self.text.startswith("#!", self.at)):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif operator is not None:
                found.append(Word(operator[0].strip() or ";", self.at, operator.end(), operator=True))
                self.at = operator.end()
            else:
                found.append(self._word())
        return found

    def _goes_on(self) -> int:
        """Characters of a line's end that is none; at the end of the text too, as in a log that was cut into lines."""
        for end in ("\\\n", "\\\r\n"):
            if self.text.startswith(end, self.at):
                return len(end)
        return 1 if self.at == self._last and self.text[self.at] == "\\" else 0

    def _word(self) -> Word:
        start, parts, expands, unknown = self.at, [], False, False
        quote = ""
        while self.at < len(self.text):
            letter = self.text[self.at]
            if not quote and (letter in _SPACE or letter in "\n;|&<>" or self._goes_on()):
                break
            if letter == quote:
                quote, self.at = "", self.at + 1
            elif not quote and letter in "'\"":
                quote, self.at = letter, self.at + 1
            elif quote != "'" and letter == "\\":
                parts.append(self._escaped(quote))
            elif quote != "'" and letter in "$`" and (put := self._put_in()):
                default = _DEFAULT.fullmatch(put)
                parts.append(put if default is None else default[1])
                expands, unknown = True, unknown or default is None
            else:
                parts.append(letter)
                self.at += 1
        if quote:
            raise OpenQuote(self.text[start : start + 40])
        return Word("".join(parts), start, self.at, expands, unknown)

    def _escaped(self, quote: str) -> str:
        follows = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if follows == "\n":
            return ""
        return follows if not quote or follows in '"\\$`' else f"\\{follows}"

    def _put_in(self) -> str:
        """`$NAME`, `${...}`, `$(...)` or backticks at this place, whole; nothing where it is only a sign."""
        text, start = self.text, self.at
        named = _FILLED_IN.match(text, start)
        if named is not None:
            self.at = named.end()
            return named[0]
        pairs = {"${": "}", "$(": ")"}
        closing = "`" if text[start] == "`" else pairs.get(text[start : start + 2])
        if closing is None or closing in self._unclosed:
            return ""
        depth, at = 0, start + (1 if closing == "`" else 2)
        opening = text[at - 1]
        while at < len(text):
            if text[at] == closing and depth == 0:
                self.at = at + 1
                return text[start : at + 1]
            depth += (text[at] == opening) - (text[at] == closing)
            at += 1
        self._unclosed.add(closing)
        return ""


def is_redirect(word: Word) -> bool:
    return word.operator and _REDIRECTS.fullmatch(word.value) is not None


def quoted(value: str) -> str:
    """As a shell takes it; an assignment keeps its name outside the quotes."""
    name, equals, rest = value.partition("=")
    if equals and re.fullmatch(r"[A-Za-z_]\w*", name) and shlex.quote(value) != value:
        return f"{name}={shlex.quote(rest)}"
    return shlex.quote(value)
