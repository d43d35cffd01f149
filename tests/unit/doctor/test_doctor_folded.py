"""Logs whose lines were cut at the width of a terminal: joined again, or not known; never a confident other cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_whole_logs import WHOLE_LOGS, WholeLog

from holdfast.doctor import diagnose
from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.logs.source import BLOCK_BYTES
from holdfast.doctor.logs.unfold import fold_of

WIDTHS = (80, 100, 120, 132)


def cut(lines: list[str], columns: int, *, at_blanks: bool) -> list[str]:
    """As `fold` does, and with `at_blanks` as `fold -s`."""
    parts = []
    for line in lines:
        rest = line
        while len(rest) > columns:
            blank = rest.rfind(" ", 0, columns) + 1 if at_blanks else 0
            parts.append(rest[: blank or columns])
            rest = rest[blank or columns :]
        parts.append(rest)
    return parts


def found(folder: Path, lines: list[str]) -> Diagnosis:
    path = folder / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose([str(path)])


def told(diagnosis: Diagnosis) -> tuple[object, ...]:
    causes = [(finding.cause, finding.confidence, finding.numbers, finding.fix) for finding in diagnosis.findings]
    return causes, diagnosis.phase, diagnosis.engine, diagnosis.healthy, diagnosis.command


@pytest.mark.parametrize("at_blanks", [False, True], ids=["anywhere", "at blanks"])
def test_a_log_that_was_cut_is_told_as_the_whole_one(tmp_path: Path, at_blanks: bool) -> None:
    for log in WHOLE_LOGS:
        whole = told(found(tmp_path, list(log.lines)))
        for columns in WIDTHS:
            parts = cut(list(log.lines), columns, at_blanks=at_blanks)
            diagnosis = found(tmp_path, parts)
            few = log.name == "llama-weights"  # One line of it is cut, which is too few to know a width by.
            assert few or told(diagnosis) == whole, (log.name, columns)
            assert {finding.cause for finding in diagnosis.findings} == log.truth
            for finding in diagnosis.findings:
                for one in finding.evidence:
                    assert one.number is not None
                    assert one.line.startswith(parts[one.number - 1].strip())


@pytest.mark.parametrize("cut_first", [False, True])
@pytest.mark.parametrize("at_blanks", [False, True], ids=["anywhere", "at blanks"])
def test_a_log_that_was_cut_and_turned_has_no_other_cause(tmp_path: Path, at_blanks: bool, cut_first: bool) -> None:
    for log in WHOLE_LOGS:
        if log.name.startswith("llama"):
            continue  # It has no stamps to be turned by.
        for columns in WIDTHS:
            lines = list(log.lines)
            parts = cut(lines if cut_first else lines[::-1], columns, at_blanks=at_blanks)
            causes = {one.cause for one in found(tmp_path, parts[::-1] if cut_first else parts).findings}
            assert causes == log.truth, (log.name, columns)


def test_numbers_and_arguments_cut_in_two_are_whole_again(tmp_path: Path) -> None:
    lines = [
        "INFO 03-04 09:00:01 api_server.py:219] vLLM API server version 0.6.3",
        "INFO 03-04 09:00:01 api_server.py:220] args: Namespace(host=None, port=8000,"
        " model='meta-llama/Llama-3.1-8B-Instruct', gpu_memory_utilization=0.85, max_model_len=None)",
        "INFO 03-04 09:00:17 model_runner.py:1067] Loading model weights took 14.9888 GB",
        "[rank0]: Traceback (most recent call last):",
        "[rank0]: ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be"
        " stored in KV cache (40336). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when"
        " initializing the engine.",
    ]
    for columns in range(60, 140):
        for at_blanks in (False, True):
            diagnosis = found(tmp_path, cut(lines, columns, at_blanks=at_blanks))
            assert diagnosis.findings[0].cause == "kv_cache_too_small_for_max_len", (columns, at_blanks)
            assert 40336 in diagnosis.findings[0].numbers.values(), (columns, at_blanks)
            assert "meta-llama/Llama-3.1-8B-Instruct" in (diagnosis.command or ""), (columns, at_blanks)


def test_a_log_of_many_blocks_is_joined_from_block_to_block(tmp_path: Path) -> None:
    log = next(one for one in WHOLE_LOGS if one.name == "vllm-v1-kv-too-small")
    filler = [f"INFO 10-01 10:00:41 [weights.py:1] tensor {at} {'of the model ' * 9}" for at in range(16_000)]
    lines = [*log.lines[:10], *filler, *log.lines[10:]]
    assert sum(map(len, lines)) > 2 * BLOCK_BYTES
    assert told(found(tmp_path, cut(lines, 80, at_blanks=False))) == told(found(tmp_path, lines))


@pytest.mark.parametrize("log", WHOLE_LOGS, ids=lambda log: log.name)
def test_a_log_that_nobody_cut_is_left_as_it_is(log: WholeLog) -> None:
    for lines in (log.lines, [line[:100] for line in log.lines]):
        for upside_down in (False, True):
            assert fold_of("\n".join([*lines, ""]).encode(), upside_down=upside_down) is None


def test_parts_that_speak_of_memory_beside_an_unknown_error_are_not_passed_over(tmp_path: Path) -> None:
    diagnosis = found(tmp_path, ["RuntimeError: the flux of the", "arena wants more GPU memory than", "there is"])
    assert diagnosis.findings[0].cause == "other"
    assert "lines next to the error mention memory" in diagnosis.findings[0].why
    assert any("as the program wrote it" in one for one in diagnosis.missing)
    plain = found(tmp_path, ["RuntimeError: the flux", "INFO:     GPU memory: 3 GiB", "is not aligned"])
    assert "nothing in the log points to memory" in plain.findings[0].why
