"""Messages that say by themselves what failed and what helps are called high; the same words with a sign of something
else are not."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding

pytestmark = pytest.mark.usefixtures("every_rule_proven")

FREE = "ValueError: Free memory on device cuda:0 ({:.2f}/{:.2f} GiB) on startup is less than desired GPU memory utilization (0.9, {:.2f} GiB)."
CUT = 'time=2026-01-20T13:24:54.423Z level=WARN source=runner.go:153 msg="truncating input prompt" limit={} prompt=5194 keep=5 new=4096'
QUANTIZED = "ValueError: The quantization method {} is not supported for the current GPU. Minimum capability: {}. Current capability: {}."
REPOSITORY = "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{}'. Use `repo_type` argument if needed."
BOUNDS = "llama_model_load: error loading model: tensor 'blk.2.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete"
PRETOKENIZER = "llama_model_load: error loading model: error loading model vocabulary: unknown pre-tokenizer type: '{}'"


def _first(log: str) -> Finding:
    return diagnose_lines(log.splitlines(), "log").findings[0]


def _fix(found: Finding) -> str:
    assert found.fix is not None
    return found.fix.command or found.fix.why


SURE = {
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].': "nvidia-ctk runtime configure",
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver": "a newer NVIDIA driver",
    "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/an/other-7B.": "huggingface.co/an/other-7B",
    "PermissionError: [Errno 13] Permission denied: '/.cache'": "HF_HOME=/tmp/huggingface",
    "python: Error while finding module specification for 'vllm.entrypoints' (ModuleNotFoundError: No module named 'vllm')": "python -m pip install vllm",
    "ModuleNotFoundError: No module named 'llama_cpp'": "python -m pip install llama-cpp-python",
    """{"message":"\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set"}""": "--tool-call-parser PARSER",
    "Trying to keep the first 9000 tokens when context the overflows. However, the model is loaded with context length of only 4096 tokens": "a context of more than 9,000 tokens",
    "pulling manifest\nError: pull model manifest: 412:\nThe model you are attempting to pull requires a newer version of Ollama.": "install.sh",
    "{'message': 'registry.ollama.ai/library/small:4b does not support tools', 'type': 'api_error'}": "a model that ollama.com/library marks with tools",
    CUT.format(2048): "OLLAMA_CONTEXT_LENGTH=7168 ollama serve",
    "ValueError: Model path does not exist: ~/models/small.bin": "ls -l ~/models/small.bin",
    "gguf_init_from_file: invalid magic number 67676a74": "the same model as .gguf",
    "llama_init_from_model: V cache quantization requires flash_attn": "-fa on",
    "embeddings-1 | E srv    send_error: task id = 8, error: input (11257 tokens) is too large to process. increase the physical batch size (current batch size: 8192)": "at least 11257",
    PRETOKENIZER.format("qwen2"): "a newer build of llama.cpp",
    "INFO 11-01 10:00:00 [core.py:9] vLLM\nFileNotFoundError: [Errno 2] No such file or directory: 'ninja'": "ninja-build",
    "INFO 11-01 10:00:00 [core.py:9] vLLM\nNVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.": "pip install --upgrade vllm",
    "INFO 11-01 10:00:00 [core.py:9] vLLM\n" + QUANTIZED.format("awq", 75, 70): "GPTQ",
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.": "--max-num-seqs 64",
    FREE.format(5.92, 79.19, 71.27): "kill PID",
    "llama_model_load: error loading model: llama_model_loader: failed to load model from models/": "-m FOLDER/FILE.gguf",
    "ImportError: Please install bitsandbytes>=0.46.1 via `pip install bitsandbytes>=0.46.1` to use it.": "python -m pip install 'bitsandbytes>=0.46.1'",
    "Exception: sgl-kernel is installed with version 0.0.3, which is less than 0.0.5. Please reinstall the latest version with `pip install sgl-kernel --force-reinstall`": "python -m pip install sgl-kernel --force-reinstall",
    "AttributeError: TokenizersBackend has no attribute all_special_tokens_extended.": "pip install 'transformers<5'",
    REPOSITORY.format("/models/small"): "ls /models/small",
    "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file": "sudo apt-get install -y libgomp1",
    "Error: write /usr/share/ollama/.ollama/models/blobs/sha256-1-partial: no space left on device\nollama version is 0.9.0": "make room",
    "srv    start: couldn't bind HTTP server socket, hostname: 0.0.0.0, port: 8080": "--port 8081",
    "INFO 11-01 10:00:00 [core.py:9] vLLM\nRuntimeError: Failed to find C compiler. Please specify via CC environment variable.": "build-essential",
}  # fmt: skip


@pytest.mark.parametrize("log", SURE, ids=range(len(SURE)))
def test_a_message_that_says_what_helps_is_called_high(log: str) -> None:
    found = _first(log)
    assert found.confidence == "high"
    assert SURE[log] in _fix(found)


NEIGHBOURS = {
    "a compiled part that is missing": "ModuleNotFoundError: No module named 'vllm._C'",
    "a part of another release": "ModuleNotFoundError: No module named 'vllm.entrypoints.anthropic'",
    "a folder of another program": "PermissionError: [Errno 13] Permission denied: 'tiktoken_cache'",
    "a service of another kind": "the model small does not support tools",
    "a Mac, which has no such GPU": 'me@MacBook-Pro % docker-compose up\nError response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]',
    "a prompt for embeddings": '[GIN] 2026/01/20 - 13:24:54 | 200 | 1s | 127.0.0.1 | POST "/api/embed"\n' + CUT.format(2048),
    "a context that was set": CUT.format(512),
    "requests that failed": "[GIN] 2026/01/20 - 13:24:54 | 500 | 60s | 127.0.0.1 | POST\n" + CUT.format(2048),
    "a runner that died too": CUT.format(2048) + "\npanic: runtime error: index out of range",
    "somebody's sentence": "This mends the error without it: ModuleNotFoundError: No module named 'vllm'. Now it falls back to another.",
    "a model without flash attention": "llama_init_from_model: flash_attn is not compatible with Grok - forcing off\nllama_init_from_model: V cache quantization requires flash_attn",
    "a pre-tokenizer of a fork": PRETOKENIZER.format("of-a-fork"),
    "a GPU that vLLM has no kernels for": "INFO 11-01 10:00:00 [core.py:9] vLLM\n" + QUANTIZED.format("bitsandbytes", 70, 52),
    "stages that share a GPU": "$ vllm serve m --omni\n" + FREE.format(0.49, 79.32, 71.39),
    "a process that used the GPU itself": "WARNING 06-17 00:26:46 [utils.py:2597] We must use the `spawn` multiprocessing start method. Reason: CUDA is initialized\n" + FREE.format(5.92, 79.19, 71.27),
    "a GPU of AMD": "INFO 11-01 10:00:00 [rocm.py:9] x\n" + FREE.format(5.92, 79.19, 71.27),
    "a name of the hub": REPOSITORY.format("a/b/c"),
    "a file of weights": REPOSITORY.format("/models/small.gguf"),
    "the top folder of the hub's cache": REPOSITORY.format("/data/hub/models--an--other-7B"),
    "a file seen by a build for 32 bit": "main: built with cc (GCC) 14.1.0 for i686-w64-mingw32\n" + BOUNDS,
    "an architecture, with a word on an update": "ValueError: The checkpoint you are trying to load has model type `a` but Transformers does not recognize this architecture. You can update with the command `pip install --upgrade transformers`",
    "a path with a variable's name in it": "ValueError: Model path does not exist: MODEL=C:/models/small.bin",
    "a library of its own": "llama-cli: error while loading shared libraries: libllama.so: cannot open shared object file",
    "memory of processes that is full": "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
    "an address of another machine": "srv    start: couldn't bind HTTP server socket, hostname: 10.0.0.9, port: 8080",
    "few sequences": "RuntimeError: CUDA out of memory occurred when warming up sampler with 8 dummy requests.",
}  # fmt: skip


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_same_words_with_a_sign_of_something_else_are_not(neighbour: str) -> None:
    found = diagnose_lines(NEIGHBOURS[neighbour].splitlines(), "log").findings
    assert all(one.confidence != "high" for one in found)


def test_ram_that_is_far_from_enough_may_be_held_by_others() -> None:
    fix = _fix(_first("Error: model requires more system memory (42.8 GiB) than is available (12.9 GiB)"))
    assert fix.startswith("42.8 GiB have to be free: end other programs")
    assert "less than 13 GiB" in fix


def test_a_shell_is_no_model() -> None:
    found = _first("api_server.py: error: unrecognized arguments: /bin/bash -c vllm serve m")
    assert "/bin/bash" in found.what
    assert "--entrypoint" in _fix(found)
    assert "--model" not in _fix(found)


def test_a_build_for_32_bit_is_what_cuts_a_large_file() -> None:
    found = _first(NEIGHBOURS["a file seen by a build for 32 bit"])
    assert found.cause == "arch_unsupported"
    assert _fix(found).startswith("a build for 64 bit")
    for_64 = _first("main: built with cc (GCC) 14.1.0 for x86_64-linux-gnu\n" + BOUNDS)
    assert (for_64.cause, for_64.confidence) == ("corrupt_download", "high")


@pytest.mark.parametrize("below", ["", "/", "/snapshots"])
def test_a_folder_of_the_hubs_cache_holds_the_model_below(below: str) -> None:
    found = _first(REPOSITORY.format("/data/hub/models--an--other-7B" + below))
    assert "snapshots/HASH" in found.what
    assert _fix(found).startswith(
        "the folder in /data/hub/models--an--other-7B/snapshots that has config.json; or the name, an/other-7B,"
    )
    revision = _first(REPOSITORY.format("/data/hub/models--an--other-7B/snapshots/0a1b"))
    assert "is not there for the server, or has no config.json" in revision.what


def test_a_limit_of_tgi_is_told_by_its_own_names() -> None:
    found = _first(
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 1887 `inputs` tokens and 1024 `max_new_tokens`"
    )
    assert found.confidence == "high"
    assert "max_new_tokens" in _fix(found)
