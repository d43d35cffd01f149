"""What the doctor says, as records: the JSON of `holdfast doctor --json` is these. Knows no rule and no log."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["args", "download", "load", "profile", "capture", "warmup", "serve", "request"]
RootCause = Literal["configuration_overshoot", "kv_blowout", "concurrency_misjudged", "does_not_fit", "not_memory"]
Confidence = Literal["high", "medium", "low"]
Basis = Literal["planned", "computed", "stated", "first_try", "usual", "look"]
"""What a fix rests on.

    planned     computed from the numbers seen, and the planner says that it fits
    computed    computed from the numbers seen
    stated      what the message itself asks for, or the only thing that ends what it names
    first_try   a value that may have to be another: what decides it was not seen
    usual       what usually helps: nothing that was seen confirms it
    look        no fix yet: it shows what has to be changed
"""
SURE: frozenset[Basis] = frozenset(("planned", "computed", "stated"))
"""A fix with one of these is of high confidence, any other of medium."""

ENDED_IN_ORDER = "the log ends with an orderly shutdown: the server does not run now, and nothing failed"
"""Among what was seen."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it stood there, without its colours."""

    line: str
    number: int | None = None
    """Counted from 1 in its source."""
    source: str | None = None


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    command: str | None = None
    """Complete; MODEL stands in it where the model is not known. None where no command helps, only what `why` says."""
    changes: dict[str, str | None] = {}
    """Flag to its new value; None: the flag is taken away."""
    why: str = ""
    price: str | None = None
    """What it costs, where it costs something."""
    basis: Basis = "usual"
    first_try: bool = False
    """It depends on what was not seen. Follows from the basis, whatever is given."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "first_try", self.basis not in SURE)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    root_cause: RootCause
    cause: str
    confidence: Confidence
    """Of the whole answer: high only where the cause and the first fix are (`overall`)."""
    cause_confidence: Confidence
    what: str
    """What happened, in one sentence."""
    evidence: list[Evidence]
    why: str
    """The cause, in words."""
    fix: Fix | None = None
    alternatives: list[Fix] = []
    numbers: dict[str, float] = {}
    """What was read from the evidence: bytes, tokens, shares, named with their unit."""


def overall(cause: Confidence, fix: Fix | None) -> Confidence:
    """An answer is no surer than its first fix: one that does not help is a wrong answer to whoever needs it."""
    return "medium" if cause == "high" and (fix is None or fix.basis not in SURE) else cause


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    engine: str | None
    engine_version: str | None
    command: str | None
    phase: Phase | None
    healthy: bool
    findings: list[Finding]
    missing: list[str] = []
    """What would make the answer surer, as something to paste or run."""
    seen: list[str] = []
    """What was looked at and measured, in words, also when nothing is wrong: the machine that was planned for, its
    budget and what is left; a server's requests, KV and tokens per second."""
    programs: dict[str, str] = {}
    """Where several servers were judged apart: the name of each, and its engine, version and phase. `engine`, `phase`
    and `engine_version` are then those of the first finding's, and there is no one command."""
    version: int = 1
