"""How a finding that comes from no log is written: one place for its code and for a fix as a whole command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Evidence, Finding, Fix, RootCause
from holdfast.doctor.rules.load import rulebook

Confidence = Literal["high", "medium", "low"]
ADVICE = ("prefix_caching_unused",)
"""Causes that a server is well with."""


def found(
    cause: str,
    root: RootCause,
    confidence: Confidence,
    *,
    what: str,
    why: str,
    evidence: Sequence[Evidence] = (),
    fixes: Sequence[Fix] = (),
    numbers: Mapping[str, float] | None = None,
) -> Finding:
    """The first of `fixes` is the fix, the others are second choices."""
    return Finding(
        code=code_of(cause),
        root_cause=root,
        cause=cause,
        confidence=confidence,
        what=what,
        why=why,
        evidence=list(evidence),
        fix=fixes[0] if fixes else None,
        alternatives=list(fixes[1:]),
        numbers=dict(numbers or {}),
    )


def code_of(cause: str) -> str:
    """As `holdfast explain` takes it; the rules of logs have the same."""
    known = rulebook().causes.get(cause)
    return cause if known is None else known.code


def changed(
    command: ServerCommand | None, changes: Mapping[str, str | None], why: str, price: str | None = None
) -> Fix:
    """With the whole command, where one is known."""
    text = command.with_changes(changes) if command is not None and changes else None
    return Fix(command=text, changes=dict(changes), why=why, price=price)
