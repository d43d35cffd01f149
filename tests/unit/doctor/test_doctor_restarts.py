"""Logs of several starts and of several programs: what the earlier ones died of, and each program judged alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.doctor import diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis

BEGIN = [
    "INFO 11-01 10:00:00 [api_server.py:1805] vLLM API server version 0.11.0",
    "INFO 11-01 10:00:01 [utils.py:326] non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 131072}",
    "INFO 11-01 10:00:20 [gpu_model_runner.py:2338] Starting to load model Qwen/Qwen3-8B...",
]
NO_BLOCKS = (
    "ERROR 11-01 10:00:40 [core.py:700] ValueError: No available memory for the cache blocks. Try increasing"
    " `gpu_memory_utilization` when initializing the engine."
)
DIE = [
    "ERROR 11-01 10:00:40 [core.py:700] EngineCore failed to start.",
    NO_BLOCKS,
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
UNKNOWN = ["Traceback (most recent call last):", '  File "/app/x.py", line 1, in y', "WeirdError: seven of nine"]
OLLAMA = [
    'time=2025-02-02T09:23:09.833Z level=INFO source=routes.go:1238 msg="Listening on 127.0.0.1:11434 (version 0.5.7)"',
    *['[GIN] 2025/02/26 - 10:05:31 | 200 | 178.23µs | 127.0.0.1 | POST "/api/chat"'] * 12,
]
DATABASE = ["2025-02-26 10:05:31 UTC [61] ERROR: relation does not exist at character 15"] * 3


def _read(lines: list[str], folder: Path) -> Diagnosis:
    path = folder / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose([str(path)])


def _under(prefix: str, lines: list[str]) -> list[str]:
    return [prefix + line for line in lines]


SUPERVISED = {
    "compose": ("vllm-1  | ", "vllm-1 exited with code 1 (restarting)"),
    "kubernetes": ("[pod/vllm-7c9f-x2/vllm] ", None),
    "systemd": (
        "Nov 01 10:0{}:00 gpu vllm[77]: ",
        "Nov 01 10:09:00 gpu systemd[1]: vllm.service: Scheduled restart job, restart counter is at 2.",
    ),
}


@pytest.mark.parametrize("supervisor", SUPERVISED)
def test_a_loop_of_restarts_is_what_the_earlier_starts_died_of(supervisor: str, tmp_path: Path) -> None:
    prefix, restarted = SUPERVISED[supervisor]
    again = [] if restarted is None else [restarted]
    lines = [line for at in range(3) for line in (*_under(prefix.format(at), BEGIN + DIE), *again)]
    found = _read([*lines, *_under(prefix.format(3), BEGIN)], tmp_path)
    first = found.findings[0]
    assert (first.cause, first.confidence, found.healthy) == ("no_memory_for_kv_blocks", "medium", False)
    assert "restarted in a loop: 3 starts in this log failed, and the log ends in the middle of another" in first.what
    assert found.phase == "profile"


LLAMA_DIES = [
    "srv    load_model: loading model '/m/x.gguf'",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 15814.99 MiB on device 0: cudaMalloc failed: out of memory",
    "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
]


@pytest.mark.parametrize(
    "begin", ["build: 6500 (abcdef12) with cc for x86_64-linux-gnu", "main: build = 2500 (abcdef12)"]
)
def test_starts_of_llama_cpp_under_compose_are_counted_where_only_it_tells_of_them(begin: str, tmp_path: Path) -> None:
    """`docker compose logs` has no line of the restarts."""
    found = _read(_under("llama-1  | ", [begin, *LLAMA_DIES]) * 3, tmp_path)
    assert "restarted in a loop: 3 starts in this log failed" in found.findings[0].what


def test_one_failed_start_before_the_open_one_is_told_too(tmp_path: Path) -> None:
    found = _read([*BEGIN, *DIE, *BEGIN], tmp_path)
    assert found.findings[0].cause == "no_memory_for_kv_blocks"
    assert "restarted after that" in found.findings[0].what
    assert not any("still starting" in one.what for one in found.findings)


def test_an_error_that_no_rule_knows_is_quoted_out_of_a_loop(tmp_path: Path) -> None:
    found = _read([*(BEGIN + UNKNOWN) * 3, *BEGIN], tmp_path)
    assert "WeirdError: seven of nine" in found.findings[0].what
    assert "in a loop: 3 starts" in found.findings[0].what


def test_a_start_that_succeeds_after_failures_is_well(tmp_path: Path) -> None:
    assert _read([*BEGIN, *DIE, *BEGIN, "INFO:     Application startup complete."], tmp_path).healthy


def test_starts_that_break_off_without_a_word_were_ended_from_outside(tmp_path: Path) -> None:
    found = _read(BEGIN * 4, tmp_path).findings[0]
    assert (found.cause, found.confidence) == ("timeout_or_hang", "low")
    assert "3 starts broke off without an error" in found.what


def test_the_same_lines_of_each_start_are_not_lines_that_were_cut(tmp_path: Path) -> None:
    assert not any("wrapped" in one for one in _read((BEGIN + DIE) * 4, tmp_path).seen)


@pytest.mark.parametrize("form", ["{}-1  | ", "{}.1.k2j3@node-1    | ", "[pod/{}-7c9f-x2/main] ", "{} stdout | "])
def test_programs_of_one_log_are_judged_each(form: str, tmp_path: Path) -> None:
    names = {"ollama": OLLAMA, "vllm": BEGIN + DIE, "db": DATABASE}
    every = [_under(form.format(name), lines) for name, lines in names.items()]
    mixed = [line for group in zip(*[[*one, *[""] * 20][:20] for one in every], strict=True) for line in group if line]
    found = _read(mixed, tmp_path)
    [finding] = found.findings
    assert (finding.cause, finding.confidence) == ("no_memory_for_kv_blocks", "medium")
    assert finding.what.startswith("vllm")
    assert found.engine == "vllm"
    assert any(one.startswith("ollama") for one in found.seen)
    assert not found.healthy


def test_two_servers_of_one_log_that_fail_have_a_finding_each(tmp_path: Path) -> None:
    port = ["ERROR 11-01 10:00:02 [core.py:1] OSError: [Errno 98] Address already in use"]
    lines = [*_under("a-1  | ", BEGIN + DIE), *_under("b-1  | ", [*BEGIN[:2], *port])]
    assert sorted(one.what.split(":")[0] for one in _read(lines, tmp_path).findings) == ["a-1", "b-1"]


def test_a_table_in_a_log_is_no_program(tmp_path: Path) -> None:
    table = ["Model | Size", "llama | 8B", "qwen  | 7B"]
    assert _read([*BEGIN, *table, *DIE], tmp_path).findings[0].what.startswith("Nothing is left")


def test_a_known_message_is_named_whatever_engine_the_rest_is_of() -> None:
    found = diagnose_lines([*OLLAMA[:1] * 3, *['level=INFO source=a.go:1 msg="x"'] * 5, NO_BLOCKS], "log")
    assert [one.cause for one in found.findings] == ["no_memory_for_kv_blocks"]
    assert "runs on the CPU" not in found.findings[0].what
    assert found.findings[0].confidence == "medium"


STATISTICS = (
    "2026-11-15 20:18:53 INFO holdfast.stats: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0"
    " tokens/s, Running: 1 reqs, Waiting: 0 reqs, KV cache usage: 1.0%, Prefix cache hit rate: 0.0%"
)
DEATH = "2026-11-15 20:28:53 ERROR holdfast: the engine process exited (signal 11) with 3 unfinished requests [HF410]"
NO_FILES = "2026-11-15 20:28:54 ERROR holdfast: no file descriptor is left to start the engine process [HF411]"
AGAIN = "2026-11-15 20:28:55 INFO holdfast: the engine process is ready again; resuming 3 unfinished requests"


def test_our_own_statistics_do_not_make_a_log_vllms() -> None:
    found = diagnose_lines([*[STATISTICS] * 40, DEATH], "log")
    assert (found.engine, found.healthy, found.findings[0].code) == ("holdfast", False, "HF410")


def test_a_death_that_was_resumed_is_told_as_resumed_in_any_part_of_a_log() -> None:
    found = diagnose_lines([*[STATISTICS] * 40, DEATH, NO_FILES, AGAIN], "log")
    assert (found.engine, found.healthy) == ("holdfast", True)
    assert all("recovered" in one.what for one in found.findings)


@pytest.mark.parametrize(
    "last",
    [
        ["Traceback (most recent call last):", '  File "/app/core.py", line 1, in step', "IndexError: index 1 is out"],
        ["terminate called after throwing an instance of 'std::runtime_error'"],
        ["Fatal Python error: Segmentation fault"],
    ],
)
def test_a_server_whose_last_words_are_an_error_is_not_called_well(last: list[str]) -> None:
    ready = [*BEGIN, "INFO:     Application startup complete."]
    assert not diagnose_lines([*ready, *last], "log").healthy
    assert diagnose_lines(
        [*ready, *last, 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'], "log"
    ).healthy


def test_a_crash_comes_before_what_only_made_it_slow() -> None:
    full = (
        "[2025-05-07 21:49:33 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.2"
    )
    found = diagnose_lines([full, "Fatal Python error: Segmentation fault"], "log")
    assert "Segmentation fault" in found.findings[0].what
    assert found.findings[0].confidence == "low"


def test_an_answer_is_not_sure_where_an_error_nobody_knows_comes_before_it() -> None:
    rank = "ValueError: LoRA rank 32 is greater than max_lora_rank 16."
    apart = [f"INFO 11-01 10:00:02 [loader.py:{at}] loading" for at in range(20)]
    assert diagnose_lines([*BEGIN[:2], rank], "log").findings[0].confidence == "high"
    assert diagnose_lines([*BEGIN[:2], *UNKNOWN, *apart, rank], "log").findings[0].confidence == "medium"
