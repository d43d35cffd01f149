"""The doctor on excerpts in the engines' own formats, whole and mutated."""

from __future__ import annotations

import gzip
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_excerpts import EXCERPTS, HEADER, LOADING, READY, Excerpt, out_of_memory, trace

from holdfast.doctor import LiveDiagnosis, diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis
from holdfast.errors import ConfigurationError

NOISE = (
    "INFO 01-01 00:00:00 [x.py:1] heartbeat ok",
    "2025-01-01 12:00:00,000 - app - ERROR - user request failed: the database does not answer",
    "[W123 foo.cpp:1] Warning: something",
    "Traceback (most recent call last):",
    "ValueError: bad input from client",
    "x" * 500,
    "\x1b[31mred\x1b[0m",
    "KeyError: 'user_id'",
)


def cause_of(found: Diagnosis) -> str:
    if found.findings:
        return found.findings[0].cause
    return "none" if found.healthy else "unknown"


@pytest.mark.parametrize("case", EXCERPTS, ids=lambda case: f"{case.engine}-{case.cause}")
def test_excerpt(case: Excerpt) -> None:
    found = diagnose_lines(case.text.split("\n"), "log")
    assert (cause_of(found), found.phase, found.engine) == (case.cause, case.phase, case.engine)
    assert found.healthy == (case.cause == "none")


def mutants(text: str, chance: random.Random, *, cuts: int, others: int) -> Iterator[list[str]]:
    lines = text.split("\n")
    for at in sorted(chance.sample(range(1, max(2, len(lines))), min(cuts, max(1, len(lines) - 1)))):
        yield lines[:at]
        yield lines[at:]
    for _ in range(others):
        yield [one for line in lines for one in ([line, chance.choice(NOISE)] if chance.random() < 0.2 else [line])]
        yield [line for line in lines for _ in range(chance.choice((1, 1, 2)))]
        width = chance.choice((80, 120, 200))
        yield [line[:width] for line in lines]
        swapped = lines[:]
        for at in range(len(swapped) - 1):
            ranks_differ = swapped[at].split(" ")[:2] != swapped[at + 1].split(" ")[:2]
            if ranks_differ and chance.random() < 0.2:
                swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
        yield swapped


def confident_and_wrong(text: str, *, seed: int, cuts: int, others: int) -> list[str]:
    """A finding of high confidence whose cause is not among those of the whole log."""
    whole = {finding.cause for finding in diagnose_lines(text.split("\n"), "whole").findings}
    return [
        f"{finding.cause}: {finding.evidence[0].line[:80]}"
        for lines in mutants(text, random.Random(seed), cuts=cuts, others=others)
        for finding in diagnose_lines(lines, "mutant").findings
        if finding.confidence == "high" and finding.cause not in whole
    ]


@pytest.mark.parametrize("case", EXCERPTS, ids=lambda case: f"{case.engine}-{case.cause}")
def test_a_mutated_log_is_never_a_confident_wrong_answer(case: Excerpt) -> None:
    assert confident_and_wrong(case.text, seed=1, cuts=3, others=1) == []


@pytest.mark.long
@pytest.mark.parametrize("case", EXCERPTS, ids=lambda case: f"{case.engine}-{case.cause}")
def test_many_mutants(case: Excerpt) -> None:
    assert confident_and_wrong(case.text, seed=2, cuts=1000, others=25) == []


DRESSES = {
    "journald": "Jan 10 10:00:00 gpu01 vllm[88]: ",
    "kubectl": "[pod/llm-0/vllm] ",
    "containerd": "2025-01-10T10:00:00.123456789Z stderr F ",
    "compose": "vllm-1  | ",
    "rank": "[rank0]: ",
    "colour": "\x1b[1;36m(EngineCore_DP0 pid=88)\x1b[0;0m ",
}


@pytest.mark.parametrize("dress", DRESSES.values(), ids=DRESSES)
def test_what_stands_before_a_line_does_not_matter(dress: str) -> None:
    failed = LOADING + trace(("worker/gpu_model_runner.py", "load_model")) + out_of_memory()
    found = diagnose_lines([dress + line for line in failed.split("\n")], "log")
    assert (cause_of(found), found.phase, found.engine_version) == ("weights_do_not_fit", "load", "0.11.0")
    assert "\x1b" not in found.findings[0].evidence[0].line


def test_lines_of_docker_are_unwrapped() -> None:
    line = '{"log":"ValueError: LoRA rank 64 is greater than max_lora_rank 16.\\n","stream":"stderr"}'
    assert cause_of(diagnose_lines([line], "log")) == "lora_rank"


def test_the_fix_is_the_command_that_was_run_with_its_value_worked_out() -> None:
    text = HEADER.format(0, "9.1", "{'model': 'Qwen/Qwen3-8B', 'max_model_len': 65536, 'served_model_name': ['q']}")
    text += (
        "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that can be stored in "
        "KV cache (20019). Try increasing `gpu_memory_utilization`."
    )
    finding = diagnose_lines(text.split("\n"), "log").findings[0]
    assert finding.fix is not None
    assert finding.fix.command == "vllm serve Qwen/Qwen3-8B --max-model-len 20016 --served-model-name q"
    assert finding.fix.changes == {"--max-model-len": "20016"}
    assert finding.numbers == {"max_seq_len": 65536, "kv_tokens": 20019}


def test_a_parallel_size_is_planned_before_it_is_offered() -> None:
    header = HEADER.format(0, "11.0", "{'model': 'Qwen/Qwen2.5-Coder-14B-Instruct', 'max_model_len': 24576}")
    failed = (
        header + trace(("worker/gpu_model_runner.py", "load_model")) + out_of_memory(total="15.47 GiB", this="15.3 GiB")
    )
    fix = diagnose_lines(failed.split("\n"), "log").findings[0].fix
    assert fix is not None
    # 27.51 GiB of weights are 13.76 on each of two: too much beside a KV cache of 24,576 tokens.
    assert fix.changes == {"--tensor-parallel-size": "4"}
    assert "planned: 27.51 GiB" in fix.why


def test_an_error_before_a_server_was_ready_did_not_matter() -> None:
    text = LOADING + "ModuleNotFoundError: No module named 'optional_thing'\n" + READY
    assert diagnose_lines(text.split("\n"), "log").healthy


def test_a_second_start_that_went_well_is_what_counts() -> None:
    failed = LOADING + trace(("worker/gpu_model_runner.py", "load_model")) + out_of_memory()
    assert diagnose_lines((failed + LOADING + READY).split("\n"), "log").healthy
    assert not diagnose_lines((LOADING + READY + failed + failed).split("\n"), "log").healthy


def test_only_a_wrapper_asks_for_the_lines_above_it() -> None:
    found = diagnose_lines(["RuntimeError: Engine core initialization failed. See root cause above."], "log")
    assert any("the lines above" in one for one in found.missing)
    assert found.findings[0].confidence == "low"


def test_without_its_phase_an_out_of_memory_is_told_with_low_confidence() -> None:
    found = diagnose_lines(out_of_memory(pre="").split("\n"), "log")
    assert found.findings[0].confidence == "low"
    assert found.phase is None
    assert any("from the start" in one for one in found.missing)


def test_a_prompt_that_quotes_an_error_is_nobody_s_error() -> None:
    line = "INFO 01-01 10:00:00 [logger.py:39] Received request cmpl-1: prompt: 'why CUDA out of memory. Tried'"
    assert diagnose_lines((LOADING + READY + line).split("\n"), "log").healthy


OTHERS_WORDS = {
    "vllm answer": "INFO 01-01 10:00:00 [logger.py:40] Generated response cmpl-1: output: 'ValueError: No available"
    " memory for the cache blocks.', output_token_ids: None",
    "sglang request": "[2025-06-01 10:00:01] Receive: obj=GenerateReqInput(rid='1', text='torch.OutOfMemoryError: CUDA"
    " out of memory. Tried to allocate 2.00 GiB')",
    "llama.cpp request": 'srv  log_server_r: request:  {"messages":[{"role":"user",'
    '"content":"cudaMalloc failed: out of memory"}]}',
    "ollama request": 'time=2025-01-01T10:00:00.000Z level=DEBUG source=routes.go:1 msg="chat request" images=0'
    ' prompt="Error: model requires more system memory (9.1 GiB) than is available (6.4 GiB)"',
    "a second line": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
}


@pytest.mark.parametrize("line", OTHERS_WORDS.values(), ids=OTHERS_WORDS)
def test_words_of_users_and_models_are_not_judged(line: str) -> None:
    assert diagnose_lines((LOADING + READY + line).split("\n"), "log").healthy


ENDS = {
    "told to end": READY
    + "(EngineCore pid=1) INFO 01-10 10:00:00 [core.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
    + "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)\n",
    "custom allreduce": READY.replace(
        "(APIServer pid=7) INFO:     Started",
        "WARNING 01-10 10:00:00 [custom_all_reduce.py:1] Custom allreduce is disabled because it's not supported"
        " on more than two PCIe-only GPUs.\n(APIServer pid=7) INFO:     Started",
    ),
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_what_a_good_server_says_is_no_fault(text: str) -> None:
    found = diagnose_lines((LOADING + text).split("\n"), "log")
    assert (found.healthy, found.findings) == (True, [])


def test_a_log_cut_before_its_error_is_judged_by_the_place_without_being_sure() -> None:
    cut = LOADING + trace(("worker/worker.py", "init_device"), ("worker/worker.py", "_check_if_gpu_supports_dtype"))
    found = diagnose_lines(cut.split("\n"), "log")
    assert (cause_of(found), found.phase, found.findings[0].confidence) == ("dtype_unsupported_gpu", "load", "medium")
    # With an error below it that nobody knows, the place alone says nothing.
    told = cut + "(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] TypeError: unhashable type\n"
    assert cause_of(diagnose_lines(told.split("\n"), "log")) == "other"


def test_numbers_tell_where_the_error_is_cut_off() -> None:
    text = (
        "INFO 01-11 10:00:00 llm_engine.py:70] Initializing an LLM engine with config: model='a/b', max_seq_len=4096\n"
        "INFO 01-11 10:00:09 llm_engine.py:275] # GPU blocks: 200, # CPU blocks: 512\n"
        "Traceback (most recent call last):\n"
        '  File "/venv/lib/python3.10/site-packages/vllm/engine/llm_engine.py", line 309, in from_engine_args\n'
    )
    found = diagnose_lines(text.split("\n"), "log")
    assert (cause_of(found), found.phase) == ("kv_cache_too_small_for_max_len", "profile")
    assert found.findings[0].confidence == "medium"
    assert found.findings[0].fix is not None
    assert found.findings[0].fix.changes == {"--max-model-len": "3200"}


@pytest.mark.parametrize(("loaded", "cause"), [("14.99", "offload_noop"), ("5.10", "no_memory_for_kv_blocks")])
def test_offloading_that_was_not_applied_shows_in_what_was_loaded(loaded: str, cause: str) -> None:
    text = HEADER.format(0, "11.0", "{'model': 'meta-llama/Meta-Llama-3-8B', 'cpu_offload_gb': 10.0}")
    text += f"INFO 01-10 10:00:20 [gpu_model_runner.py:2653] Model loading took {loaded} GiB and 9.8 seconds\n"
    text += "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
    assert cause_of(diagnose_lines(text.split("\n"), "log")) == cause


def test_a_log_that_ends_while_starting_says_so() -> None:
    found = diagnose_lines(LOADING.split("\n"), "log")
    assert (cause_of(found), found.findings[0].confidence) == ("not_ready_yet", "low")


def test_a_second_engine_in_one_process_is_not_a_step_while_serving() -> None:
    engine = "INFO 10-01 10:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: model='a/b'\n"
    text = engine + "Processed prompts: 100%|##| 4/4\n" + engine + out_of_memory(pre="")
    found = diagnose_lines(text.split("\n"), "log")
    assert (cause_of(found), found.phase) == ("other_process_on_gpu", "load")


def test_a_failure_that_was_got_over_is_none() -> None:
    text = (
        "build: 6500 (abcdef12) with cc for x86_64\nllama_context: n_ctx = 50176\n"
        "ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size 54262464512\n"
        "graph_reserve: failed to allocate compute buffers\n"
        "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism\n"
        "srv    load_model: initializing, n_slots = 1, n_ctx_slot = 50176\n"
    )
    assert diagnose_lines(text.split("\n"), "log").healthy


def test_the_first_exchange_between_gpus_out_of_memory_is_memory() -> None:
    text = LOADING + "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'\n"
    assert cause_of(diagnose_lines(text.split("\n"), "log")) != "gpu_topology"


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (LOADING + trace(("worker/gpu_model_runner.py", "load_model")) + out_of_memory()).encode()
    (tmp_path / "a.log").write_bytes(text)
    packed = gzip.compress(text)
    (tmp_path / "b.gz").write_bytes(packed)
    (tmp_path / "cut.gz").write_bytes(packed[:-20])
    for name in ("a.log", "b.gz", "cut.gz"):
        assert diagnose([str(tmp_path / name)]).engine == "vllm"
    assert cause_of(diagnose([str(tmp_path / "a.log"), str(tmp_path / "b.gz")])) == "weights_do_not_fit"

    class Standard:
        buffer = io.BytesIO(packed)

    monkeypatch.setattr(sys, "stdin", Standard())
    assert cause_of(diagnose(["-"])) == "weights_do_not_fit"
    with pytest.raises(ConfigurationError) as refused:
        diagnose([str(tmp_path / "missing.log")])
    assert refused.value.code == "HFD90"


def test_a_log_that_says_the_same_a_million_times_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    access = "".join(
        f'INFO:     10.0.0.{at % 250}:{at} - "POST /v1/completions HTTP/1.1" 200 OK\n' for at in range(100_000)
    )
    log.write_text(LOADING + READY + access + "WARNING one more client error\n" * 50_000)
    with log.open("a") as file:
        file.write(trace(("engine/core/loop.py", "run_busy_loop")) + out_of_memory(tried="1.20 GiB"))
    found = diagnose([str(log)])
    assert (cause_of(found), found.phase) == ("activation_oom_runtime", "serve")
    number = found.findings[0].evidence[0].number
    assert number is not None
    assert number > 150_000


def test_binary_and_endless_lines_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "odd.log"
    chance = random.Random(1)
    log.write_bytes(b"x" * 3_000_000 + bytes(chance.randrange(256) for _ in range(200_000)) + b"\nKilled\n")
    assert diagnose([str(log)]).findings


def test_a_watch_says_when_a_server_is_ready() -> None:
    watch = LiveDiagnosis()
    for line in LOADING.split("\n"):
        watch.feed(line)
    assert not watch.ready
    for line in READY.split("\n"):
        watch.feed(line)
    assert watch.ready
    assert watch.diagnosis().healthy
