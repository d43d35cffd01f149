"""Turns the evidence of a log into a diagnosis: which findings hold, root cause first, with confidence.

The phase decides; an error that only wraps another is never the cause; errors before the server became ready are
ignored if it did become ready. Texts and formulas are in the rules, commands in fixes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

import msgspec

from holdfast.doctor.diagnosis.confidence import answer_confidence, cause_confidence, comes_after_another
from holdfast.doctor.diagnosis.fix_plans import Case, checked
from holdfast.doctor.diagnosis.fixes import base_command, fixes, known_numbers, known_words
from holdfast.doctor.diagnosis.out_of_memory import judge as judge_memory
from holdfast.doctor.diagnosis.out_of_memory import phase_of
from holdfast.doctor.evidence.holdfast_errors import own_fixes, refined
from holdfast.doctor.evidence.log_state import STARTING, Event, LogState, Run, further
from holdfast.doctor.findings import ENDED_IN_ORDER, Confidence, Diagnosis, Evidence, Finding, Fix, Phase, RootCause
from holdfast.doctor.logs.line import read_line
from holdfast.doctor.rules.formulas import evaluate, filled, holds
from holdfast.doctor.rules.load import Cause, Rule, rulebook

_KINDS = {"fatal": 0, "running": 1, "request": 2, "advice": 3, "hint": 4}
_COMMAND = "the command that started the server, or the lines of the log that print its arguments"
_ABOVE = "the lines above {quoted!r}: that line only passes on an error that was logged earlier"
_BELOW = "the lines below {quoted!r}: the traceback with the error follows it"
_FIRST = ("failed to start", "hit an exception", "encountered a fatal error")
"""Words of lines that come before the traceback they pass on."""
_TORN = "the rest of the log: it ends inside a traceback, before the error itself"
_REST = "the rest of the log: it ends while the server is still starting, with no error in it"
LOOP_STARTS = 3
"""Two may be somebody who tried twice."""
_LOOPS = "The server is restarted in a loop: {} starts in this log failed{}."
_ONCE = "It was restarted after that, and the log ends in the middle of the new start."
_OPEN = ", and the log ends in the middle of another"
_QUOTED = 160
"""Characters of an error that are shown."""
_OF_MEMORY = re.compile(
    r"(?i)out of memory|\boom\b|\w*alloc(?:at|\b|_)|\d ?[gm]i?b\b|\bkv.cache\b|\bvram\b"
    r"|\b(?:gpu|free|insufficient|enough) memory"
)
_NOT_KNOWN = "not known; nothing in the log points to memory"
_MEMORY_NOT_KNOWN = "not known; but the error mentions memory, so memory may be the cause"
_NEAR_NOT_KNOWN = "not known; but lines next to the error mention memory, so memory may be the cause"
_UNWRAPPED = "the log as the program wrote it: lines next to the error look like parts of it that were wrapped"
_START = "the log from the start of the server: it shows phase, version and settings"
_NOTHING = (
    "a log of an inference server: nothing in this text was recognized, or it is empty"
    " (sudo journalctl -u UNIT, kubectl logs POD --previous, docker logs CONTAINER)"
)
_ADVICE = ("prefix_caching_unused", "utilization_too_low")
"""What the figures of a server that is well may show."""
BLOCK_TOKENS = 16
_BILLIONS = re.compile(r"(?<![\dx.])(\d+(?:\.\d+)?)[bB](?![a-z])")
_QUANTIZED = re.compile(r"(?i)awq|gptq|fp8|int4|int8|w4a16|w8a8|bnb|gguf|nvfp4|mxfp4")
UNKNOWN_EVIDENCE = 3
_OF_MANY_KINDS = ("other", "bad_flag")
"""Causes under which messages stand that have nothing to do with each other: one says nothing of the next."""


@dataclass(slots=True)
class Candidate:
    event: Event
    rule: Rule
    phase: str | None
    confidence: Confidence


def diagnosis(log: LogState) -> Diagnosis:
    """Where the log ends in the middle of another start: of what the start before it died of."""
    settled = log.without_open_start()
    found = _diagnosis(settled)
    if found.healthy or not found.findings:
        return found
    failed = log.failed_starts + (log.run.failed and settled is log)
    if settled is log and failed < LOOP_STARTS:
        return found
    looped = _ONCE if failed == 1 else _LOOPS.format(failed, _OPEN if settled is not log else "")
    first = msgspec.structs.replace(found.findings[0], what=f"{found.findings[0].what} {looped}")
    return msgspec.structs.replace(found, findings=[first, *found.findings[1:]])


def _diagnosis(log: LogState) -> Diagnosis:
    candidates = _candidates(log)
    ready = any(run.ready or run.waits for run in log.final_runs)
    missing: list[str] = []
    if not candidates and not ready:
        candidates = list(islice(_by_numbers(log, "end"), 1))
    advice = bool(candidates) and ready and all(one.rule.kind == "advice" for one in candidates)
    findings = [_finding(log, candidate) for candidate in candidates]
    phase = candidates[0].phase if candidates and not advice else log.run.phase
    if any(one.rule.kind == "fatal" for one in candidates):
        findings = [*_new(log, "load", findings), *findings]
    figures = _new(log, "figures", findings)
    findings += figures
    died = any(run.died for run in log.final_runs) and not any(one.rule.kind == "fatal" for one in candidates)
    lives_on = not ready and all(one.rule.kind in ("running", "advice") for one in candidates)
    unknown = _unexplained(log, missing) if not findings or advice or died or lives_on else None
    if unknown is not None:
        findings = [unknown, *findings]
        phase = next((run.unexplained_phase for run in log.final_runs if run.unexplained_phase), phase)
    serious = unknown is not None or (bool(candidates) and not advice)
    serious = serious or any(one.cause not in _ADVICE for one in figures)
    healthy = not serious and ready
    if log.run.torn_off is not None and not healthy and (not findings or findings[0].confidence == "low"):
        missing.append(_TORN)
    if not findings and not healthy and not missing:
        missing.append(_REST if log.run.phase is not None or log.engine is not None else _NOTHING)
    if findings and log.engine != "ollama" and log.settings.rebuilt(log.engine or "vllm") is None:
        missing.append(_COMMAND)
    if findings and candidates and candidates[0].phase is None:
        missing.append(_START)
    command = log.settings.rebuilt(log.engine or "vllm")
    return Diagnosis(
        engine=log.engine,
        engine_version=log.version,
        command=None if command is None else command.with_changes({}),
        phase=_told(log, phase or ("serve" if ready else None)),
        healthy=healthy,
        findings=findings,
        missing=missing,
        seen=[ENDED_IN_ORDER] if healthy and all("ended" in run.tags for run in log.final_runs) else [],
    )


def _told(log: LogState, phase: str | None) -> Phase | None:
    """llama.cpp tries nothing: its context is made while it loads."""
    loads = phase == "profile" and log.engine in ("llama.cpp", "ollama")
    return cast("Phase | None", "load" if loads else phase)


def _new(log: LogState, over: str, known: list[Finding]) -> list[Finding]:
    causes = {finding.cause for finding in known}
    return [_finding(log, one) for one in _by_numbers(log, over) if one.rule.cause not in causes]


def _candidates(log: LogState) -> list[Candidate]:
    found: list[Candidate] = []
    for run in log.judged_runs():
        for event in run.events.values():
            better = [run.events[name] for name in event.rule.yields_to if name in run.events]
            said_better = any(_applies(run, one.rule) for one in better)
            ended = event.trace is not None and event.trace.ended
            answered = event.rule.kind == "hint" and (ended or run.named)
            if not _applies(run, event.rule) or _killed_after_an_error(run, event):
                continue
            if said_better or answered or event.times < event.rule.least or _outlived(log, run, event):
                continue
            found.append(_candidate(log, event))
    if not found:
        found = _passed_over(log)
    found.sort(key=lambda one: (_KINDS[one.rule.kind], one.rule.effect, one.event.line))
    chosen: dict[str, Candidate] = {}
    for candidate in found:
        first = chosen.get(candidate.rule.cause)
        surer = first is not None and first.rule.kind == candidate.rule.kind and not candidate.rule.effect
        surer = surer and candidate.rule.cause not in _OF_MANY_KINDS
        if first is None or _says_more(candidate, first):
            chosen[candidate.rule.cause] = candidate
        if first is not None and surer and "high" in (first.confidence, candidate.confidence):
            chosen[candidate.rule.cause].confidence = "high"  # One of them leaves no choice, and both say the same.
    kept = sorted(chosen.values(), key=lambda one: (_KINDS[one.rule.kind], one.rule.effect, one.event.line))
    known = [one for one in kept if one.rule.kind != "hint"]
    serious = any(one.rule.kind != "advice" for one in known)
    return _without_shadows(known if serious else kept)


def _applies(run: Run, rule: Rule) -> bool:
    """Whether the message means this in such a run: one on a CPU, one over several nodes."""
    needed = not rule.needs or not run.tags.isdisjoint(rule.needs)
    return needed and run.tags.isdisjoint(rule.without)


def _passed_over(log: LogState) -> list[Candidate]:
    """Messages of another engine, or of a start after it, where the log has no better reason for its failure."""
    failed = [run for run in log.final_runs if run.failed and (not run.ready or run.wrappers)]
    events = [event for run in failed for event in run.passed_over.values() if _applies(run, event.rule)]
    return [Candidate(event, event.rule, event.rule.phase or None, "medium") for event in events]


def _says_more(candidate: Candidate, first: Candidate) -> bool:
    """The same cause told with numbers beats the same told without."""
    same_kind = candidate.rule.kind == first.rule.kind
    return same_kind and len(candidate.event.numbers) > len(first.event.numbers) and first.event.numbers == {}


def _without_shadows(found: list[Candidate]) -> list[Candidate]:
    """A vague finding beside a precise one is only its echo."""
    if found and found[0].rule.kind == "fatal":
        found = [one for one in found if one.rule.kind != "advice"]
    precise = [one for one in found if one.confidence == "high" and not one.rule.effect and one.rule.kind == "fatal"]
    if not precise:
        return found
    return [one for one in found if one.confidence == "high" or one.rule.kind != "fatal"]


def _outlived(log: LogState, run: Run, event: Event) -> bool:
    """Said before the server was ready, and it became ready: it did not matter."""
    if event.rule.lasting and log.engine == "ollama":
        return False
    return event.rule.kind in ("fatal", "hint") and run.ready and not event.ready


def _killed_after_an_error(run: Run, event: Event) -> bool:
    """An engine that failed kills its own children: that they were killed does not say why."""
    before = run.named and any((one.number or event.line) < event.line for one in run.unexplained)
    return event.rule.id == "killed" and before and not run.ready


def _candidate(log: LogState, event: Event) -> Candidate:
    found = _judged(log, event)
    nobody = log.engine is None and not found.rule.by_itself
    unsure = nobody or comes_after_another(log, event) or _stands_alone(event)
    if found.confidence == "high" and found.rule.kind == "fatal" and unsure:
        found.confidence = "medium"
    return found


def _stands_alone(event: Event) -> bool:
    """Of the import of a module, without the traceback that says who needed it."""
    return event.rule.id == "missing_module" and (event.trace is None or not event.trace.marks)


def _judged(log: LogState, event: Event) -> Candidate:
    if event.rule.out_of_memory:
        verdict = judge_memory(event, log)
        return Candidate(event, rulebook().rule(verdict.rule), verdict.phase, verdict.confidence)
    rule = (
        event.rule
        if not event.rule.code
        else msgspec.structs.replace(event.rule, cause=refined(event.rule, event.words))
    )
    confidence = rule.confidence
    if rule.cause == "host_ram_oom" and rule.code:
        confidence = "medium"  # The kernel's own word is in dmesg.
    if rule.only_in and event.phase is None:
        confidence = "medium"  # Elsewhere these words would mean something else.
    if rule.kind == "fatal" and event.ready and rule.phase in STARTING and confidence == "high":
        confidence = "medium"  # Words of a start, after it.
    if rule.phase_fixed:
        return Candidate(event, rule, rule.phase, confidence)
    seen, _ = phase_of(event)
    told = event.trace is not None and event.trace.phase is not None
    if not told and rule.phase in STARTING and not event.ready and further(rule.phase, seen):
        seen = rule.phase  # The log had told no more of where it was.
    return Candidate(event, rule, seen or rule.phase or None, confidence)


def _by_numbers(log: LogState, over: str) -> Iterator[Candidate]:
    """Where no line says it: what the rules make of all numbers together."""
    run, numbers = log.run, _numbers(log)
    for rule in rulebook().rules:
        if rule.over == over and holds(rule.when, numbers):
            values = {name: evaluate(formula, numbers) or 0.0 for name, formula in rule.numbers.items()}
            event = Event(rule, log.lines, values, {}, [], run.phase, run.ready, "")
            yield Candidate(event, rule, run.phase or rule.phase or None, rule.confidence)


def _numbers(log: LogState) -> dict[str, float]:
    run, settings = log.run, log.settings
    starting = run.phase in STARTING and not run.named and not run.unexplained
    size = _BILLIONS.search(settings.model or "")
    nothing = Event(rulebook().rules[0], log.lines, {}, {}, [], run.phase, run.ready, "")
    numbers = {
        **known_numbers(log, nothing),
        **log.statistics.numbers(),
        "starting": starting,
        "failed": run.torn_off is not None or bool(run.wrappers),
        "torn": run.torn_off is not None,
        "interrupted": "interrupted" in run.tags,
        "named": run.named or bool(run.unexplained),
        "profiling": run.phase == "profile",
        "multimodal": "multimodal" in run.tags,
        "in_nccl": run.phase == "load" and "nccl" in run.tags and "weights" not in run.tags,
        "engine_known": log.engine is not None,
        "ready": run.ready,
        "silent_starts": run.begun - 1,
        "held_tokens": log.numbers.get("kv_tokens", log.numbers.get("kv_blocks", 0) * BLOCK_TOKENS),
        "prefix_caching": settings.values.get("enable-prefix-caching") == "True",
        "share_set": settings.number("gpu-memory-utilization"),
        "offload_asked": settings.number("cpu-offload-gb"),
        "whole_gib": None if size is None else float(size[1]) * 2e9 / 2**30,
        "quantized": "quantization" in settings.values or _QUANTIZED.search(settings.model or "") is not None,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _finding(log: LogState, candidate: Candidate) -> Finding:
    rule, event = candidate.rule, candidate.event
    cause = rulebook().causes[rule.cause]
    numbers = known_numbers(log, event)
    values: dict[str, object] = {**known_words(log, event), **numbers, "times": event.times}
    if rule.code:
        chosen = list(own_fixes(event.words, log.settings.rebuilt("holdfast")))
    else:
        chosen = checked(_case(log, numbers), rule.cause, fixes(log, rule, event, numbers))
    holder, said = event.words.get("holder"), filled(rule.what, values) or cause.means
    if holder is not None:
        said += (
            f" Process {holder}, which is not this server's, holds {event.numbers['holder_gib']:.2f} GiB of the GPU."
        )
        chosen = [*chosen[: not chosen or bool(chosen[0].changes)], _stopped(holder), *chosen[bool(chosen) :]]
    sure, first = cause_confidence(log, rule, event, candidate.confidence), chosen[0] if chosen else None
    return Finding(
        code=rule.code or cause.code,
        root_cause=_root(rule, cause, chosen),
        cause=rule.cause,
        confidence=answer_confidence(rule, sure, first),
        cause_confidence=sure,
        what=said,
        evidence=event.evidence,
        why=filled((rule.why, cause.means), values),
        fix=first,
        alternatives=chosen[1:],
        numbers={name: round(value, 4) for name, value in event.numbers.items()},
    )


def _stopped(process: str) -> Fix:
    why = "see what it is, and stop it if it is not needed (kill its pid), or start this server with what it leaves"
    return Fix(command=f"ps -o pid,etime,args -p {process}", why=why, basis="look")


def _root(rule: Rule, cause: Cause, chosen: list[Fix]) -> RootCause:
    """Where our own planner found limits with which it fits, the limits were the matter."""
    settled = bool(rule.code and chosen and chosen[0].changes) and cause.root_cause == "does_not_fit"
    return "configuration_overshoot" if settled else rule.root_cause or cause.root_cause


def _case(log: LogState, numbers: dict[str, float]) -> Case:
    length = log.settings.number("max-model-len", "context-length")
    return Case(
        engine=log.engine or "vllm",
        model=log.settings.model,
        command=base_command(log),
        total_gib=numbers.get("total_gib"),
        max_model_len=None if length is None else int(length),
        utilization=numbers.get("utilization"),
    )


def _unexplained(log: LogState, missing: list[str]) -> Finding | None:
    """Something failed that no rule knows, or only its wrapper is in the log."""
    final = log.final_runs
    wrappers = [line for run in final for line in run.wrappers]
    errors = [line for run in final if not run.ready for line in run.unexplained]
    if wrappers and not errors:
        errors = [line for run in final for line in run.unexplained]
    errors += [run.last_words for run in final if run.ready and run.last_words is not None]
    if wrappers and not errors:
        last = wrappers[-1].line
        asked = _BELOW if len(wrappers) == 1 and any(words in last for words in _FIRST) else _ABOVE
        missing.append(asked.format(quoted=read_line(last, 0).text.strip()[:100]))
    if not wrappers and not errors:
        return None
    shown: list[Evidence] = (errors or wrappers)[:UNKNOWN_EVIDENCE]
    what = (
        f"a failure that no rule recognizes; the first error is: {_quoted(shown[0].line)}"
        if errors
        else "the log has only a line that passes an error on, not the error itself"
    )
    cause = rulebook().causes["other"]
    memory = any(_OF_MEMORY.search(one.line) for one in (*errors, *wrappers))
    why = _MEMORY_NOT_KNOWN if memory else _NOT_KNOWN
    if errors and not memory and any(_OF_MEMORY.search(near) for run in final for near in run.near):
        memory, why = True, _NEAR_NOT_KNOWN
        missing.append(_UNWRAPPED)
    return Finding(
        code=cause.code,
        root_cause="configuration_overshoot" if memory else "not_memory",
        cause="other",
        confidence="low",
        cause_confidence="low",
        what=what,
        evidence=shown,
        why=why,
    )


def _quoted(line: str) -> str:
    """From its beginning, where a message says what it is about."""
    text = read_line(line, 0).text.strip() or line.strip()
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED].rstrip()}…"
