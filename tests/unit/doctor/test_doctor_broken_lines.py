"""Messages that were broken over several lines, and what is said of an error that no rule knows."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from holdfast.doctor import diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis

FREE = (
    "(EngineCore pid=7) ValueError: Free memory on device cuda:0 (3.10/79.25 GiB) on startup is less than desired GPU"
    " memory utilization (0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used by others."
)


def said(folder: Path, text: str) -> Diagnosis:
    path = folder / "server.log"
    path.write_bytes(text.encode())
    return diagnose([str(path)])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("width", [70, 80, 90, 100])
def test_a_message_broken_at_the_width_of_a_terminal_is_read_whole(tmp_path: Path, width: int, end: str) -> None:
    broken = end.join(FREE[at : at + width] for at in range(0, len(FREE), width))
    found = said(tmp_path, broken + end)
    assert found.findings[0].cause == said(tmp_path, FREE + "\n").findings[0].cause
    assert found.findings[0].numbers["wanted_gib"] == 71.33
    watched = diagnose_lines(broken.split("\n"), "output").findings[0]
    assert (watched.cause, watched.numbers) == (found.findings[0].cause, found.findings[0].numbers)


def test_numbers_of_a_message_that_a_program_breaks_at_80_columns_are_all_read(tmp_path: Path) -> None:
    """As rich prints for typer, on a pipe too."""
    message = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 79.10 GiB of"
        " which 0.31 GiB is free. Process 4242 has 78.70 GiB memory in use. Of the allocated memory 77.10 GiB is"
        " allocated by PyTorch, and 0.60 GiB is reserved by PyTorch but unallocated."
    )
    broken = textwrap.wrap(message, 80)
    numbers = said(tmp_path, f"{message}\n").findings[0].numbers
    assert len(numbers) == 5
    assert said(tmp_path, "\n".join(broken) + "\n").findings[0].numbers == numbers
    assert diagnose_lines(broken, "output").findings[0].numbers == numbers


def test_a_broken_message_of_a_server_that_came_up_is_no_failure(tmp_path: Path) -> None:
    lines = [*textwrap.wrap(FREE, 80), "INFO:     Application startup complete."]
    assert said(tmp_path, "\n".join(lines)).healthy
    assert diagnose_lines(lines, "output").healthy


def test_a_message_broken_between_words_keeps_the_numbers_of_its_last_line(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        "ValueError: To serve at least one request with the model's max seq len (65536),\n"
        "8.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.1 GiB).\n"
        "Based on the available memory, the estimated maximum model length is 25392.\n",
    )
    assert found.findings[0].cause == "kv_cache_too_small_for_max_len"
    assert found.findings[0].numbers["estimated"] == 25392


def test_an_error_is_not_joined_with_that_of_another_process(tmp_path: Path) -> None:
    broken = f"{FREE[:80]}\n(APIServer pid=1) {FREE[80:]}\n"
    assert said(tmp_path, broken).findings[0].cause == "other"


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        ("RuntimeError: the arena wants 12 GiB more than there are", True),
        ("RuntimeError: could not allocate a page for the pool", True),
        ("RuntimeError: the flux is not aligned", False),
    ],
)
def test_an_unknown_error_that_speaks_of_memory_is_not_said_to_be_none(tmp_path: Path, line: str, memory: bool) -> None:
    finding = said(tmp_path, f"{line}\n").findings[0]
    assert finding.cause == "other"
    assert ("nothing in the log points to memory" in finding.why) is not memory
    assert (finding.root_cause == "not_memory") is not memory


def test_a_long_error_is_quoted_from_its_beginning(tmp_path: Path) -> None:
    finding = said(tmp_path, f"RuntimeError: the flux is not aligned {'x' * 400}\n").findings[0]
    assert "RuntimeError: the flux is not aligned" in finding.what
    assert finding.what.endswith("…")


def test_a_line_of_llama_server_with_the_letter_of_an_error_is_one(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        "0.00.683.797 I srv    load_model: loading model '/models/a.gguf'\n"
        "0.00.750.018 E llama_model_load: the flux is not aligned\n",
    )
    assert found.findings[0].cause == "other"
    assert "the flux is not aligned" in found.findings[0].what


def test_an_error_before_a_kill_is_the_error(tmp_path: Path) -> None:
    found = said(tmp_path, "RuntimeError: the flux is not aligned\nworker exited with code -9\n")
    assert [finding.cause for finding in found.findings] == ["other"]
    assert said(tmp_path, "worker exited with code -9\n").findings[0].cause == "host_ram_oom"


def test_ram_that_is_refused_is_no_matter_of_the_gpu(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        "load_tensors: loading model tensors, this can take a while... (mmap = false)\n"
        "alloc_tensor_range: failed to allocate CPU buffer of size 1048576\n"
        "llama_model_load: error loading model: unable to allocate CPU buffer\n"
        "github.com/ollama/ollama/runner/llamarunner.(*Server).loadModel(0xc0)\n",
    )
    assert found.engine == "ollama"
    assert [finding.cause for finding in found.findings] == ["host_ram_oom"]
    fix = found.findings[0].fix
    assert fix is not None
    assert fix.command is None


@pytest.mark.parametrize(("running", "waiting", "cause"), [(1, 14, "timeout_or_hang"), (64, 14, None), (1, 2, None)])
def test_a_queue_that_stands_is_not_well(tmp_path: Path, running: int, waiting: int, cause: str | None) -> None:
    line = (
        "INFO 01-01 10:00:{0}0 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation"
        f" throughput: 9.0 tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: 60.0%,"
        " Prefix cache hit rate: 50.0%\n"
    )
    found = said(tmp_path, "".join(line.format(number) for number in range(4)))
    assert [finding.cause for finding in found.findings] == ([] if cause is None else [cause])
    assert found.healthy is (cause is None)


def test_shards_that_load_after_the_error_tell_its_phase(tmp_path: Path) -> None:
    found = said(
        tmp_path,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 79.10"
        " GiB of which 20.00 MiB is free.\nLoading safetensors checkpoint shards:  10% Completed | 2/20\n",
    )
    assert (found.findings[0].cause, found.phase) == ("weights_do_not_fit", "load")
