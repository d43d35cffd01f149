"""Logs whose newest line stands first: recognised by their stamps, and read the right way round in bounded memory."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from doctor_whole_logs import WHOLE_LOGS, WholeLog

from holdfast.doctor import diagnose
from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.logs import reverse
from holdfast.doctor.logs.reverse import Order, order_of
from holdfast.doctor.logs.source import BLOCK_BYTES

BEGAN = datetime(2025, 1, 9, 23, 59, 50, tzinfo=UTC)
STAMPS = {
    "journalctl": "%b %d %H:%M:%S gpu01 vllm[88]: ",
    "journalctl-iso": "%Y-%m-%dT%H:%M:%S+0000 gpu01 vllm[88]: ",
    "journalctl-unix": "%s.%f gpu01 vllm[88]: ",
    "docker-t": "%Y-%m-%dT%H:%M:%S.%fZ ",
    "compose-t": "vllm-1  | %Y-%m-%dT%H:%M:%S.%fZ ",
    "go": "%Y/%m/%d %H:%M:%S ",
    "klog": "I%m%d %H:%M:%S.%f       1 main.go:12] ",
    "llama": "%d.%S.000.000 I ",
}
STAMPED = [log for log in WHOLE_LOGS if order_of("\n".join(reversed(log.lines)).encode()) is not Order.OLDEST_FIRST]
DEATH = next(log for log in WHOLE_LOGS if log.name == "sglang-capture-oom")


def stamped(log: WholeLog, form: str) -> list[str]:
    return [(BEGAN + timedelta(seconds=at // 2)).strftime(form) + line for at, line in enumerate(log.lines)]


def found(folder: Path, lines: list[str]) -> Diagnosis:
    path = folder / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose([str(path)])


def places(diagnosis: Diagnosis) -> list[tuple[str, int | None]]:
    return [(one.line, one.number) for finding in diagnosis.findings for one in finding.evidence]


def same(one: Diagnosis, other: Diagnosis) -> bool:
    def told(diagnosis: Diagnosis) -> tuple[object, ...]:
        causes = [(finding.cause, finding.confidence, finding.fix) for finding in diagnosis.findings]
        return causes, diagnosis.phase, diagnosis.engine, diagnosis.engine_version, diagnosis.healthy, diagnosis.missing

    return told(one) == told(other)


@pytest.mark.parametrize("form", STAMPS.values(), ids=STAMPS)
def test_the_same_is_found_in_a_log_that_was_turned(tmp_path: Path, form: str) -> None:
    for log in WHOLE_LOGS:
        lines = stamped(log, form)
        upright, upside_down = found(tmp_path, lines), found(tmp_path, lines[::-1])
        assert same(upright, upside_down), log.name
        assert not any("newest line first" in one for one in upright.seen)
        assert any("newest line first" in one for one in upside_down.seen)
        assert [(line, len(lines) + 1 - (at or 0)) for line, at in places(upside_down)] == places(upright)


def test_an_engines_own_stamps_are_enough(tmp_path: Path) -> None:
    assert len(STAMPED) >= len(WHOLE_LOGS) - 2  # llama-server stamps no line unless it is told to.
    for log in STAMPED:
        assert same(found(tmp_path, list(log.lines)), found(tmp_path, [*reversed(log.lines)])), log.name


def test_lines_in_json_and_what_journalctl_says_itself(tmp_path: Path) -> None:
    plain = found(tmp_path, list(DEATH.lines))
    wrapped = [
        json.dumps({"MESSAGE": line, "_PID": "8" * 200, "__REALTIME_TIMESTAMP": f"{1736467200000000 + at // 2}"})
        for at, line in enumerate(DEATH.lines)
    ]
    lines = stamped(DEATH, STAMPS["journalctl-iso"])
    begins = f"-- Logs begin at {BEGAN:%a %Y-%m-%d %H:%M:%S} UTC. --"
    assert same(plain, found(tmp_path, wrapped[::-1]))
    assert same(plain, found(tmp_path, [begins, *reversed(lines)]))


def test_entries_whose_newest_stands_first_keep_their_own_order(tmp_path: Path) -> None:
    head = next(at for at, line in enumerate(DEATH.lines) if "Traceback" in line)
    entries = [*([line] for line in DEATH.lines[:head]), list(DEATH.lines[head:])]
    upside_down = [line for entry in reversed(entries) for line in entry]
    assert order_of("\n".join(upside_down).encode()) is Order.NEWEST_ENTRY_FIRST
    diagnosis = found(tmp_path, upside_down)
    assert same(diagnosis, found(tmp_path, list(DEATH.lines)))
    assert {number for _, number in places(diagnosis)} == {None}


@pytest.mark.parametrize(
    "lines",
    [
        *(log.lines for log in WHOLE_LOGS),
        ("12-31 23:59:58 a", "12-31 23:59:59 b", "01-01 00:00:01 c", "01-01 00:00:02 d"),
        ("[10:00:01] a", "[10:00:00] b"),
        tuple(f"2025-01-10 10:00:{second:02d} a" for second in (5, 4, 6, 5, 7, 6, 8)),
        ('  File "a.py", line 1, in f', "Traceback (most recent call last):", '  File "b.py", line 2, in g'),
        ('[rank0]:   File "a.py", line 1', "[rank1]: Traceback (most recent call last):", "[rank0]:     f()"),
        (),
    ],
)
def test_other_logs_are_read_as_they_stand(lines: tuple[str, ...]) -> None:
    assert order_of("\n".join(lines).encode()) is Order.OLDEST_FIRST


def large(filler_bytes: int) -> list[str]:
    """A start, what goes on for long, and a death: in the order of time."""
    head = next(at for at, line in enumerate(DEATH.lines) if "Traceback" in line)
    begins, ends = stamped(DEATH, STAMPS["journalctl-iso"])[:head], DEATH.lines[head:]
    later = [BEGAN + timedelta(minutes=1, seconds=at) for at in range(filler_bytes // 100)]
    between = [f"{one:{STAMPS['journalctl-iso']}}{'word ' * 11}" for one in later]
    return [*begins, *between, *(f"{later[-1]:{STAMPS['journalctl-iso']}}{line}" for line in ends)]


def test_a_file_of_many_blocks_is_read_from_its_end(tmp_path: Path) -> None:
    lines = large(2 * BLOCK_BYTES)
    lines[40] += "x" * (BLOCK_BYTES + 5)
    upright, upside_down = found(tmp_path, lines), found(tmp_path, lines[::-1])
    assert upright.findings[0].cause == "cuda_graph_capture_oom"
    assert same(upright, upside_down)
    assert [(line, len(lines) + 1 - (at or 0)) for line, at in places(upside_down)] == places(upright)


def test_of_what_cannot_be_held_the_newest_and_the_oldest_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = large(4 * BLOCK_BYTES)
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress("\n".join(reversed(lines)).encode(), 1))
    whole = diagnose([str(path)])
    assert not any("the middle of" in one for one in whole.missing)
    assert places(whole)[0][1] is not None
    monkeypatch.setattr(reverse, "NEWEST_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(reverse, "OLDEST_BYTES", BLOCK_BYTES)
    parts = diagnose([str(path)])
    assert (parts.findings[0].cause, parts.command) == ("cuda_graph_capture_oom", whole.command)
    assert any("the middle of" in one for one in parts.missing)
    assert {number for _, number in places(parts)} == {None}
