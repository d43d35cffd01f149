"""The rules as they stand in rules/data/*.toml, read once: patterns compiled, nothing judged.

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

import msgspec

from holdfast.doctor.findings import Basis, Confidence, RootCause
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


class Texts(tuple[str, ...]):
    """Templates, of which the first counts whose names are all known; one alone may be written as a string."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file of rules."""


class FixRule(Entry, frozen=True, kw_only=True):
    change: dict[str, Any] = {}
    """Our flag (vLLM's word, or a variable) to an expression, a literal in quotes, "" for a bare flag, false: gone."""
    when: str = ""
    why: str = ""
    price: str = ""
    run: str = ""
    """Another command than the server's that helps, where no flag does."""
    engines: tuple[str, ...] = ()
    basis: Basis | None = None
    """Where it is not said, it follows from the change (fixes.py): a number of the log is computed, one that is not of
    the log is a first try, a command that is no server's shows something, and anything else is what usually helps."""


class Blind(Entry, frozen=True, kw_only=True):
    """How a rule's answers were judged, cause and first fix, on logs whose judgement was written down before the doctor
    read them, with the rules of that time: whatever was changed in view of a log, that log does not count."""

    right: int = 0
    """Those that the rule still gives."""
    wrong: int = 0
    """Since its meaning was changed last."""
    mended: int = 0
    """Wrong ones in view of which it was changed: its words have neighbours."""


class Rule(Entry, frozen=True, kw_only=True):
    id: str
    cause: str
    code: str = ""
    """Of the error itself, where it has one; else its cause's."""
    kind: Kind = "fatal"
    engines: tuple[str, ...] = ()
    """Engines that print this; empty: any."""
    phase: str = ""
    """Where it happens, when nothing in the log shows it; with `phase_fixed`, always."""
    phase_fixed: bool = False
    confidence: Confidence = "high"
    patterns: tuple[Pattern, ...] = ()
    unless: tuple[Pattern, ...] = ()
    sure: tuple[Pattern, ...] = ()
    """High needs one of these in a line that it matched, with what stands before the message; none: any line does."""
    sure_with: tuple[str, ...] = ()
    """Or one of these tags, of the run or of the error's own traceback."""
    unsure_with: tuple[str, ...] = ()
    """Tags of the run with which the same words leave a choice."""
    by_itself: bool = False
    """The message says whose it is and what helps, whichever engine runs: none need be known."""
    over: Literal["lines", "end", "load", "figures", "recovery"] = "lines"
    """Not of a line, but of all numbers together: how a log without an error ends, what was loaded, what a running
    server reports (rank.py)."""
    when: str = ""
    """On the numbers of the line itself, or of the whole log."""
    numbers: dict[str, str] = {}
    """Of a rule that is not of a line: what its finding says, and the formula of each."""
    only_in: tuple[str, ...] = ()
    """Phases; where the log has told another, these words mean something else."""
    yields_to: tuple[str, ...] = ()
    """Rules that say of the same failure what it was for."""
    without: tuple[str, ...] = ()
    """Tags of the run with which these words mean nothing."""
    needs: tuple[str, ...] = ()
    """Tags of the run without one of which these words mean something else."""
    severe: bool = False
    """Means nothing in a line that is logged as a warning or less: the program went on without it."""
    lasting: bool = False
    """Of a model for good: that Ollama loaded another one later does not undo it."""
    effect: bool = False
    """Most often follows from something else: named after it."""
    least: int = 1
    """Times it must be seen to be more than chance."""
    out_of_memory: bool = False
    """An allocation failed: what it means is judged by the phase and the numbers."""
    what: Texts = Texts()
    why: str = ""
    root_cause: RootCause | None = None
    fix: tuple[FixRule, ...] = ()
    examples: tuple[str, ...] = ()
    source: str = ""
    blind: Blind = Blind()
    settles: Literal["", "both_sides", "remedy"] = ""
    """Whether the message itself settles cause and fix, so that no record is needed: it has what was asked for and what
    there is or is allowed, and the fix changes one of the two; or it names what has to be done."""

    @property
    def literals(self) -> tuple[str, ...]:
        """One of these is in whatever matches; none: nothing can be said."""
        each = [pattern.literals for pattern in self.patterns]
        return tuple(literal for some in each for literal in some) if all(each) else ()

    def match(self, text: str) -> re.Match[str] | None:
        for pattern in self.patterns:
            found = pattern.search(text)
            if found is not None:
                return None if any(one.search(text) for one in self.unless) else found
        return None


class Mark(Entry, frozen=True, kw_only=True):
    """A line that is no fault and tells something: the engine, the phase, a number."""

    pattern: Pattern
    engine: str = ""
    prose: bool = False
    """People write these words too: they tell the engine, and are not enough for a sure answer."""
    phase: str = ""
    ready: bool = False
    begin: bool = False
    """A server starts anew here."""
    restarted: bool = False
    """A supervisor restarts it here: the first line of the new one does not follow from another start."""
    again: bool = False
    """One starts here; anew, where one was ready before."""
    forgives: tuple[str, ...] = ()
    """Rules whose failures were got over: another way is tried."""
    recovers: bool = False
    """Holdfast has recovered from the failures of its engine process: they become advice, as `engine_recovered`."""
    frame: bool = False
    """A line of a traceback."""
    tag: str = ""
    example: str = ""


class Cause(Entry, frozen=True, kw_only=True):
    """What the JSON calls `cause`; its code is ours where it is our own failure too."""

    name: str = ""
    code: str
    root_cause: RootCause
    means: str
    helps: str


class ProbeRule(Entry, frozen=True, kw_only=True):
    """A rule over what was seen of a machine or of a running server: numbers in place of lines."""

    about: str
    id: str
    cause: str
    root_cause: RootCause = "not_memory"
    confidence: Confidence = "high"
    surer: dict[Confidence, str] = {}
    """Another confidence, and when."""
    when: str = ""
    figures: tuple[str, ...] = ()
    """Of a server's metrics: evidence, and numbers of the finding."""
    evidence: str = ""
    """One line or several."""
    numbers: tuple[str, ...] = ()
    what: Texts
    why: Texts
    fix: tuple[FixRule, ...] = ()
    also: str = ""
    """More fixes, which several rules have: `fixes.NAME`."""


class RuleFile(Entry, frozen=True, kw_only=True):
    """One file of rules/data."""

    rule: tuple[Rule, ...] = ()
    mark: tuple[Mark, ...] = ()
    benign: tuple[Pattern, ...] = ()
    quoted: tuple[Pattern, ...] = ()
    """Lines that carry a user's words, or a model's."""
    wrapper: tuple[Pattern, ...] = ()
    cause: dict[str, Cause] = {}
    probe: tuple[ProbeRule, ...] = ()
    fixes: dict[str, tuple[FixRule, ...]] = {}


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
    quoted: tuple[Pattern, ...]
    probes: tuple[ProbeRule, ...]
    fixes: dict[str, tuple[FixRule, ...]]
    """Those that several rules have."""
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


def _decoded(kind: type, value: Any) -> Any:
    """For msgspec: what is a string in the files, and more than that here."""
    if kind is Pattern:
        return compiled(value)
    return Texts((value,) if isinstance(value, str) else value)


@cache
def rulebook() -> Rulebook:
    folder = resources.files("holdfast.doctor") / "rules" / "data"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    parsed = [tomllib.loads((folder / name).read_text(encoding="utf-8")) for name in names]
    every = [msgspec.convert(document, RuleFile, dec_hook=_decoded) for document in parsed]
    rules = tuple(rule for one in every for rule in one.rule)
    marks = tuple(mark for one in every for mark in one.mark)
    frames = tuple(mark for mark in marks if mark.frame)
    marks = tuple(mark for mark in marks if not mark.frame)
    benign, quoted, wrappers = (
        tuple(pattern for one in every for pattern in getattr(one, name)) for name in ("benign", "quoted", "wrapper")
    )
    chapters: tuple[Iterable[tuple[object, tuple[str, ...]]], ...] = (
        ((rule, rule.literals) for rule in rules if rule.patterns),
        *(((mark, mark.pattern.literals) for mark in some) for some in (marks, frames)),
        *(((pattern, pattern.literals) for pattern in some) for some in (benign, quoted, wrappers)),
        ((word, (word,)) for word in _SETTINGS),
    )
    entries = [((number, item), literals) for number, chapter in enumerate(chapters) for item, literals in chapter]
    patterns = [pattern for rule in rules for pattern in rule.patterns]
    patterns += [*(mark.pattern for mark in marks), *benign, *wrappers]
    return Rulebook(
        rules=rules,
        marks=marks,
        frames=frames,
        quoted=quoted,
        probes=tuple(probe for one in every for probe in one.probe),
        fixes={name: fixes for one in every for name, fixes in one.fixes.items()},
        causes={name: msgspec.structs.replace(row, name=name) for one in every for name, row in one.cause.items()},
        literals=(*(literal for pattern in patterns for literal in pattern.literals), *_SETTINGS),
        index=Index(entries),
    )


def compiled(pattern: str) -> Pattern:
    return Pattern(_MACRO.sub(lambda macro: _MACROS[macro[1]].format(macro[2]), pattern))


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
