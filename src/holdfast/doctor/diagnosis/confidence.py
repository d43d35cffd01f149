"""How sure the cause of a finding of a log may be called. Its first fix may lower the whole answer (findings.overall).

    high     the message leaves no choice, no other error stands before or after it, the engine is known by lines of
             its own or does not matter, and the rule is proven: by what the message has in it, or by its blind record
    medium   the evidence fits best, and one of these is missing
    low      the log does not say

Only lowers: what a rule is unsure of by itself is not raised here.
"""

from __future__ import annotations

from holdfast.doctor.evidence.log_state import NEAR_LINES, Event, LogState, Run
from holdfast.doctor.findings import Confidence, Fix, overall
from holdfast.doctor.rules.load import Rule

FAILURES = ("fatal", "running", "request")
"""Kinds of rules."""
PROVEN = 3
"""Blind answers that were right, and none wrong, from which on a rule may be called sure whose message does not settle
it: such rules speak of things that the log does not show (a file, a folder, a name, a port)."""
PROVEN_AGAIN = 6
"""Of a rule that was wrong before it was changed: its words have neighbours, and there may be more of them."""


def cause_confidence(log: LogState, rule: Rule, event: Event, judged: Confidence) -> Confidence:
    if judged != "high" or rule.kind not in FAILURES:
        return judged
    return "high" if _settled(log, rule, event) else "medium"


def answer_confidence(rule: Rule, cause: Confidence, fix: Fix | None) -> Confidence:
    """Advice to a server that is well may need no fix."""
    return overall(cause, fix) if rule.kind in FAILURES else cause


def _settled(log: LogState, rule: Rule, event: Event) -> bool:
    known = rule.by_itself or log.engine in log.spoke
    if not known or not proven(rule):
        return False
    if not rule.code and not _leaves_no_choice(log, rule, event):
        return False
    return not _died_of_another(log, event) if rule.kind != "fatal" else not _another_follows(log, event)


def proven(rule: Rule) -> bool:
    """Errors of Holdfast's own, which have a code, need no record."""
    record = rule.blind
    if rule.code or record.wrong:
        return bool(rule.code)
    return bool(rule.settles) or record.right >= (PROVEN_AGAIN if record.mended else PROVEN)


def _leaves_no_choice(log: LogState, rule: Rule, event: Event) -> bool:
    """In such a line, of such a run: neighbours of a message share most of its words."""
    run = _run_of(log, event)
    tags = (event.tags if run is None else run.tags) | (set() if event.trace is None else event.trace.tags)
    return tags.isdisjoint(rule.unsure_with) and (event.sure or not tags.isdisjoint(rule.sure_with))


def _died_of_another(log: LogState, event: Event) -> bool:
    """The server that refused a request failed too, of an error that no rule knows: that one is the matter."""
    run = _run_of(log, event)
    return run is not None and (run.died or run.named or run.last_words is not None)


def comes_after_another(log: LogState, event: Event) -> bool:
    """An error that no rule knows stands before it: it may be what this one follows from."""
    run = _run_of(log, event)
    first = None if run is None or not run.named else run.first_named
    return first is not None and first < event.line - NEAR_LINES


def _another_follows(log: LogState, event: Event) -> bool:
    """Another error stands after it, apart from it, that no rule knows or that has another cause: that one may be what
    ended the server."""
    run = _run_of(log, event)
    if run is None:
        return False
    end = max(event.line, *(one.number or 0 for one in event.evidence), 0) + NEAR_LINES
    if run.last_error is not None and run.last_error > end:
        return True
    others = (one for one in run.events.values() if one.rule.kind == "fatal" and not one.rule.effect)
    return any(one.rule.cause != event.rule.cause and one.line > end and one.ready == event.ready for one in others)


def _run_of(log: LogState, event: Event) -> Run | None:
    return next((one for one in log.runs if event in one.events.values()), None)
