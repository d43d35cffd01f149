"""A diagnosis in words: what happened, the evidence, the cause, the fix, what else there is and what it costs.

Keys that stand in the evidence are hidden: what a doctor says is pasted into tickets. Judges nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from holdfast.doctor.findings import ENDED_IN_ORDER, Basis, Diagnosis, Finding, Fix
from holdfast.doctor.report.redact import without_secrets, without_values
from holdfast.doctor.report.secret_names import GONE, holds_secret, values_of_flags

ALTERNATIVES_SHOWN = 4
NOT_PLANNED = "Nothing is wrong with the command itself, but it was not planned: it is not known whether it fits."
_INDENT = "  "
_EVIDENCE_WIDTH = 300
_BASES: Mapping[Basis, str] = {
    "planned": "computed, and planned: it fits",
    "computed": "computed from what was seen",
    "stated": "follows from what was seen",
    "first_try": "a first value to try; the right one depends on what was not seen",
    "usual": "what usually helps; nothing that was seen confirms it",
    "look": "no fix yet: it shows what has to be changed",
}


def lines(diagnosis: Diagnosis, *, width: int = 100, of_command: bool = False) -> Iterator[str]:
    """`of_command`: it is of a command alone, which nobody has run yet."""
    yield _heading(diagnosis)
    if diagnosis.healthy:
        ended = ENDED_IN_ORDER in diagnosis.seen
        advice = "; what follows is advice" if diagnosis.findings else ""
        yield "Nothing is wrong." if ended else f"Nothing is wrong: the server started and serves{advice}."
    elif not diagnosis.findings:
        yield NOT_PLANNED if of_command else "No known problem was found; the server may still be unhealthy."
    for one in diagnosis.seen:
        yield from _paragraph("seen", one, width)
    for at, finding in enumerate(diagnosis.findings):
        yield ""
        yield from _finding(finding, at, len(diagnosis.findings), width)
    if diagnosis.missing:
        yield ""
        yield "For higher confidence, provide:"
        for one in diagnosis.missing:
            yield from _paragraph("-", one, width)


def without_keys(diagnosis: Diagnosis) -> Diagnosis:
    """The same, with keys and tokens hidden: in the lines of the evidence, and wherever else those of them stand."""
    told = [diagnosis.command or "", *(one.line for finding in diagnosis.findings for one in finding.evidence)]
    changes = [item for finding in diagnosis.findings if finding.fix for item in finding.fix.changes.items()]
    values = frozenset(value for name, value in changes if value and holds_secret(name, value))
    values = values.union(*map(values_of_flags, told))
    replace = msgspec.structs.replace

    def of_fix(fix: Fix) -> Fix:
        changes = {name: GONE if value and holds_secret(name, value) else value for name, value in fix.changes.items()}
        command = None if fix.command is None else without_values(fix.command, values)
        return replace(fix, why=without_values(fix.why, values), command=command, changes=changes)

    findings = [
        replace(
            finding,
            what=without_values(finding.what, values),
            why=without_values(finding.why, values),
            evidence=[replace(one, line=without_secrets(one.line)) for one in finding.evidence],
            fix=None if finding.fix is None else of_fix(finding.fix),
            alternatives=[of_fix(one) for one in finding.alternatives],
        )
        for finding in diagnosis.findings
    ]
    command = None if diagnosis.command is None else without_values(diagnosis.command, values)
    return replace(diagnosis, findings=findings, command=command)


def lines_of_findings(diagnosis: Diagnosis, *, width: int = 100) -> Iterator[str]:
    """For a reader who has just seen the lines of the log: the findings, without the evidence."""
    for at, finding in enumerate(diagnosis.findings):
        yield from _finding(msgspec.structs.replace(finding, evidence=[]), at, len(diagnosis.findings), width)


def _heading(diagnosis: Diagnosis) -> str:
    if diagnosis.programs:
        return "; ".join(f"{name}: {told}" for name, told in diagnosis.programs.items())
    engine = diagnosis.engine or "unknown engine"
    version = f" {diagnosis.engine_version}" if diagnosis.engine_version else ""
    phase = f", phase: {diagnosis.phase}" if diagnosis.phase else ""
    return f"{engine}{version}{phase}"


def _finding(finding: Finding, at: int, count: int, width: int) -> Iterator[str]:
    ordinal = f" ({at + 1} of {count})" if count > 1 else ""
    yield from _paragraph(f"what{ordinal}", finding.what, width)
    for evidence in finding.evidence[:3]:
        where = f"{evidence.source}:{evidence.number}: " if evidence.number is not None else ""
        yield f"{_INDENT}{'evidence':<9} {where}{evidence.line[:_EVIDENCE_WIDTH]}"
    sure = f"{finding.cause} [{finding.code}], {finding.root_cause}, confidence {finding.confidence}"
    fix = "" if finding.fix is None else "; its fix is not sure"
    of_cause = (
        f" (the cause: {finding.cause_confidence}{fix})" if finding.cause_confidence != finding.confidence else ""
    )
    yield f"{_INDENT}{'cause':<9} {sure}{of_cause}"
    yield from _paragraph("", finding.why, width)
    if finding.fix is not None:
        yield from _fix("fix", finding.fix, width)
    for alternative in finding.alternatives[:ALTERNATIVES_SHOWN]:
        yield from _fix("or", alternative, width)
    more = len(finding.alternatives) - ALTERNATIVES_SHOWN
    if more > 0:
        yield from _paragraph("", f"and {more} more: --json has them", width)


def _fix(label: str, fix: Fix, width: int) -> Iterator[str]:
    """The fix as a whole command, where one is known; second choices, and what is set on a server whose command is not
    known, as the flags that change."""
    price = f" (price: {fix.price})" if fix.price else ""
    basis = f" [{_BASES[fix.basis]}]" if label == "fix" else ""
    whole = label == "fix" and fix.command is not None
    why = fix.why.removeprefix(f"{fix.changes.get('--model')}: ")  # It stands before it already.
    said = fix.why if whole else f"{changes_of(fix) or fix.command or ''}: {why}".removeprefix(": ")
    yield from _paragraph(label, f"{said}{price}{basis}", width)
    if whole:
        yield f"{_INDENT}{'':<9} {fix.command}"


def changes_of(fix: Fix) -> str:
    """As flags are written."""
    return " ".join(
        name if value == "" else f"{name} {value}" if value else f"without {name}"
        for name, value in fix.changes.items()
    )


def _paragraph(label: str, text: str, width: int) -> Iterator[str]:
    start = f"{_INDENT}- " if label == "-" else f"{_INDENT}{label:<9} "
    yield from textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start]
