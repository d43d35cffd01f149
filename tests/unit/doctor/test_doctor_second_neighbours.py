"""More messages next to a known one: whose they are, which load they are of, and a first fix that can help."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Diagnosis, Finding

OLLAMA = 'time=2026-07-29T22:05:25.626+05:30 level=INFO source=routes.go:2054 msg="Listening on 127.0.0.1:11434 (version 0.15.0)"'


def _read(*lines: str) -> Diagnosis:
    return diagnose_lines(lines, "log")


def _first(*lines: str) -> Finding:
    return _read(*lines).findings[0]


def _command(found: Finding) -> str:
    assert found.fix is not None
    return found.fix.command or ""


@pytest.mark.parametrize("said", ["self.server_args.mem_fraction_static=0.944", "0.944"])
def test_a_static_share_that_is_set_higher_is_not_lowered(said: str) -> None:
    found = _first(
        f"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: {said}"
    )
    assert found.cause == "no_memory_for_kv_blocks"
    assert "--mem-fraction-static" not in _command(found)


def test_a_static_share_that_the_message_names_is_raised() -> None:
    message = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: self.server_args.mem_fraction_static=0.8"
    assert _command(_first(message)).endswith("--mem-fraction-static 0.86")


def test_ranks_in_the_line_above_a_traceback_are_counted() -> None:
    found = _first(
        "[2025-12-26 18:08:56 DP2 TP2] Scheduler hit an exception: Traceback (most recent call last):",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: self.server_args.mem_fraction_static=0.944",
    )
    assert _command(found).endswith("--tensor-parallel-size 8")


@pytest.mark.parametrize("program", ["vllm", "vllm serve"])
def test_serve_given_twice_is_not_told_as_a_flag_of_another_version(program: str) -> None:
    found = _first(f"{program}: error: unrecognized arguments: serve /models/small")
    assert "`serve` twice" in found.what
    assert found.fix is not None
    assert "without the second `serve`" in found.fix.why
    assert "flag" in _first(f"{program}: error: unrecognized arguments: --serve-fast").what


@pytest.mark.parametrize(
    ("backends", "advised"), [("('TRITON_ATTN',)", False), ("['TRITON_ATTN', 'FLASH_ATTN']", True)]
)
def test_a_backend_that_has_no_faster_one_beside_it_is_not_called_slow(backends: str, *, advised: bool) -> None:
    read = _read(
        "INFO 02-05 00:05:00 [api_server.py:1839] vLLM API server version 0.13.0",
        f"INFO 02-05 00:06:07 [cuda.py:351] Using TRITON_ATTN attention backend out of potential backends: {backends}",
        "INFO:     Application startup complete.",
    )
    assert ("slow_attention_backend" in [one.cause for one in read.findings]) is advised


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Runtime check failed at /sgl-workspace/sglang/python/sglang/jit_kernel/include/sgl_kernel/distributed/custom_all_reduce.cuh:37: CUDA error: invalid argument",
        "INFO 10-01 10:00:00 [api_server.py:1] vLLM API server version 0.9.0\nFailed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'",
    ],
)
def test_the_engines_own_all_reduce_is_not_told_as_links_that_nccl_lacks(line: str) -> None:
    found = _first(*line.splitlines())
    assert "custom all-reduce" in found.what
    assert _command(found).endswith("--disable-custom-all-reduce")


def test_a_failed_load_is_told_with_its_own_context() -> None:
    found = _first(
        OLLAMA,
        "llama_context: n_ctx         = 131072",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "llama_context: n_ctx         = 8192",
    )
    assert "131,072" in found.what
    assert _command(found) == "OLLAMA_CONTEXT_LENGTH=65536 ollama serve"


def test_a_runner_that_was_killed_is_not_told_as_the_server() -> None:
    found = _first(
        OLLAMA,
        'time=2026-02-07T22:02:06.774+05:30 level=WARN source=server.go:1269 msg="llama runner process no longer running" sys=9 string="signal: killed"',
    )
    assert "The runner of a model was killed" in found.what
    assert "Ollama itself goes on" in found.what


def test_a_check_of_amds_runtime_is_not_told_as_llama_cpps() -> None:
    found = _first(
        "small.llamafile: /usr/src/debug/hip-runtime-amd/clr-rocm-6.0.0/rocclr/os/os_posix.cpp:321: static void amd::Os::currentStackInfo(unsigned char**, size_t*): Assertion `Os::currentStackPtr() < *base' failed."
    )
    assert "AMD's runtime" in found.what


def test_a_full_gpu_of_llama_cpp_is_not_told_as_a_profile_run() -> None:
    found = _first(
        "llama_new_context_with_model: n_ctx      = 4096",
        "llama_new_context_with_model: KV self size  = 2048.00 MiB, K (f16): 1024.00 MiB, V (f16): 1024.00 MiB",
        "llama_new_context_with_model:      CUDA0 compute buffer size =   296.02 MiB",
        "CUDA error: out of memory",
    )
    assert "after the weights and the KV cache of 4,096 tokens" in found.what
    assert _command(found).endswith("--ctx-size 2048")


def test_a_llama_server_with_a_file_of_ollamas_stays_llama_cpps() -> None:
    loads = "llama_model_loader: loaded meta data with 24 key-value pairs and 112 tensors from /data/.ollama/models/blobs/sha256-97 (version GGUF V3 (latest))"
    assert _read("build: 6210 (a094f38) with clang version 19.1.7", "main: loading model", loads).engine == "llama.cpp"
    assert _read(loads).engine == "ollama"
    assert _read(OLLAMA, "srv    load_model: loading model", loads).engine == "ollama"


def test_llamafiles_missing_kernels_are_not_looked_for_in_torch() -> None:
    found = _first(
        "CUDA error 209 at /data/.llamafile/ggml-cuda.cu:7280: no kernel image is available for execution on the device"
    )
    assert found.cause == "kernel_image_missing"
    assert "torch" not in _command(found)


def test_a_jetsons_device_is_no_folder_of_hugging_face() -> None:
    found = _first("Nov 27 16:54:54 jetson ollama[7008]: NvRmMemInitNvmap failed with Permission denied")
    assert "usermod -aG video,render ollama" in _command(found)


def test_a_tensor_of_another_name_is_not_fetched_again() -> None:
    found = _first("[rank0]: KeyError: 'layers.11.mlp.down_proj.weight'")
    assert found.cause != "corrupt_download"
    assert "layers.11.mlp.down_proj.weight" in found.what
    assert "download" not in _command(found)


def test_a_cache_that_cannot_be_written_is_named_and_yields_to_what_failed() -> None:
    warned = "There was a problem when trying to write in your cache folder (/.cache/huggingface/hub). You should set the environment variable TRANSFORMERS_CACHE to a writable directory."
    found = _first(warned)
    assert "/.cache/huggingface/hub" in found.what
    assert found.fix is not None
    assert "HF_HOME" in found.fix.why
    assert _first(warned, "RuntimeError: No CUDA GPUs are available").what == "No GPU is visible to the server."


def test_the_file_that_matches_none_is_named_as_it_was_asked_for() -> None:
    found = _first(
        '   2293  f"No file found in {repo_id} that match {filename}"',
        "ValueError: No file found in a/small that match *q9_0.gguf",
    )
    assert found.what == "No file of a/small has the name *q9_0.gguf."


@pytest.mark.parametrize(
    ("log", "said", "helps"),
    [
        ("ValueError: There is no module or parameter named 'embed_tokens' in LlamaForCausalLM", "does not have: embed_tokens", "a newer release"),
        ("    sl = self._semlock = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device", "A semaphore could not be made", "/dev/shm"),
        ('Get "https://registry.ollama.ai/v2/library/a/manifests/latest": tls: failed to verify certificate: x509: certificate has expired or is not yet valid', "has expired", "date -u"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, Expecting value: line 1 column 1 (char 0) [type=value_error, input_value=ArgsKwargs(())]", "A JSON file of the model", "json.tool"),
        ("HTTPConnectionPool(host='127.0.0.1', port=3128): Max retries exceeded with url: http://localhost:8000/v1/chat/completions (Caused by ProxyError('Unable to connect to proxy', NewConnectionError('Connection refused')))", "an HTTP proxy", "NO_PROXY"),
        ("No connection adapters were found for '0.0.0.0:11434/api/tags'\nOllama model 'small' not found. Please run 'ollama pull small' to install it.", "without http://", "with http://"),
        ("httpx.HTTPStatusError: Client error '429 Too Many Requests'\nOSError: Unable to load vocabulary from file.", "too many requests", "HF_TOKEN"),
    ],
    ids=["a tensor's prefix", "a semaphore", "an expired certificate", "a damaged JSON", "a proxy", "an address", "a limit of the hub"],
)  # fmt: skip
def test_what_failed_is_not_told_as_its_neighbour(log: str, said: str, helps: str) -> None:
    found = _first(*log.splitlines())
    assert said in found.what
    assert found.fix is not None
    assert helps in f"{found.fix.command} {found.fix.why}"
    assert found.confidence != "high"
