"""Several sources judged together: logs, running servers, a command, this machine. One diagnosis out of all.

What two sources say of one cause is one finding, with the evidence of both, and surer for it; where the command is
known from one, the fixes of all are written as that command. Looks at nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.doctor.build_finding import ADVICE
from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.diagnosis.diagnose import diagnose
from holdfast.doctor.findings import Confidence, Diagnosis, Finding, Fix, overall
from holdfast.doctor.probe.machine import MachineFacts, look
from holdfast.doctor.probe.machine_rules import diagnose_machine
from holdfast.doctor.probe.server import DEFAULT_SECONDS, examine

EVIDENCE_HELD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Nothing at all: this machine."""

    logs: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    command: str | None = None
    machine: CommandMachine | None = None
    """The one that the command is for; None: this one."""
    engine_version: str | None = None
    here: bool = False
    """Look at this machine too."""
    seconds: float = DEFAULT_SECONDS
    stream: bool = False
    key: str | None = None

    @property
    def looks_here(self) -> bool:
        return self.here or not (self.logs or self.urls or self.command)


def diagnose_all(sources: Sources) -> tuple[Diagnosis, MachineFacts | None]:
    """And what this machine is, where that was looked at. A command is judged first: its mistakes cost no time."""
    judged = None
    if sources.command is not None:
        judged = judge_command(sources.command, machine=sources.machine, version=sources.engine_version)
    found = [diagnose(sources.logs)] if sources.logs else []
    for url in sources.urls:
        found.append(examine(url, seconds=sources.seconds, key=sources.key, stream=sources.stream))
    if judged is not None:
        found.append(judged)
    facts = look() if sources.looks_here else None
    if facts is not None:
        found.append(diagnose_machine(facts))
    return together(found), facts


def together(found: Sequence[Diagnosis]) -> Diagnosis:
    """Of one, that one. The first that knows engine, version, phase or command is believed."""
    if len(found) == 1:
        return found[0]
    command = next((one.command for one in reversed(found) if one.command is not None), None)
    parsed = None if command is None else parse_command(command)
    findings: dict[str, Finding] = {}
    for diagnosis in found:
        for finding in diagnosis.findings:
            if finding.cause == "none":
                continue
            known = findings.get(finding.cause)
            findings[finding.cause] = _written(finding if known is None else _joined(known, finding), parsed)
    return Diagnosis(
        engine=next((one.engine for one in found if one.engine is not None), None),
        engine_version=next((one.engine_version for one in found if one.engine_version is not None), None),
        command=command,
        phase=next((one.phase for one in found if one.phase is not None), None),
        healthy=all(name in ADVICE for name in findings) and all(one.healthy for one in found),
        findings=list(findings.values()),
        missing=list(dict.fromkeys(text for one in found for text in one.missing)),
        seen=list(dict.fromkeys(text for one in found for text in one.seen)),
        programs={name: told for one in found for name, told in one.programs.items()},
    )


def _joined(first: Finding, second: Finding) -> Finding:
    """Two that agree: neither is a guess any more."""
    fixes = [fix for fix in (first.fix, *first.alternatives, second.fix, *second.alternatives) if fix is not None]
    # One that names what to set comes before words.
    fixes.sort(key=lambda fix: not fix.changes)
    surer: Confidence = "high" if {first.cause_confidence, second.cause_confidence} & {"high", "medium"} else "medium"
    best = fixes[0] if fixes else None
    return msgspec.structs.replace(
        first,
        confidence=overall(surer, best),
        cause_confidence=surer,
        evidence=[*first.evidence, *second.evidence][:EVIDENCE_HELD],
        fix=best,
        alternatives=fixes[1:],
        numbers={**second.numbers, **first.numbers},
    )


def _written(finding: Finding, command: ServerCommand | None) -> Finding:
    if command is None:
        return finding

    def whole(fix: Fix) -> Fix:
        if not fix.changes or "--model" in fix.changes:
            return fix
        return msgspec.structs.replace(fix, command=command.with_changes(fix.changes))

    fix = None if finding.fix is None else whole(finding.fix)
    return msgspec.structs.replace(finding, fix=fix, alternatives=[whole(one) for one in finding.alternatives])
