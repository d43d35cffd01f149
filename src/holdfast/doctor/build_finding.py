"""Builds findings for machines, running servers and commands: from the probe rules, or directly with code, text and
fixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Basis, Confidence, Evidence, Finding, Fix, RootCause, overall
from holdfast.doctor.rules.formulas import evaluate, filled, holds, written
from holdfast.doctor.rules.load import FixRule, rulebook
from holdfast.engine_profiles.profile import profile

__all__ = ["ADVICE", "Confidence", "changed", "code_of", "flag_of", "found", "judged"]

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
    """The first of `fixes` is the fix, the others are second choices; `confidence` is that of the cause."""
    first = fixes[0] if fixes else None
    return Finding(
        code=code_of(cause),
        root_cause=root,
        cause=cause,
        confidence=overall(confidence, first),
        cause_confidence=confidence,
        what=what,
        why=why,
        evidence=list(evidence),
        fix=first,
        alternatives=list(fixes[1:]),
        numbers=dict(numbers or {}),
    )


def code_of(cause: str) -> str:
    """As `holdfast explain` takes it; the rules of logs have the same."""
    known = rulebook().causes.get(cause)
    return cause if known is None else known.code


def changed(
    command: ServerCommand | None,
    changes: Mapping[str, str | None],
    why: str,
    price: str | None = None,
    *,
    basis: Basis = "computed",
) -> Fix:
    """With the whole command, where one is known."""
    text = command.with_changes(changes) if command is not None and changes else None
    return Fix(command=text, changes=dict(changes), why=why, price=price, basis=basis)


def judged(
    about: str,
    numbers: Mapping[str, float],
    words: Mapping[str, object],
    *,
    source: str,
    engine: str | None = None,
    named: str | None = None,
    lines: Sequence[str] = (),
) -> Iterator[Finding]:
    """What the rules of `about` say, in their order; `named`: only those of this id. `lines` are evidence where a rule
    has none of its own."""
    values = {**words, **numbers}
    for rule in rulebook().probes:
        if rule.about != about or named not in (None, rule.id) or not holds(rule.when, numbers):
            continue
        seen = [line for line in filled((rule.evidence,), values).split("\n") if line]
        seen += [str(words[f"{figure}_line"]) for figure in rule.figures if f"{figure}_line" in words]
        fixes = (_fix(one, numbers, values, engine) for one in (*rule.fix, *rulebook().fixes.get(rule.also, ())))
        yield found(
            rule.cause,
            rule.root_cause,
            next((level for level, when in rule.surer.items() if holds(when, numbers)), rule.confidence),
            what=filled(rule.what, values),
            why=filled(rule.why, values),
            evidence=[Evidence(line=line, source=source) for line in seen or lines],
            fixes=[fix for fix in fixes if fix is not None],
            numbers={name: numbers[name] for name in (*rule.figures, *rule.numbers) if name in numbers},
        )


def _fix(rule: FixRule, numbers: Mapping[str, float], values: Mapping[str, object], engine: str | None) -> Fix | None:
    """None: it is not for this engine, or does not hold."""
    if not holds(rule.when, numbers) or (rule.engines and engine not in rule.engines):
        return None
    changes: dict[str, str | None] = {}
    for ours, formula in rule.change.items():
        amount = evaluate(formula, numbers)
        if amount is None and not formula.startswith("'"):
            return None
        value = formula.strip("'") if amount is None else written(amount)
        changes[flag_of(engine, ours)] = value
        values = {**values, f"new_{ours.replace('-', '_')}": value}
    return Fix(
        command=filled((rule.run,), values) or None,
        changes=changes,
        why=filled((rule.why,), values),
        price=filled((rule.price,), values) or None,
        basis=rule.basis or ("computed" if changes else "look" if rule.run else "usual"),
    )


def flag_of(engine: str | None, ours: str) -> str:
    """The engine's flag for our word, or our own."""
    return profile(engine or "vllm").spelling(ours) or f"--{ours}"
