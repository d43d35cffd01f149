"""The rules as they stand in rules/*.toml, read once: patterns compiled, nothing judged.

In a pattern, `<<size:free>>` stands for an amount of memory (kept in GiB as free_gib), `<<int:heads>>` for a whole
number, `<<num:utilization>>` for any, `<<word:model>>` for a word. docs/doctor.md has the whole form.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from holdfast.doctor.rules.patterns import Index, Pattern, any_of

Kind = Literal["fatal", "request", "running", "advice", "hint"]
"""A hint is the place where something fails, and holds only where the log was cut before its error."""
_MACRO = re.compile(r"<<(size|int|num|word):(\w+)>>")
_MACROS = {
    "size": r"(?P<{0}__size>[\d.,]+) ?(?P<{0}__unit>[KMGT]i?B|[bB]ytes|[KMG]|MB|B)\b",
    "int": r"(?P<{0}>\d[\d,_]*)",
    "num": r"(?P<{0}>-?\d[\d,]*\.?\d*(?:e-?\d+)?)",
    "word": r"""['"`]?(?P<{0}__word>[^\s'"`,()\[\]{{}}]+)['"`]?""",
}
_GIB = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 1024.0, "B": 2**-30, "b": 2**-30}


_SETTINGS = (
    "args",
    "config:",
    "ServerArgs",
    " serve",
    "api_server",
    "launch_server",
    "-server",
    "LLM(",
    "Engine(",
    "launcher",
    " run ",
    "Args {",
    "hroughput",
    "_server",
    "model_id: ",
    "num_shard: ",
    "quantize: ",
    "  --",
    "dtype: ",
    "_tokens: ",
    "_fraction: ",
    "needed: ",
    "found:  ",
    "fix:    ",
)
"""Words of lines that tell settings and figures, which no rule knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRule:
    change: dict[str, Any] = field(default_factory=dict)
    """Our flag (vLLM's word, or a variable) to an expression, a literal in quotes, "" for a bare flag, false: gone."""
    when: str = ""
    why: str = ""
    price: str = ""
    run: str = ""
    """Another command than the server's that helps, where no flag does."""
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    id: str
    cause: str
    code: str = ""
    """Of the error itself, where it has one; else its cause's."""
    kind: Kind = "fatal"
    engines: tuple[str, ...] = ()
    """Whose words these are; empty: anybody's."""
    phase: str = ""
    """Where it happens, when nothing in the log shows it; with `phase_fixed`, always."""
    phase_fixed: bool = False
    confidence: str = "high"
    patterns: tuple[Pattern, ...] = ()
    unless: tuple[Pattern, ...] = ()
    when: str = ""
    """On the numbers of the line itself."""
    only_in: tuple[str, ...] = ()
    """Phases; where the log has told another, these words mean something else."""
    yields_to: tuple[str, ...] = ()
    """Rules that say of the same failure what it was for."""
    without: tuple[str, ...] = ()
    """Tags of the run with which these words mean nothing."""
    effect: bool = False
    """Most often follows from something else: named after it."""
    least: int = 1
    """Times it must be seen to be more than chance."""
    out_of_memory: bool = False
    """An allocation failed: what it means is judged by the phase and the numbers."""
    what: tuple[str, ...] = ()
    why: str = ""
    ask: str = ""
    root_cause: str = ""
    fix: tuple[FixRule, ...] = ()
    examples: tuple[str, ...] = ()
    source: str = ""

    def match(self, text: str) -> re.Match[str] | None:
        for pattern in self.patterns:
            found = pattern.search(text)
            if found is not None:
                return None if any(one.search(text) for one in self.unless) else found
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line that is no fault and tells something: the engine, the phase, a number."""

    pattern: Pattern
    engine: str = ""
    phase: str = ""
    ready: bool = False
    begin: bool = False
    """A server starts anew here."""
    again: bool = False
    """One starts here; anew, where one was ready before."""
    forgives: tuple[str, ...] = ()
    """Rules whose failures were got over: another way is tried."""
    frame: bool = False
    """A line of a traceback."""
    tag: str = ""
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the JSON calls `cause`; its code is ours where it is our own failure too."""

    name: str
    code: str
    root_cause: str
    means: str
    helps: str


@dataclass(slots=True)
class CandidateRules:
    """Of the book, what could hold of one line."""

    rules: list[Rule] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    frames: list[Mark] = field(default_factory=list)
    benign: list[Pattern] = field(default_factory=list)
    quoted: list[Pattern] = field(default_factory=list)
    wrappers: list[Pattern] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    @property
    def tells(self) -> bool:
        """More than a place in a traceback, or a user's words."""
        return bool(self.rules or self.marks or self.benign or self.wrappers or self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rulebook:
    rules: tuple[Rule, ...]
    marks: tuple[Mark, ...]
    frames: tuple[Mark, ...]
    benign: tuple[Pattern, ...]
    quoted: tuple[Pattern, ...]
    """Lines that carry a user's words, or a model's."""
    wrappers: tuple[Pattern, ...]
    causes: dict[str, Cause]
    literals: tuple[str, ...]
    """One of these is in every line that any of the patterns could match, or that tells settings."""
    index: Index[tuple[int, Any]]
    """Everything in it, with the number of its chapter in a page."""

    @property
    def anything(self) -> re.Pattern[str]:
        """Any of the literals."""
        return any_of(self.literals)

    def page(self, text: str) -> CandidateRules:
        chapters: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
        for chapter, item in self.index.among(text):
            chapters[chapter].append(item)
        return CandidateRules(*chapters)

    def rule(self, name: str) -> Rule:
        return next(rule for rule in self.rules if rule.id == name)


@cache
def rulebook() -> Rulebook:
    documents = [
        tomllib.loads(entry.read_text(encoding="utf-8"))
        for entry in sorted(
            (resources.files("holdfast.doctor") / "rules" / "data").iterdir(), key=lambda entry: entry.name
        )
        if entry.name.endswith(".toml")
    ]
    marks = [_mark(row) for document in documents for row in document.get("mark", ())]
    rules = tuple(_rule(row) for document in documents for row in document.get("rule", ()))
    benign = tuple(Pattern(one) for document in documents for one in document.get("benign", ()))
    quoted = tuple(Pattern(one) for document in documents for one in document.get("quoted", ()))
    wrappers = tuple(Pattern(one) for document in documents for one in document.get("wrapper", ()))
    patterns = [pattern for rule in rules for pattern in rule.patterns]
    patterns += [*(mark.pattern for mark in marks if not mark.frame), *benign, *wrappers]
    literals = (*(literal for pattern in patterns for literal in pattern.literals), *_SETTINGS)
    causes = {
        name: Cause(name=name, **row) for document in documents for name, row in document.get("cause", {}).items()
    }
    places = tuple(mark for mark in marks if mark.frame)
    marks = [mark for mark in marks if not mark.frame]
    return Rulebook(
        rules=rules,
        marks=tuple(marks),
        frames=places,
        benign=benign,
        quoted=quoted,
        wrappers=wrappers,
        causes=causes,
        literals=literals,
        index=_index(rules, marks, places, benign, quoted, wrappers),
    )


def _index(
    rules: Iterable[Rule], marks: Iterable[Mark], frames: Iterable[Mark], *patterns: Iterable[Pattern]
) -> Index[tuple[int, Any]]:
    entries: list[tuple[tuple[int, Any], tuple[str, ...]]] = []
    for rule in rules:
        if rule.patterns:
            blind = any(not pattern.literals for pattern in rule.patterns)
            literals = tuple(literal for pattern in rule.patterns for literal in pattern.literals)
            entries.append(((0, rule), () if blind else literals))
    entries += [((1, mark), mark.pattern.literals) for mark in marks]
    entries += [((2, mark), mark.pattern.literals) for mark in frames]
    for chapter, some in enumerate(patterns, start=3):
        entries += [((chapter, pattern), pattern.literals) for pattern in some]
    return Index([*entries, *(((6, word), (word,)) for word in _SETTINGS)])


def compiled(pattern: str) -> Pattern:
    return Pattern(_MACRO.sub(lambda macro: _MACROS[macro[1]].format(macro[2]), pattern))


def _rule(row: dict[str, Any]) -> Rule:
    fixes = tuple(FixRule(**{**one, "engines": tuple(one.get("engines", ()))}) for one in row.get("fix", ()))
    what = row.get("what", ())
    values = {
        **row,
        "patterns": tuple(compiled(one) for one in row.get("patterns", ())),
        "unless": tuple(compiled(one) for one in row.get("unless", ())),
        "what": (what,) if isinstance(what, str) else tuple(what),
        "engines": tuple(row.get("engines", ())),
        "only_in": tuple(row.get("only_in", ())),
        "without": tuple(row.get("without", ())),
        "yields_to": tuple(row.get("yields_to", ())),
        "examples": tuple(row.get("examples", ())),
        "fix": fixes,
    }
    return Rule(**values)


def _mark(row: dict[str, Any]) -> Mark:
    return Mark(**{**row, "pattern": compiled(row["pattern"]), "forgives": tuple(row.get("forgives", ()))})


def captured(found: re.Match[str]) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers (memory in GiB) and the words that a pattern named."""
    numbers: dict[str, float] = {}
    words: dict[str, str] = {}
    groups = found.groupdict()
    for name, value in groups.items():
        if value is None or name.endswith("__unit"):
            continue
        if name.endswith("__word"):
            words[name.removesuffix("__word")] = value
            continue
        try:
            number = float(value.replace(",", "").replace("_", "").rstrip("."))
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        if name.endswith("__size"):
            plain = name.removesuffix("__size")
            numbers[f"{plain}_gib"] = number * _GIB[(groups.get(f"{plain}__unit") or "G")[0]]
        else:
            numbers[name] = number
    return numbers, words
