"""How logs are read: encodings, what stands before lines, JSON, what the screen finds, and storms."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from holdfast.doctor import diagnose, diagnose_lines
from holdfast.doctor.evidence import holdfast_errors
from holdfast.doctor.logs.prefilter import LinePrefilter
from holdfast.doctor.logs.sampling import screen
from holdfast.doctor.logs.source import as_utf8, encoding_of
from holdfast.doctor.rules.load import rulebook
from holdfast.doctor.rules.required_literals import needed
from holdfast.errors import ConfigurationError

LORA = "ValueError: LoRA rank 64 is greater than max_lora_rank 16."
PREFIXES = {
    "journald": "Jan 10 10:00:00 gpu01 vllm[88]: ",
    "journald-precise": "Jan 10 10:00:00.123456 gpu01 vllm[88]: ",
    "journald-iso": "2025-01-10T10:00:00+0000 gpu01 vllm[88]: ",
    "journald-full": "Fri 2025-01-10 10:00:00 UTC gpu01 vllm[88]: ",
    "journald-unix": "1736503200.123456 gpu01 vllm[88]: ",
    "kubectl": "[pod/llm-0/vllm] ",
    "kubectl-timestamps": "2025-01-10T10:00:00.123456789Z ",
    "containerd": "2025-01-10T10:00:00.123456789Z stderr F ",
    "compose": "vllm-1  | ",
    "compose-timestamps": "vllm-1  | 2025-01-10T10:00:00.123456789Z ",
    "awslogs": "2025-01-10T10:00:00.123000+00:00 ecs/vllm/0a1b2c3d4e5f ",
    "supervisord": "vllm stderr | ",
    "rank": "[rank0]: ",
    "torchrun": "[default0]:[rank0]: ",
    "ray": "(RayWorkerWrapper pid=123, ip=10.0.0.1) ",
    "ray-actor": "(ServeReplica:default:Model pid=123) ",
    "api-server": "(APIServer pid=1) ",
    "loguru": "2025-01-10 10:00:00.123 | ERROR    | engine:run:12 - ",
    "logging": "ERROR:vllm.engine:",
    "colour": "\x1b[1;36m(EngineCore_DP0 pid=88)\x1b[0;0m ",
}
SOME = [rule for rule in rulebook().rules if rule.patterns and rule.id != holdfast_errors.RULE and rule.least == 1][
    ::12
]


BANNER = "INFO 01-10 10:00:00 [api_server.py:1034] vLLM API server version 0.11.0"
LLAMA = "llama_model_loader: loaded meta data with 25 key-value pairs and 579 tensors from m.gguf (version GGUF V3)"


def causes(lines: list[str]) -> list[tuple[str, str]]:
    return [(finding.cause, finding.confidence) for finding in diagnose_lines(lines, "log").findings]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_same_is_found_whatever_stands_before_a_line(prefix: str) -> None:
    for rule in SOME:
        lines = rule.examples[0].split("\n")
        # A prefix may name the engine too.
        first = [BANNER] if not rule.engines or "vllm" in rule.engines else [LLAMA] * ("llama.cpp" in rule.engines)
        assert causes([*first, *(prefix + line for line in lines)]) == causes([*first, *lines]), rule.id


@pytest.mark.parametrize(
    "wrapped",
    [
        {"log": LORA + "\n", "stream": "stderr"},
        {"@timestamp": "2025-01-10T10:00:00Z", "log.level": "ERROR", "message": LORA},
        {"severity": "ERROR", "textPayload": LORA},
        {"severity": "ERROR", "jsonPayload": {"message": LORA}},
        {"text": LORA + "\n", "record": {"level": {"name": "ERROR"}}},
        {"log": json.dumps({"message": LORA}) + "\n"},
        {"level": "error", "msg": f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{LORA}'},
        {
            "message": "it failed",
            "exc_info": f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{LORA}',
        },
    ],
)
def test_lines_that_json_carries(wrapped: dict[str, object]) -> None:
    assert causes([json.dumps(wrapped)])[0][0] == "lora_rank"
    assert causes(["2025-01-10T10:00:00Z stdout F " + json.dumps(wrapped)])[0][0] == "lora_rank"


def test_a_traceback_on_one_line() -> None:
    line = f'ERROR failed: Traceback (most recent call last):\\n  File "a.py", line 1, in load_model\\n{LORA}\\n'
    finding = diagnose_lines([line], "log").findings[0]
    assert (finding.cause, finding.evidence[0].line) == ("lora_rank", LORA)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(f"starting ü\r\n{LORA}\r\n".encode(encoding))
    found = diagnose([str(log)])
    assert [(one.cause, one.evidence[0].number) for one in found.findings] == [("lora_rank", 2)]
    raw = log.read_bytes()
    assert b"".join(as_utf8([raw[:9], raw[9:]])).decode().endswith(f"{LORA}\r\n")


def test_an_encoding_is_not_seen_where_there_is_none() -> None:
    assert encoding_of(b"plain text\0 with a zero") == ("utf-8", 0)
    assert encoding_of(b"") == ("utf-8", 0)


def test_a_torn_gz_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log.gz"
    packed = gzip.compress((LORA + "\n").encode())
    log.write_bytes(packed[:-6])
    assert any("is truncated" in one for one in diagnose([str(log)]).missing)
    log.write_bytes(packed + packed)
    assert not any("is truncated" in one for one in diagnose([str(log)]).missing)


@pytest.mark.parametrize(("start", "program"), [(b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\x00", "xz")])
def test_packed_files_are_refused_with_the_command_that_unpacks(tmp_path: Path, start: bytes, program: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(start + b"123")
    with pytest.raises(ConfigurationError) as refused:
        diagnose([str(log)])
    assert refused.value.code == "HFD90"
    assert f"{program} -dc {log} | holdfast doctor -" in str(refused.value.fix)


def test_the_screen_finds_each_literal_wherever_it_begins() -> None:
    for literal in rulebook().literals:
        for before in ("", "q", "qq", "qqq"):
            found = screen().lines(f"ab\n{before}{literal} z\nrest\n".encode())
            assert (found.starts.tolist(), found.numbers.tolist()) == ([3], [1]), literal


def test_what_stands_behind_a_stop_makes_no_kind() -> None:
    made = LinePrefilter(("out of memory", "no such file"), stops=iter(("prompt: '",)))
    found = made.lines(b"prompt: 'out of memory'\nprompt: 'no such file'\nprompt: 'x'\nout of memory\n")
    assert len(set(found.kinds.tolist()[:3])) == 1
    assert found.kinds[3] != found.kinds[0]


def test_a_death_in_a_storm_of_others_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    storm = "".join(f"ERROR 10-01 10:00:00 [a.py:{at}] KeyError: 'user-{at}'\n" for at in range(60_000))
    log.write_text(f"{storm}{LORA}\n{storm}")
    found = diagnose([str(log)])
    assert [(one.cause, one.evidence[0].number) for one in found.findings] == [("lora_rank", 60_001)]


def test_a_line_without_end_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{'word ' * 700_000}\n{LORA}\n")
    assert diagnose([str(log)]).findings[0].evidence[0].number == 2


@pytest.mark.parametrize(
    ("expression", "literals"),
    [
        ("plain text", ("plain text",)),
        (r"rank \((?P<x>HF\d+)\) is", ("rank (HF",)),
        (r"(?:one|two)[ .]", ("one", "two")),
        (r"abc+def*", ("abc",)),
        (r"a{2}bcd(?:xyz)?", ("bcd",)),
        (r"(?=look)behind(?!not)", ("behind",)),
        (r"(?i)any case", ()),
        (r"[abc]\d+|text", ()),
        (r"[]x]abc[^\]]def\.ghi", ("def.ghi",)),
    ],
)
def test_literals_that_a_match_needs(expression: str, literals: tuple[str, ...]) -> None:
    assert needed(expression) == literals


def test_a_log_that_was_cut_while_it_was_written_has_a_hole_and_is_read(tmp_path: Path) -> None:
    """logrotate's copytruncate: zeros up to where the writer was."""
    log = tmp_path / "ollama.log"
    taken = b"Error: listen tcp 127.0.0.1:11434: bind: address already in use\n"
    answered = b'[GIN] 2026/02/08 - 14:20:24 | 200 |    1.12s |       127.0.0.1 | POST     "/api/generate"\n'
    log.write_bytes(taken + b"\0" * 100_001 + answered)
    found = diagnose([str(log)])
    assert found.engine == "ollama"
    assert found.healthy
