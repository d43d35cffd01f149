"""GBNF (llama.cpp's grammars) and the EBNF that xgrammar takes, as Lark. Reads and writes text; compiles nothing.

A grammar that does not refer to itself becomes one regular expression. In any other, every character class and every
literal is a terminal of its own: made into larger ones they would be matched greedily, and some texts of the grammar
could not be written any more.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from holdfast.errors import GrammarError
from holdfast.units import shorten

MAX_DEPTH = 100
"""Of groups in each other."""
MAX_REPETITIONS = 2
"""Of repetitions in a row, such as `a+?`: each is a level more of what is walked by recursion."""
MAX_INLINED_CHARS = 64 << 10
"""Of the regular expression that a grammar may become."""
FIELD = "grammar"

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*|//[^\n]*)
    |(?P<name>[A-Za-z_0-9][A-Za-z_0-9-]*(?:\s*(?P<defines>::=))?)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<klass>\[(?:[^\]\\]|\\.)*\])
    |(?P<times>\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\})
    |(?P<special><(?:[^<>\s]+)>)
    |(?P<mark>[().|*+?])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class GbnfPattern:
    """A regular expression of one character."""

    regex: str


@dataclass(frozen=True, slots=True)
class Special:
    """A token by its name or number."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Several:
    parts: tuple[Node, ...]
    joined_by: str
    """One behind the other (" "), or one of them ("|")."""


@dataclass(frozen=True, slots=True)
class Repeated:
    part: Node
    least: int
    most: int | None


Node = Literal | GbnfPattern | Special | Reference | Several | Repeated


def lark_of_gbnf(text: str) -> str:
    root, lines = lark_rules(text, "r")
    return "\n".join(["%llguidance {}", f"start: {root}", *lines] if lines else [f"start: {root}"])


def lark_rules(text: str, prefix: str) -> tuple[str, list[str]]:
    """What it is as part of another grammar, and the rules that this needs; their names begin with `prefix`."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise _wrong('no "root" rule, and no "start:" rule of a Lark grammar', "root ::= ...")
    for rule in rules.values():
        for name in _references(rule):
            if name not in rules:
                raise _wrong(f"the rule {shorten(name)!r} is not defined", None)
    regex = _Inlined(rules).regex()
    if regex is not None:
        return f"/{regex}/", []
    names = {name: f"{prefix}{number}" for number, name in enumerate(rules)}
    return names["root"], [f"{names[name]}: {_lark(rule, names)}" for name, rule in rules.items()]


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                line = text.count("\n", 0, place) + 1
                raise _wrong(f"syntax error in line {line} at {shorten(text[place : place + 40])!r}", None)
            place = found.end()
            kind = str(found.lastgroup)
            if found["defines"]:
                self._tokens.append(("rule", found["name"].removesuffix("::=").rstrip()))
            elif kind != "space":
                self._tokens.append((kind, found.group()))
        self._tokens.append(("end", ""))
        self._place = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            if self._kind != "rule":
                raise _wrong(f"expected a rule, found {shorten(self._text)!r}", "name ::= ...")
            name = self._take()
            if name in rules:
                raise _wrong(f"the rule {shorten(name)!r} is defined twice", None)
            rules[name] = self._alternatives(0)
        return rules

    @property
    def _kind(self) -> str:
        return self._tokens[self._place][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._place][1]

    def _take(self) -> str:
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise _wrong(f"groups are nested more than {MAX_DEPTH} deep", None)
        found = [self._sequence(depth)]
        while self._text == "|" and self._kind == "mark":
            self._take()
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Several(tuple(found), "|")

    def _sequence(self, depth: int) -> Node:
        found: list[Node] = []
        while (node := self._one(depth)) is not None:
            found.append(self._repeated(node))
        if len(found) == 1:
            return found[0]
        return Several(tuple(found), " ") if found else Literal("")

    def _one(self, depth: int) -> Node | None:
        kind, text = self._kind, self._text
        if kind in ("rule", "end") or text in ("|", ")"):
            return None
        self._take()
        if kind == "name":
            return Reference(text)
        if kind == "literal":
            return Literal(_ESCAPE.sub(lambda found: _character(found[1]), text[1:-1]))
        if kind == "klass":
            return GbnfPattern(_class(text[1:-1]))
        if kind == "special":
            return Special(text)
        if text == ".":
            return GbnfPattern(r"[^\n]")
        if text != "(":
            raise _wrong(f"nothing to repeat before {shorten(text)!r}", None)
        inner = self._alternatives(depth + 1)
        if self._take() != ")":
            raise _wrong("a group is not closed", ")")
        return inner

    def _repeated(self, node: Node) -> Node:
        for _ in range(MAX_REPETITIONS + 1):
            text = self._text
            if text in ("*", "+", "?") and self._kind == "mark":
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
            elif self._kind == "times":
                first, comma, last = text[1:-1].replace(" ", "").partition(",")
                least, most = int(first[:9]), int(last[:9]) if last else (None if comma else int(first[:9]))
            else:
                return node
            self._take()
            node = Repeated(node, least, most)
        raise _wrong(f"more than {MAX_REPETITIONS} repetitions in a row", "a group around them")


def _character(escape: str) -> str:
    if escape[0] in "xuU" and len(escape) > 1:
        number = int(escape[1:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise _wrong(f"\\{escape} is not a valid character", None)
        return chr(number)
    return _PLAIN.get(escape, escape)


def _class(inside: str) -> str:
    """With every escape written as the character it stands for, and every character so that it means itself."""
    if inside in ("", "^"):
        raise _wrong("a character class is empty", None)
    negated = "^" if inside[0] == "^" else ""
    found, place, body = list[str](), 0, inside[len(negated) :]
    while place < len(body):
        escape = _ESCAPE.match(body, place)
        plain = escape is None
        one = body[place] if escape is None else _character(escape[1])
        place = place + 1 if escape is None else escape.end()
        # A dash between two characters spans them; at an end, or escaped, it is one itself.
        if one == "-" and plain and found and place < len(body):
            found.append("-")
        else:
            found.append(_quoted(one))
    return f"[{negated}{''.join(found)}]"


def _quoted(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):x}}}"


def _references(node: Node) -> list[str]:
    found, waiting = [], [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Reference):
            found.append(one.name)
        elif isinstance(one, Several):
            waiting += one.parts
        elif isinstance(one, Repeated):
            waiting.append(one.part)
    return found


class _Inlined:
    """The whole grammar as one regular expression, where it can be. How long it becomes is counted before anything is
    written: a few rules that refer to each other may stand for any number of characters."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._chars: dict[str, int] = {}

    def regex(self) -> str | None:
        order = self._order()
        if order is None:
            return None
        for name in order:
            chars = self._count(self._rules[name])
            if chars is None or chars > MAX_INLINED_CHARS:
                return None
            self._chars[name] = chars
        return self._written()

    def _order(self) -> list[str] | None:
        """Rules that root needs, each behind those it refers to; None: one refers to itself."""
        order, begun, waiting = list[str](), set[str](), [("root", False)]
        done: set[str] = set()
        while waiting:
            name, left = waiting.pop()
            if left:
                order.append(name)
                done.add(name)
                continue
            if name in done:
                continue
            if name in begun:
                return None
            begun.add(name)
            waiting.append((name, True))
            waiting += [(other, False) for other in dict.fromkeys(_references(self._rules[name])) if other not in done]
        return order

    def _count(self, node: Node) -> int | None:
        """Characters it becomes; None: it cannot be part of a regular expression."""
        if isinstance(node, Reference):
            return self._chars[node.name]
        if isinstance(node, Repeated):
            inner = self._count(node.part)
            return None if inner is None else inner + len(_behind(node))
        if isinstance(node, Several):
            chars = [self._count(part) for part in node.parts]
            return None if None in chars else sum(part or 0 for part in chars) + len(node.parts)
        return None if isinstance(node, Special) else len(_plain(node))

    def _written(self) -> str:
        """Without recursion: rules may refer to each other in a chain as long as the grammar."""
        found, waiting = list[str](), list[Node | str]([self._rules["root"]])
        while waiting:
            node = waiting.pop()
            if isinstance(node, str):
                found.append(node)
            elif isinstance(node, Reference):
                waiting += [")", self._rules[node.name], "(?:"]
            elif isinstance(node, Repeated):
                waiting += [_behind(node), node.part, "(?:"]
            elif isinstance(node, Several):
                waiting.append(")")
                for place, part in enumerate(reversed(node.parts)):
                    waiting += ["|", part] if place and node.joined_by == "|" else [part]
                waiting.append("(?:")
            else:
                found.append(_plain(node))
        return "".join(found)


def _behind(node: Repeated) -> str:
    return f"){{{node.least},{'' if node.most is None else node.most}}}"


def _plain(node: Literal | GbnfPattern | Special) -> str:
    return node.regex if isinstance(node, GbnfPattern) else "".join(map(_quoted, node.text))


def _lark(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Literal):
        return json.dumps(node.text)
    if isinstance(node, GbnfPattern):
        return f"/{node.regex}/"
    if isinstance(node, Special):
        return node.text
    if isinstance(node, Reference):
        return names[node.name]
    if isinstance(node, Repeated):
        most = "" if node.most is None else str(node.most)
        return f"({_lark(node.part, names)}){{{node.least},{most}}}"
    joined = " | " if node.joined_by == "|" else " "
    return f"({joined.join(_lark(part, names) for part in node.parts)})"


def _wrong(message: str, needed: str | None) -> GrammarError:
    return GrammarError(f"grammar: {message}", code="HF361", needed=needed, field=FIELD)
