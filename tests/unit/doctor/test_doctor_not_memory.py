"""Faults of drivers, formats and flags: the cause and the very command that is offered. Knows no judging inside."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.records import Finding

START = (
    "(APIServer pid=7) INFO 01-10 10:00:00 [api_server.py:1839] vLLM API server version 0.11.0\n"
    "(APIServer pid=7) INFO 01-10 10:00:00 [utils.py:233] non-default args: {{'model': 'Qwen/Qwen3-8B'{}}}\n"
)
COUNTED = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error "
COMPAT = "804: forward compatibility was attempted on non supported HW"


def _found(line: str, given: str = "") -> list[Finding]:
    return diagnose_lines((START.format(given) + line).splitlines(), "log").findings


@pytest.mark.parametrize(
    ("line", "cause", "said"),
    [
        (f"RuntimeError: {COUNTED}{COMPAT}", "driver_too_old", "compat"),
        # torch only warns of it, and then finds no GPU.
        (
            f"/venv/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: {COUNTED}{COMPAT} (Triggered internally at CUDAFunctions.cpp:109.)\nRuntimeError: No CUDA GPUs are available",
            "driver_too_old",
            "compat",
        ),
        (f"RuntimeError: {COUNTED}803: system has unsupported display driver / cuda driver combination", "driver_too_old", "reboot"),
        (f"RuntimeError: {COUNTED}802: system not yet initialized", "gpu_topology", "nvidia-fabricmanager"),
        (f"RuntimeError: {COUNTED}999: unknown error", "driver_too_old", "nvidia_uvm"),
        ("RuntimeError: CUDA error: unknown error CUDA kernel errors might be asynchronously reported", "driver_too_old", "nvidia_uvm"),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_start_is_told_by_its_number(line: str, cause: str, said: str) -> None:
    [finding] = _found(line)
    assert finding.cause == cause
    assert finding.fix is not None
    assert said in f"{finding.what} {finding.fix.why} {finding.fix.command}"


@pytest.mark.parametrize(
    ("line", "given", "cause", "command"),
    [
        ("ValueError: type fp8e4nv not supported in this architecture.", ", 'kv_cache_dtype': 'fp8'", "dtype_unsupported_gpu",
         "vllm serve Qwen/Qwen3-8B --kv-cache-dtype auto"),
        # Weights: KV is not in FP8, so that taking it out changes nothing.
        ("ValueError: type fp8e4nv not supported in this architecture.", "", "dtype_unsupported_gpu", None),
        ("ValueError: fp8_e5m2 kv-cache is not supported with fp8 checkpoints.", ", 'kv_cache_dtype': 'fp8_e5m2'", "bad_flag",
         "vllm serve Qwen/Qwen3-8B --kv-cache-dtype fp8"),
        ("ValueError: FP8 block quantization is not supported with group size 64", "", "other", None),
        ("ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 80. Current capability: 75.",
         "", "dtype_unsupported_gpu", None),
        ("ValueError: The quantization method gptq_marlin is not supported for the current GPU. Minimum capability: 80. Current capability: 75.",
         ", 'quantization': 'gptq_marlin'", "dtype_unsupported_gpu", "vllm serve Qwen/Qwen3-8B --quantization gptq --dtype half"),
    ],
)  # fmt: skip
def test_a_format_is_refused_for_what_the_message_says(line: str, given: str, cause: str, command: str | None) -> None:
    [finding] = _found(line, given)
    assert finding.cause == cause
    assert (None if finding.fix is None else finding.fix.command) == command
    assert not any("gptq" in str(one.changes) for one in finding.alternatives)
