"""Messages next to a known one that mean something else: each is told apart from it, and no surer than the log allows."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding


def _first(*lines: str) -> Finding:
    return diagnose_lines(lines, "log").findings[0]


def test_a_port_that_the_system_forbids_is_not_told_as_taken() -> None:
    found = _first(
        "Error: listen tcp 127.0.0.1:11434: bind: An attempt was made to access a socket in a way forbidden by its access permissions."
    )
    assert "does not allow port 11434" in found.what
    assert found.fix is not None
    assert "excludedportrange" in (found.fix.command or "")
    assert found.confidence != "high"


def test_a_port_refused_in_another_language_is_not_told_for_sure() -> None:
    found = _first("Error: listen tcp 127.0.0.1:11434: bind: Une tentative d'accès à un socket de manière interdite.")
    assert "could not be opened" in found.what
    assert found.confidence != "high"


@pytest.mark.parametrize(
    "words", ["address already in use", "Only one usage of each socket address (protocol/network address/port)"]
)
def test_a_port_that_is_taken_stays_that(words: str) -> None:
    found = _first(f"Error: listen tcp 127.0.0.1:11434: bind: {words}")
    assert found.what == "Port 11434 is taken by another process."
    assert found.confidence == "high"


def test_weights_of_another_format_are_not_told_as_a_torn_gguf() -> None:
    found = _first(
        "gguf_init_from_file: invalid magic number 00029880",
        r"error loading model: llama_model_loader: failed to load model from D:\model.safetensors",
    )
    assert "is no GGUF" in found.what
    assert found.fix is not None
    assert "convert_hf_to_gguf" in found.fix.why


def test_a_gguf_that_is_a_pointer_is_fetched_again() -> None:
    found = _first(
        "gguf_init_from_file: invalid magic number 73726576",
        "error loading model: llama_model_loader: failed to load model from models/small.Q2_K.gguf",
    )
    assert found.cause == "corrupt_download"


def test_a_model_of_ones_own_that_the_registry_lacks_is_not_told_as_misspelt_for_sure() -> None:
    found = _first(
        "ollama create my-dog -f ./Modelfile",
        "ollama run my-dog",
        "pulling manifest",
        "Error: pull model manifest: file does not exist",
    )
    assert found.cause == "gated_or_missing_model"
    assert found.confidence == "medium"
    assert found.fix is not None
    assert "FROM" in found.fix.why


SAID = {
    # Lines, the words of the answer, the words of its fix.
    "Error: pull model manifest: 412:\nThe model you are attempting to pull requires a newer version of Ollama.": (
        "too old for this model",
        "start the server again",
    ),
    "{'message': 'registry.ollama.ai/library/small:4b does not support tools', 'type': 'api_error'}": (
        "registry.ollama.ai/library/small:4b has none",
        "a model that",
    ),
    "Error: mkdir /Volumes/disk: permission denied: ensure path elements are traversable": (
        "may not make the folder /Volumes/disk",
        "mount the drive",
    ),
    'Error: pull model manifest: Get "https://registry.ollama.ai/v2/library/a/manifests/latest": tls: failed to verify certificate: x509: certificate is valid for ollama.com, www.ollama.com, not registry.ollama.ai': (
        "What answers as registry.ollama.ai is another server",
        "/etc/hosts",
    ),
    'Error: pull model manifest: Get "https://registry.ollama.ai/v2/library/a/manifests/latest": tls: failed to verify certificate: x509: certificate signed by unknown authority': (
        "is not trusted here",
        "update-ca-certificates",
    ),
    "Error: exception error loading model architecture: unknown model architecture: ''": (
        "names no architecture",
        "another GGUF",
    ),
    '    raise ValueError(f"Model path does not exist: {model_path}")\nValueError: Model path does not exist: ~/models/small.bin': (
        "cannot be opened: ~/models/small.bin",
        "-m wants the .gguf file",
    ),
    "llama_init_from_model: V cache quantization requires flash_attn": ("needs flash attention", "-fa on"),
    "embeddings-1 | E srv    send_error: task id = 8, error: input (11257 tokens) is too large to process. increase the physical batch size (current batch size: 8192)": (
        "11,257 tokens is beyond the physical batch of 8,192",
        "at least 11257",
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'\nReceived sigquit from a child process": (
        "ninja is not found",
        "first on PATH",
    ),
    "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:29236')": (
        "own processes speak over is taken: 29236",
        "some hundreds away",
    ),
    "RuntimeError: The memory capacity is unbalanced. min_per_gpu_memory=16.28, local_gpu_memory=46.81": (
        "16.3 GB on one, 46.8 on another",
        "stop it by its pid",
    ),
    "Not enough memory to handle 16000 total tokens with 2 prefill tokens. You need to decrease `--max-batch-total-tokens`": (
        "KV for 16,000 tokens in all",
        "without --max-batch-total-tokens",
    ),
}


@pytest.mark.parametrize("log", SAID, ids=range(len(SAID)))
def test_each_is_told_in_its_own_words_and_with_a_fix_for_it(log: str) -> None:
    what, fix = SAID[log]
    found = _first(*log.splitlines())
    assert what in found.what
    assert found.fix is not None
    assert fix in found.fix.why
    assert found.confidence == "medium"


def test_what_sglang_ended_itself_was_not_killed_for_want_of_ram() -> None:
    found = _first(
        "[2026-03-04 13:10:13] Prefill batch, #new-seq: 4, #new-token: 8192, #cached-token: 0, #running-req: 3, #queue-req: 1,",
        "[2026-03-04 13:10:13] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/sglang/srt/layers/attention/backend.py", line 1020, in forward_extend',
        "RuntimeError: The expanded size of the tensor (3427) must match the existing size (7928) at non-singleton dimension 0.",
        "[2026-03-04 13:10:13] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
        "./launch.sh: line 31:  2467 Killed                  python3 -m sglang.launch_server --port 30000",
    )
    assert found.cause != "host_ram_oom"
