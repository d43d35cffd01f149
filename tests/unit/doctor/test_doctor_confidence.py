"""What may be called high: a known engine, a fix that follows from the log, a rule that was right, no other error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding

VLLM = "INFO 11-01 10:00:00 [api_server.py:1805] vLLM API server version 0.11.0"
RANK = "ValueError: LoRA rank 32 is greater than max_lora_rank 16."
APART = tuple(f"INFO 11-01 10:00:02 [loader.py:{at}] loading" for at in range(20))
UNKNOWN = ("Traceback (most recent call last):", '  File "/app/x.py", line 1, in y', "WeirdError: seven of nine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lines: tuple[str, ...]
    confidence: str
    first_try: bool = False


CASES = {
    "all of it": Case(lines=(VLLM, RANK), confidence="high"),
    "an unknown error after it": Case(lines=(VLLM, RANK, *APART, *UNKNOWN), confidence="medium"),
    "another known cause after it": Case(
        lines=(VLLM, RANK, *APART, "ValueError: Total number of attention heads (28) must be divisible by tensor"
               " parallel size (8)."),
        confidence="medium",
    ),
    "a rule that no other log confirmed": Case(
        lines=(VLLM, "OSError: [Errno 24] Too many open files"), confidence="medium"
    ),
    "a share is raised that the log does not show": Case(
        lines=(VLLM, "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
               " when initializing the engine."),
        confidence="medium", first_try=True,
    ),
    "a newer build may not know the model either": Case(
        lines=("llama_model_load: error loading model: unknown model architecture: 'qwen_image'",),
        confidence="medium", first_try=True,
    ),
    "what RAM lacks is said, with all that helps": Case(
        lines=("Error: model requires more system memory (8.4 GiB) than is available (7.7 GiB)",),
        confidence="high", first_try=False,
    ),
    "what holds most of the RAM may be another program": Case(
        lines=("Error: model requires more system memory (37.9 GiB) than is available (14.2 GiB)",),
        confidence="high", first_try=False,
    ),
}  # fmt: skip


def _first(*lines: str) -> Finding:
    return diagnose_lines(list(lines), "log").findings[0]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_high_needs_each_of_its_grounds(case: Case) -> None:
    found = _first(*case.lines)
    assert found.fix is not None
    assert (found.confidence, found.fix.first_try) == (case.confidence, case.first_try)


def test_a_message_of_no_engine_is_not_called_sure() -> None:
    heads = "Number of attention heads (28) must be divisible by tensor parallel size (8)"
    assert (_first(heads).cause, _first(heads).confidence) == ("heads_not_divisible", "medium")
    assert _first(f"ValueError: Total n{heads[1:]}").confidence == "high"
    code = "The repository for an/other contains custom code which must be executed to correctly load the model."
    assert [_first(code).confidence, _first(VLLM, code).confidence] == ["medium", "high"]


def test_a_parallel_size_is_never_the_one_that_was_refused() -> None:
    fix = _first("ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (4).").fix
    assert fix is not None
    assert fix.changes == {"--tensor-parallel-size": "2"}


HALF = (
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has"
    " compute capability 7.5."
)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("google/gemma-2b", "half"), ("google/gemma-2-9b-it", "float32"), ("google/gemma-3-4b-it", "float32")],
)
def test_the_first_gemma_of_two_billion_is_not_the_second_gemma(model: str, dtype: str) -> None:
    fix = _first(VLLM, f"$ vllm serve {model}", HALF).fix
    assert fix is not None
    assert fix.changes == {"--dtype": dtype}


def test_weights_that_a_cpu_would_cast_away_are_not_told_the_type_again() -> None:
    cast = "WARNING 02-06 00:09:44 cpu_executor.py:327] float16 is not supported on CPU, casting to bfloat16."
    refused = (
        "ValueError: torch.bfloat16 is not supported for quantization method gptq. Supported dtypes: [torch.float16]"
    )
    told, alone = _first(cast, refused), _first(VLLM, refused)
    assert told.fix is not None
    assert alone.fix is not None
    assert "--dtype" not in told.fix.changes
    assert alone.fix.changes == {"--dtype": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    lines: tuple[str, ...]
    confidence: str
    command: str | None = None
    """How the first fix's command begins."""
    without: str = ""
    """What its reason does not say."""


FLAG = "launch_server.py: error: unrecognized arguments: {}"
SGLANG = "python -m sglang.launch_server --model-path m --reasoning_parser kimi_k2 --tp 8"
MENDED = {
    "the server's own words are no flag": Mended(
        lines=("docker run vllm/vllm-openai serve /m --max-model-len 16000",
               "api_server.py: error: unrecognized arguments: /m"),
        confidence="medium", without="--help",
    ),
    "a flag of another program is not taken for a near one": Mended(
        lines=("vllm serve m --stage-configs-path x.yaml",
               "vllm: error: unrecognized arguments: --stage-configs-path x.yaml"),
        confidence="medium", command="vllm serve m",
    ),
    "a misspelt flag is spelled right, not removed": Mended(
        lines=(SGLANG, FLAG.format("--reasoning_parser kimi_k2")),
        confidence="medium", command="python -m sglang.launch_server --model-path m --tp 8 --reasoning-parser kimi_k2",
    ),
    "SGLang's program is not vLLM's": Mended(
        lines=("INFO 03-06 10:05:08 __init__.py:190] Automatically detected platform cuda.",
               "usage: launch_server.py [-h] --model-path MODEL_PATH [--tokenizer-path TOKENIZER_PATH] [--host HOST]",
               FLAG.format("--enable-reasoning")),
        confidence="medium", command="python -m sglang.launch_server",
    ),
    "a flag that is refused too is not offered in place of another": Mended(
        lines=("vllm serve m --enable-reasoning --reasoning-parser deepseek_r1",
               "vllm: error: unrecognized arguments: --enable-reasoning --reasoning-parser deepseek_r1"),
        confidence="medium", command="vllm serve m", without="in its place",
    ),
    "llama.cpp is not served by torch": Mended(
        lines=("E ggml_cuda_compute_forward: ADD failed",
               "E CUDA error: no kernel image is available for execution on the device"),
        confidence="medium", command="nvidia-smi", without="torch",
    ),
    "a file on disk needs no login": Mended(
        lines=("E gguf_init_from_file: failed to open GGUF file 'm.Q8_0.gguf' (errno No such file or directory)",),
        confidence="medium", without="hf auth login",
    ),
    "one GPU cannot be halved": Mended(
        lines=("vllm serve m-AWQ --dtype float16",
               "ValueError: Weight input_size_per_partition = 10944 is not divisible by min_thread_k = 128. Consider"
               " reducing tensor_parallel_size or running with --quantization gptq."),
        confidence="medium",
    ),
    "ranks may be on other nodes": Mended(
        lines=("vllm serve m --tensor-parallel-size 1 --pipeline-parallel-size 2", VLLM,
               "RuntimeError: please ensure that world_size (2) is less than than max local gpu count (1)"),
        confidence="medium", command="nvidia-smi",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MENDED.values(), ids=list(MENDED))
def test_a_fix_that_did_not_help_is_another_or_not_called_sure(case: Mended) -> None:
    found = _first(*case.lines)
    assert found.fix is not None
    assert found.confidence == case.confidence
    assert (found.fix.command or "").startswith(case.command or "")
    assert (found.fix.command is None) == (case.command is None)
    assert not case.without or case.without not in found.fix.why


def test_a_misspelt_flag_of_a_command_that_is_not_seen_is_told_what_it_may_be_meant_for() -> None:
    fix = _first("error: invalid argument: --tempp").fix
    assert fix is not None
    assert fix.why.startswith("--tempp may be meant for --temp; ")


@pytest.mark.parametrize(
    ("version", "context", "flag", "confidence"),
    [
        ("0.6.6", 8192, "--max-num-batched-tokens", "high"),
        ("0.6.6", 40960, "--enable-chunked-prefill", "medium"),
        ("0.11.0", 8192, "--max-num-batched-tokens", "high"),
        ("0.11.0", 131072, "--max-num-batched-tokens", "medium"),
    ],
)
def test_chunks_are_not_offered_where_a_release_has_them_by_itself(
    version: str, context: int, flag: str, confidence: str
) -> None:
    """They are off there because the model or the CPU has none."""
    said = f"ValueError: max_num_batched_tokens (2048) is smaller than max_model_len ({context})."
    found = _first(VLLM.replace("0.11.0", version), said)
    assert found.fix is not None
    assert (next(iter(found.fix.changes)), found.confidence) == (flag, confidence)
