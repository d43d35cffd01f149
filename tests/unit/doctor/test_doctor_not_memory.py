"""Faults of drivers, formats and flags: the cause and the very command that is offered. Knows no judging inside."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding

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
         "", "dtype_unsupported_gpu", "pip install --upgrade vllm"),
        ("ValueError: The quantization method gptq_marlin is not supported for the current GPU. Minimum capability: 80. Current capability: 75.",
         ", 'quantization': 'gptq_marlin'", "dtype_unsupported_gpu", "vllm serve Qwen/Qwen3-8B --quantization gptq --dtype half"),
    ],
)  # fmt: skip
def test_a_format_is_refused_for_what_the_message_says(line: str, given: str, cause: str, command: str | None) -> None:
    [finding] = _found(line, given)
    assert finding.cause == cause
    assert (None if finding.fix is None else finding.fix.command) == command
    assert not any("gptq" in str(one.changes) for one in finding.alternatives)


SERVE = "vllm serve Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("line", "given", "cause", "command"),
    [
        ("ValueError: Quantization method specified in the model config (gptq) does not match the quantization method specified in the `quantization` argument (awq).",
         ", 'quantization': 'awq', 'max_num_seqs': 8", "bad_flag", f"{SERVE} --max-num-seqs 8"),
        ("ValueError: Cannot find the config file for awq", ", 'quantization': 'awq'", "bad_flag", SERVE),
        ("ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]",
         ", 'quantization': 'awq'", "bad_flag", f"{SERVE} --quantization awq --dtype float16"),
        ("ValueError: max_cpu_loras (1) must be >= max_loras (4)", ", 'max_loras': 4, 'max_cpu_loras': 1", "bad_flag",
         f"{SERVE} --max-loras 4 --max-cpu-loras 4"),
        ("ValueError: `limit_mm_per_prompt` is only supported for multimodal models.", ", 'limit_mm_per_prompt': {'image': 2}",
         "bad_flag", SERVE),
        # 4,736 is 37 times 128: twice as wide it is whole groups of 256. 1,184 is whole groups of 128 four times as wide.
        ("ValueError: Weight input_size_per_partition = 4736 is not divisible by min_thread_k = 256.", ", 'tensor_parallel_size': 4",
         "quant_shape_mismatch", f"{SERVE} --tensor-parallel-size 2"),
        ("ValueError: Weight output_size_per_partition = 1184 is not divisible by  min_thread_n = 128.", ", 'tensor_parallel_size': 4",
         "quant_shape_mismatch", f"{SERVE} --tensor-parallel-size 1"),
        ("ValueError: Weight input_size_per_partition = 3696 is not divisible by min_thread_k = 128.", ", 'tensor_parallel_size': 8",
         "quant_shape_mismatch", f"{SERVE} --tensor-parallel-size 1 --pipeline-parallel-size 8"),
    ],
)  # fmt: skip
def test_a_setting_that_the_model_does_not_allow_has_the_command_without_it(
    line: str, given: str, cause: str, command: str
) -> None:
    [finding] = _found(line, given)
    assert finding.cause == cause
    assert finding.fix is not None
    assert finding.fix.command == command


def test_a_split_of_unknown_size_has_a_fix_in_words() -> None:
    [finding] = _found("ValueError: Weight input_size_per_partition = 10944 is not divisible by min_thread_k = 128.")
    assert finding.fix is not None
    assert "--tensor-parallel-size" in finding.fix.why
    assert finding.fix.command is None


def test_a_library_is_named_without_the_colon_behind_it() -> None:
    [finding] = diagnose_lines(
        ["llama-server: error while loading shared libraries: libcublas.so.12: cannot open shared object file"], "log"
    ).findings
    assert finding.what.endswith("libcublas.so.12.")
    assert finding.fix is not None
    assert "pip" not in str(finding.fix.command)


@pytest.mark.parametrize(
    ("line", "cause", "said"),
    [
        ("(APIServer pid=7) KeyboardInterrupt: terminated", "other", "received SIGTERM"),
        ("[Gloo] Rank 8 is NOT connected to: [1]\nTimeoutError: Server failed to start within the timeout period.", "timeout_or_hang", "Rank 8 never reached rank 1"),
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", "gpu_topology", "/dev/shm"),
        ("slurmstepd: error: *** JOB 67 ON node4 CANCELLED AT 2026-01-07T10:29:37 DUE TO TIME LIMIT ***", "other", "time limit"),
        ("bash: line 1: vllm: command not found", "other", "no program vllm"),
    ],
)  # fmt: skip
def test_what_comes_from_outside_is_told_as_such(line: str, cause: str, said: str) -> None:
    [finding] = _found(line)
    assert finding.cause == cause
    assert said in f"{finding.what} {finding.why}"
    assert finding.fix is not None


def test_a_server_that_served_and_was_told_to_end_has_not_failed() -> None:
    served = "INFO:     Application startup complete.\n(APIServer pid=7) KeyboardInterrupt: terminated"
    [finding] = _found(served)
    assert "while it served" in finding.what
    in_order = f"{served}\nINFO:     Finished server process [7]"
    assert diagnose_lines((START.format("") + in_order).splitlines(), "log").healthy


def test_advice_is_in_the_words_of_the_engine_and_of_the_card() -> None:
    [failed] = diagnose_lines(["llama-server: ROCm error: unspecified launch failure"], "log").findings
    assert "HSA_OVERRIDE_GFX_VERSION" in failed.why
    assert failed.fix is not None
    assert "CUDA_LAUNCH_BLOCKING" not in str(failed.fix.command)


@pytest.mark.parametrize(
    "line",
    [
        "somebody.exceptions.ReadTimeout: (ReadTimeoutError('the other side said nothing'))",
        "torch._dynamo.exc.BackendCompilerFailed: backend='other' raised:",
    ],
)
def test_an_exception_of_any_name_is_an_error(line: str) -> None:
    [finding] = _found(line)
    assert (finding.cause, finding.confidence) == ("other", "low")
    assert line[:40] in finding.what


def test_memory_on_the_chip_is_not_the_cards() -> None:
    [finding] = _found(
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 81920, Hardware limit: 65536."
    )
    assert finding.root_cause == "not_memory"
    assert "81,920 bytes" in finding.what
    assert finding.fix is not None
    assert not {"--gpu-memory-utilization", "--max-model-len"} & finding.fix.changes.keys()


def test_a_warning_that_quotes_an_error_is_none() -> None:
    warning = "(APIServer pid=7) WARNING 01-10 10:00:01 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."
    assert "open files" in warning
    assert [one.cause for one in _found(warning)] == ["not_ready_yet"]
    assert [one.cause for one in _found("OSError: [Errno 24] Too many open files")] == ["other"]


def test_a_pod_that_its_probe_killed_is_not_told_as_ram() -> None:
    pod = """    Last State:     Terminated
      Reason:       Error
      Exit Code:    137
Events:
  Warning  Unhealthy  2m (x9 over 9m)   kubelet  Liveness probe failed: Get "http://10.0.0.9:8000/health": context deadline exceeded (Client.Timeout exceeded while awaiting headers)
  Normal   Killing    2m (x3 over 9m)   kubelet  Container vllm failed liveness probe, will be restarted"""
    [finding] = diagnose_lines(pod.splitlines(), "log").findings
    assert (finding.cause, finding.what.count("liveness probe")) == ("not_ready_yet", 1)
    assert finding.fix is not None
    assert "startupProbe: {httpGet: {path: /health, port: 8000}" in finding.fix.why
    without_probe = [line for line in pod.splitlines() if "probe" not in line]
    assert [one.cause for one in diagnose_lines(without_probe, "log").findings] == ["host_ram_oom"]
    # A server that is there and slow has finished loading.
    assert diagnose_lines(pod.splitlines()[4:5], "log").findings == []


def test_a_port_for_the_engine_s_own_processes_is_not_the_server_s() -> None:
    text = 'Traceback (most recent call last):\n  File "/venv/vllm/utils.py", line 572, in get_open_port\n    s.bind(("", 0))\nOSError: [Errno 98] Address already in use\n'
    [finding] = _found(text)
    assert "not the port that the server listens on" in finding.what
    assert finding.confidence == "medium"


def test_a_function_that_an_amd_gpu_lacks_leaves_a_choice() -> None:
    [finding] = diagnose_lines(
        ["ggml_cuda_compute_forward: RMS_NORM failed", "ROCm error: invalid device function"], "log"
    ).findings
    assert finding.confidence == "medium"


def test_memory_that_the_kernel_refuses_may_be_a_limit() -> None:
    [finding] = _found("    faulthandler.enable()\nOSError: [Errno 12] Cannot allocate memory")
    assert finding.confidence == "medium"
    assert "limit" in finding.what
