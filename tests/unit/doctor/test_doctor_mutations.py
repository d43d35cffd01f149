"""Logs that were cut, thinned, shuffled, doubled, mixed and dirtied: never a crash, never a confident wrong answer.

Wrong is a finding of high confidence whose cause is not in the log's truth: said by hand for whole logs, and the
rule's own cause for a log that ends in the example of a rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from doctor_whole_logs import NOISE, WHOLE_LOGS, WholeLog

from holdfast.doctor import diagnose_lines
from holdfast.doctor.evidence import holdfast_errors
from holdfast.doctor.rules.load import rulebook

SHORT, LONG = 400, 6000
"""Mutants: of each run of the tests, and of the long one."""


def from_examples() -> list[WholeLog]:
    """The beginning of a start, and then what a rule is about. An allocation that failed is judged by its phase: whole
    logs are there for that.
    """
    start = WHOLE_LOGS[0].lines[:8]
    return [
        WholeLog(f"{rule.id}-{at}", frozenset((rule.cause,)), (*start, *(example.split("\n") * rule.least)))
        for rule in rulebook().rules
        if rule.patterns and not rule.out_of_memory and rule.id != holdfast_errors.RULE
        for at, example in enumerate(rule.examples)
    ]


def mutated(lines: list[str], chance: random.Random) -> list[str]:
    kind = chance.randrange(6)
    at = chance.randrange(len(lines) + 1)
    if kind == 0:
        return lines[:at]
    if kind == 1:
        return lines[at:]
    if kind == 2:
        share = chance.choice((0.05, 0.2, 0.5))
        return [line for line in lines if chance.random() > share]
    if kind == 3:
        return [line for line in lines for _ in range(chance.choice((1, 1, 2)))]
    if kind == 4:
        share = chance.choice((0.1, 0.5))
        return [one for line in lines for one in ((line, chance.choice(NOISE)) if chance.random() < share else (line,))]
    return sorted(lines, key=lambda line: lines.index(line) + chance.uniform(0, 4))


def interleaved(one: list[str], other: list[str], chance: random.Random) -> list[str]:
    places = [*(False for _ in one), *(True for _ in other)]
    chance.shuffle(places)
    first, second = iter(one), iter(other)
    return [next(second if place else first) for place in places]


def mutants(count: int, seed: int) -> Iterator[tuple[str, frozenset[str], list[str]]]:
    chance = random.Random(seed)
    examples = from_examples()
    for number in range(count):
        log = chance.choice(WHOLE_LOGS if number % 2 else examples)
        lines, truth, name = list(log.lines), log.truth, log.name
        if number % 8 == 1:
            engine = log.name.split("-")[0]  # One process does not write two logs at once.
            other = chance.choice([one for one in WHOLE_LOGS if not one.name.startswith(engine)])
            lines, truth = interleaved(lines, list(other.lines), chance), truth | other.truth
            name = f"{name} with {other.name}"
        for _ in range(chance.choice((1, 1, 2, 3))):
            lines = mutated(lines, chance)
        yield name, truth, lines


def wrong(count: int, seed: int) -> list[str]:
    return [
        f"{number} {name}: {finding.cause}: {finding.evidence[0].line[:100] if finding.evidence else ''}"
        for number, (name, truth, lines) in enumerate(mutants(count, seed))
        for finding in diagnose_lines(lines, "mutant").findings
        if finding.confidence == "high" and finding.cause not in truth
    ]


@pytest.mark.parametrize("log", WHOLE_LOGS, ids=lambda log: log.name)
def test_a_whole_log_is_told_by_its_truth(log: WholeLog) -> None:
    found = diagnose_lines(log.lines, "log")
    assert {finding.cause for finding in found.findings} == log.truth
    assert found.healthy == (not log.truth)


@pytest.mark.parametrize("log", WHOLE_LOGS, ids=lambda log: log.name)
def test_what_good_starts_print_too_changes_nothing(log: WholeLog) -> None:
    harmless = [line for line in NOISE if "Traceback" not in line and "KeyError" not in line and "ERROR" not in line]
    found = diagnose_lines([*log.lines[:2], *harmless, *log.lines[2:]], "log")
    alone = diagnose_lines(log.lines, "log")
    assert {finding.cause for finding in found.findings} == log.truth
    assert [one.confidence for one in found.findings] == [one.confidence for one in alone.findings]
    assert found.healthy == (not log.truth)


def test_no_mutant_is_a_confident_wrong_answer() -> None:
    assert wrong(SHORT, seed=1) == []


@pytest.mark.long
def test_no_mutant_of_thousands_is_a_confident_wrong_answer() -> None:
    assert wrong(LONG, seed=2) == []
