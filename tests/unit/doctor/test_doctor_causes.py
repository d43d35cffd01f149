"""Single causes that were once told as others, and fixes in the words of the engine that failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding
from holdfast.doctor.rules.load import rulebook

VLLM = "INFO 11-01 10:00:00 [api_server.py:1805] vLLM API server version {}"
ARGS = "INFO 11-01 10:00:01 [utils.py:326] non-default args: {{'model': 'Qwen/Qwen3-8B'{}}}"
OLLAMA = (
    'time=2025-02-02T09:23:09.833Z level=INFO source=routes.go:1 msg="Listening on 127.0.0.1:11434 (version 0.5.7)"'
)
LLAMA = ["build: 7000 (abcdef01) with gcc", "main: loading model", "srv    load_model: loading model 'm.gguf'"]


WRAPPED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def _first(*lines: str) -> Finding:
    return diagnose_lines(lines, "log").findings[0]


def _vllm(*lines: str, version: str = "0.11.0", settings: str = "") -> Finding:
    return _first(VLLM.format(version), ARGS.format(settings), *lines)


def test_memory_that_cpu_and_gpu_share_is_known_by_its_size() -> None:
    free = (
        "ValueError: Free memory on device cuda:0 ({}/{} GiB) on startup is less than desired GPU memory utilization"
        " (0.9, 109.47 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    found = _vllm(free.format("96.20", "121.63"))
    assert found.cause == "unified_memory"
    assert found.fix is not None
    assert found.fix.changes == {"--gpu-memory-utilization": "0.77"}
    assert _vllm(free.format("96.20", "139.80")).cause == "free_memory_below_utilization"
    taken = _vllm(free.format("4.04", "119.63"))  # a share of 0.01 would hold no model
    assert taken.cause == "unified_memory"
    assert taken.fix is not None
    assert not taken.fix.changes
    assert taken.fix.basis == "look"


def test_a_share_of_shared_memory_is_not_raised_beyond_what_the_system_needs() -> None:
    lines = [
        "INFO 11-01 10:00:09 [gpu_worker.py:1] Free memory on device (118.00/121.63 GiB) on startup.",
        "ValueError: To serve at least one request with the models's max seq len (262144), (18.35 GiB KV cache is"
        " needed, which is larger than the available KV cache memory (8.72 GiB). Based on the available memory, the"
        " estimated maximum model length is 121840.",
    ]
    found = _vllm("NVIDIA GB10", *lines)
    changes = [fix.changes for fix in (found.fix, *found.alternatives) if fix is not None]
    assert changes[0] == {"--max-model-len": "121840"}
    assert not any("--gpu-memory-utilization" in change for change in changes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "gguf_init_from_file_impl: tensor 'a' of type 31 (TYPE_Q4_0_4_4 REMOVED, use Q4_0 with runtime repacking)"
            " has 4096 elements per row, not a multiple of block size (0)",
            "no longer reads",
        ),
        ("gguf_init_from_file_impl: tensor 'a' has invalid ggml type 39. should be in [0, 39)", "does not know (39)"),
    ],
)
def test_a_type_that_a_build_does_not_read_is_no_torn_file(line: str, said: str) -> None:
    torn = "gguf_init_from_file_impl: failed to read tensor info"
    every = diagnose_lines([*LLAMA, line, torn, "main: exiting due to model loading error"], "log").findings
    assert [one.cause for one in every] == ["arch_unsupported"]
    assert said in every[0].what
    assert _first(*LLAMA, torn).cause == "corrupt_download"


@pytest.mark.parametrize("cause", ["74, pid=1, NVLink: fatal error", "119, pid=1, Timeout after 6s of waiting for RPC"])
def test_what_follows_from_a_fault_of_the_gpu_comes_after_it(cause: str) -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): "
    found = _first(f"{xid}45, pid=4242, name=python3", f"{xid}{cause}")
    assert "45" not in found.what
    assert _first(f"{xid}45, pid=4242, name=python3").confidence == "low"


def test_a_limit_of_time_is_raised_where_it_ran_out() -> None:
    found = _vllm(
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight"
        " loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S)."
    )
    assert (found.cause, found.confidence) == ("timeout_or_hang", "medium")
    assert found.fix is not None
    assert found.fix.command == "VLLM_ENGINE_READY_TIMEOUT_S=3600 vllm serve Qwen/Qwen3-8B"


def test_the_cache_of_prompts_is_named_where_llama_cpp_is_killed() -> None:
    cache = "srv    load_model: prompt cache is enabled, size limit: 8192 MiB"
    for last in ("srv   alloc: failed to allocate memory for prompt cache state: std::bad_alloc", "Killed"):
        found = _first(*LLAMA, cache, "main: server is listening on http://127.0.0.1:8080", last)
        assert found.cause == "host_ram_oom"
        assert found.fix is not None
        assert found.fix.changes == {"--cache-ram": "1024"}


def test_memory_that_could_not_be_pinned_is_no_failure_of_llama_cpp() -> None:
    line = "ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: out of memory"
    assert diagnose_lines([*LLAMA, line, "main: server is listening on http://127.0.0.1:8080"], "log").healthy


def test_a_flag_that_is_gone_is_replaced_as_the_doctor_of_commands_does() -> None:
    found = _first(
        "command: vllm serve BAAI/bge-m3 --task embed",
        "$ vllm serve BAAI/bge-m3 --task embed",
        "usage: vllm [-h] [-v] {chat,complete,serve,bench} ...",
        "vllm: error: unrecognized arguments: --task embed",
    )
    assert found.cause == "bad_flag"
    assert found.fix is not None
    assert found.fix.command == "vllm serve BAAI/bge-m3 --runner pooling --convert embed"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("RuntimeError: UVA is not available", "bad_flag"),
        ("RuntimeError: FlashInfer requires GPUs with sm75 or higher", "nvcc_missing"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "kernel_image_missing"),
        ("TypeError: not a string", "tokenizer_mismatch"),
        (
            "ValueError: Unrecognized model in /m. Should have a `model_type` key in its config.json",
            "gated_or_missing_model",
        ),
        ("OSError: /m does not appear to have a file named preprocessor_config.json.", "gated_or_missing_model"),
        ("OSError: /m does not appear to have a file named config.json.", "gated_or_missing_model"),
        ("ValueError: No supported config format found in /m.", "gated_or_missing_model"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/tokenizer.model'", "tokenizer_mismatch"),
    ],
)
def test_each_is_named(line: str, cause: str) -> None:
    assert _vllm(line).cause == cause


@pytest.mark.parametrize(
    ("model", "place", "command"),
    [
        ("/m/a", "/m/a", "ls -l /m/a"),
        ("an/adapter", "an/adapter", "hf download an/adapter config.json"),
        ("an/Other-GGUF", "an/Other-GGUF", None),
    ],
)
def test_a_missing_config_is_looked_for_where_the_model_was_named(model: str, place: str, command: str | None) -> None:
    found = _first(f"$ vllm serve {model}", f"OSError: {place} does not appear to have a file named config.json.")
    assert place in found.what
    assert found.fix is not None
    assert found.fix.command == command


def test_out_of_memory_where_the_system_shares_it_is_not_laid_on_another_process() -> None:
    out = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.20 GiB. GPU 0 has a total capacity of {} GiB"
        " of which 1.10 GiB is free. Including non-PyTorch memory, this process has 60.10 GiB memory in use. Of the"
        " allocated memory 58.10 GiB is allocated by PyTorch, and 310.00 MiB is reserved by PyTorch but unallocated."
    )
    loaded = "INFO 11-01 10:00:20 [gpu_model_runner.py:2653] Model loading took 15.27 GiB and 9.8 seconds"
    assert _vllm(loaded, out.format("121.63")).cause == "unified_memory"
    assert _vllm(loaded, out.format("79.10")).cause == "other_process_on_gpu"


@pytest.mark.parametrize("whose", ["Qwen2Tokenizer", "'Qwen2Tokenizer' object"])
def test_a_library_that_is_newer_than_the_engine_is_named(whose: str) -> None:
    assert (
        "transformers is newer" in _vllm(f"AttributeError: {whose} has no attribute all_special_tokens_extended").what
    )


def test_a_pull_of_ollama_that_broke_is_not_well() -> None:
    found = diagnose_lines([OLLAMA, "Error: max retries exceeded: EOF"], "log")
    assert not found.healthy
    assert "pulled" in found.findings[0].what


def test_the_model_that_ollama_lacks_is_named_in_its_command() -> None:
    fix = _first(OLLAMA, "Error: model 'llama9' not found").fix
    assert fix is not None
    assert fix.command == "ollama list; ollama pull llama9"


def test_a_file_of_llama_cpp_is_not_fetched_by_a_name_of_the_hub() -> None:
    torn = "llama_model_load: error loading model: tensor 'a' data is not within the file bounds, model is corrupted"
    named = "llama_model_loader: loaded meta data with 40 key-value pairs and 579 tensors from /m/a.gguf (version V3)"
    for lines, file in (((torn,), "MODEL.gguf"), ((named, torn), "/m/a.gguf")):
        fix = _first(*lines).fix
        assert fix is not None
        assert fix.command == f"ls -l {file}; sha256sum {file}"


def test_a_gpu_that_sglang_does_not_run_on_is_named() -> None:
    found = _first("[2025-11-01 10:00:00] server_args=ServerArgs(model_path='a/b', tp_size=1)",
                   "RuntimeError: SGLang only supports sm75 and above.")  # fmt: skip
    assert (found.cause, "sm75" in found.what) == ("kernel_image_missing", True)


def test_an_argument_inside_the_engine_is_no_flag_of_the_command() -> None:
    found = _vllm("TypeError: Worker.__init__() got an unexpected keyword argument 'kv_cache_dtype'")
    assert (found.cause, found.confidence) == ("other", "low")
    assert _vllm("TypeError: EngineArgs.__init__() got an unexpected keyword argument 'taks'").cause == "bad_flag"


@pytest.mark.parametrize(
    "line",
    [
        "Error: pull model manifest: file does not exist",
        "llama_model_load: error loading model: tensor 'a' data is not within the file bounds, model is corrupted",
        "429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/a/b",
    ],
)
def test_who_runs_ollama_is_told_commands_of_ollama(line: str) -> None:
    found = _first(OLLAMA, line)
    commands = [fix.command or "" for fix in (found.fix, *found.alternatives) if fix is not None]
    assert not any("hf " in command for command in commands)


def test_a_smaller_model_is_never_the_first_fix() -> None:
    firsts = [rule.fix[0] for rule in rulebook().rules if rule.fix]
    assert not [fix.why for fix in firsts if "smaller model" in fix.why]


SOCKET = "zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/lmcache_rpc_port_0')"
MAGIC = "gguf_init_from_file_impl: failed to read magic"
FOLDER = "llama_model_load: error loading model: llama_model_loader: failed to load model from /srv/models/"
SET_DEVICE = (
    "Traceback (most recent call last):",
    '  File "/venv/vllm/v1/worker/gpu_worker.py", line 257, in init_device',
    '  File "/venv/torch/cuda/__init__.py", line 584, in set_device',
    "torch.AcceleratorError: CUDA error: out of memory",
)
NVCC = "Failed to get device capability: nvcc not found and PyTorch is not built with CUDA support."


@pytest.mark.parametrize(
    ("found", "cause", "said"),
    [
        pytest.param(lambda: _vllm(SOCKET), "other", "The socket /tmp/lmcache_rpc_port_0 is in use", id="no port"),
        pytest.param(lambda: _first(*LLAMA, MAGIC, FOLDER), "gated_or_missing_model", "a folder", id="no torn file"),
        pytest.param(lambda: _first(*LLAMA, MAGIC), "corrupt_download", "header", id="a torn file"),
        pytest.param(lambda: _vllm(*SET_DEVICE), "other_process_on_gpu", "before the server", id="no weights yet"),
        pytest.param(lambda: _vllm("KeyboardInterrupt", WRAPPED), "other", "was interrupted", id="interrupted"),
        pytest.param(lambda: _vllm(NVCC, "KeyError: 'router.w2'", WRAPPED), "other", "KeyError", id="no compiler"),
        pytest.param(
            lambda: _vllm("OSError: [Errno 122] Disk quota exceeded: '/a/torch_compile_cache'"),
            "other",
            "disk",
            id="quota",
        ),
    ],
)
def test_public_logs_that_were_told_as_something_else(found: Callable[[], Finding], cause: str, said: str) -> None:
    finding = found()
    assert finding.cause == cause
    assert said in finding.what


def test_a_client_that_gives_up_is_no_failure_of_ollama() -> None:
    gone = (
        'time=2025-06-25T18:30:57.074Z level=ERROR source=sched.go:489 msg="error loading llama server"'
        ' error="timed out waiting for llama runner to start: context canceled"'
    )
    answered = '[GIN] 2025/06/25 - 20:28:26 | 200 | 18.590124978s |       127.0.0.1 | POST     "/api/chat"'
    assert diagnose_lines([OLLAMA, answered, gone], "log").healthy
    late = gone.replace("context canceled", "progress 0.10")
    assert not diagnose_lines([OLLAMA, answered, late], "log").healthy


def test_ollama_waits_for_a_request_and_is_well() -> None:
    assert diagnose_lines([OLLAMA], "log").healthy


def test_a_prompt_that_was_cut_was_not_refused() -> None:
    cut = (
        'time=2026-01-20T13:24:54Z level=WARN source=runner.go:153 msg="truncating input prompt" limit=4096 prompt=5194'
    )
    found = _first(OLLAMA, cut)
    assert "was cut to the 4,096" in found.what
    assert found.fix is not None
    assert found.fix.changes == {"OLLAMA_CONTEXT_LENGTH": "7168"}


def test_an_error_of_the_device_is_not_taken_for_one_of_a_request() -> None:
    """Its text has Timeout in it; its name does not."""
    log = [
        VLLM.format("0.11.0"),
        "INFO:     Application startup complete.",
        "Traceback (most recent call last):",
        '  File "/venv/vllm/v1/engine/core.py", line 712, in run_busy_loop',
        "RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(stream), error code is 507035",
    ]
    assert not diagnose_lines(log, "log").healthy
