"""Messages next to a known one that mean something else: each is told apart from it, and no surer than the log allows."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding

pytestmark = pytest.mark.usefixtures("every_rule_proven")


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


VLLM = "INFO 11-01 10:00:00 [api_server.py:1805] vLLM API server version 0.11.0"
OLD_VLLM = VLLM.replace("0.11.0", "0.6.3")
FORKED = "RuntimeError: Cannot re-initialize CUDA in forked subprocess."
BF16 = "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your {} GPU has compute capability {}."
HEADS = "ValueError: Total number of attention heads ({}) must be divisible by tensor parallel size ({})."
HEADER = "safetensors_rust.SafetensorError: Error while deserializing header: {}"
CONTEXT = "This model's maximum context length is 8192 tokens. However, you requested 9200 tokens (8700 in the messages, 500 in the completion)."
LONGER = "ValueError: User-specified max_model_len (131072) is greater than the derived max_model_len ({} or model_max_length=None in model's config.json)."
FREE = "ValueError: Free memory on device cuda:0 ({}/24.00 GiB) on startup is less than desired GPU memory utilization (0.9, 21.60 GiB)."
KV = "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache ({})."
UNKNOWN = (
    "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'qwen3moe'"
)
CLASS = "ValueError: Model architectures ['Qwen3VLForConditionalGeneration'] are not supported for now. Supported architectures: dict_keys(['X'])"
GIB = "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (2.00 GiB)."
DTYPE = "ValueError: torch.{} is not supported for quantization method {}. Supported dtypes: [torch.{}]"
DRAFTS = "non-default args: {'model': 'm', 'tensor_parallel_size': 8, 'speculative_config': {'model': 'd'}}"
SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-g0wGsu (size 9637888)"
PROGRAM = "srv    load_model: loading model 'm.gguf'"
SOCKET = '  File "/x/site-packages/vllm/entrypoints/openai/api_server.py", line 1263, in create_server_socket'
TAKEN = "OSError: [Errno 98] Address already in use"
TRACE = "Traceback (most recent call last):"

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # The log that leaves no choice, and its neighbour that has the same words.
    "a fork of vLLM's, and of somebody's own": (
        (VLLM, f"(VllmWorkerProcess pid=88) {FORKED}"),
        (VLLM, TRACE, '  File "/app/run.py", line 3, in <module>', FORKED),
    ),
    "workers that are spawned already": (
        (VLLM, f"(VllmWorkerProcess pid=88) {FORKED}"),
        (VLLM, "VLLM_WORKER_MULTIPROC_METHOD=spawn", f"(VllmWorkerProcess pid=88) {FORKED}"),
    ),
    "a GPU that computes in float16, and one that vLLM has no kernels for": (
        (BF16.format("Tesla T4", 7.5),),
        (BF16.format("Tesla P100", "6.0"),),
    ),
    "a driver that torch has read, and one that may not be in the container": (
        (VLLM, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        (VLLM, "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    ),
    "a driver, and kernels that were built here": (
        (VLLM, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        (VLLM, "torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
    ),
    "shared memory, and a fault of CUDA that stopped at it": (
        (VLLM, "ncclSystemError: System call failed.", SEGMENT),
        (VLLM, "ncclUnhandledCudaError: Call to CUDA function failed.", SEGMENT),
    ),
    "half of the GPUs, and far fewer": ((HEADS.format(28, 8),), (HEADS.format(28, 16),)),
    "heads of the model, and of its draft": ((VLLM, HEADS.format(12, 8)), (VLLM, DRAFTS, HEADS.format(12, 8))),
    "a release that vLLM has, and one of another platform's build": (
        (OLD_VLLM, CLASS),
        (OLD_VLLM, "INFO 11-01 10:00:00 [__init__.py:44] Platform plugin ascend is activated", CLASS),
    ),
    "a release, and a build that does not know its own": (
        (OLD_VLLM, CLASS),
        (VLLM.replace("0.11.0", "0.1.dev1+g9759e3b06"), CLASS.replace("Qwen3VL", "Gemma3")),
    ),
    "llama.cpp's program, and Ollama's runner": ((UNKNOWN,), ("Error: llama runner process has terminated", UNKNOWN)),
    "an older build, and one that has the architecture": (
        ("build: 5000 (abcdef12) with cc", PROGRAM, UNKNOWN),
        ("build: 99999 (abcdef12) with cc", PROGRAM, UNKNOWN),
    ),
    "a pointer in place of weights, and a checkpoint that was saved wrongly": (
        (VLLM, HEADER.format("HeaderTooLarge")),
        (VLLM, HEADER.format("MetadataIncompleteBuffer")),
    ),
    "weights of the hub, and of somebody's own": (
        (VLLM, "$ vllm serve an/other", HEADER.format("HeaderTooLarge")),
        (VLLM, "$ vllm serve /data/outputs/checkpoint-900", HEADER.format("HeaderTooLarge")),
    ),
    "a file that ends early, and one whose download is changed on its way": (
        ("llama_model_load: error loading model: tensor 'a' data is not within the file bounds, model is corrupted or incomplete",),
        ("Error: digest mismatch, file must be downloaded again: want sha256:c5, got sha256:31",),
    ),
    "text that is too long, and images": (
        (VLLM, f"ValueError: {CONTEXT}"),
        (VLLM, "ValueError: The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens."),
    ),
    "llama.cpp's limit with its figures, and without": (
        (PROGRAM, "srv    send_error: task id = 3, error: request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it"),
        (PROGRAM, "srv    send_error: task id = 3, error: the request exceeds the available context size, try increasing it"),
    ),
    "the port of the server, and one of its parts": (
        (VLLM, "$ vllm serve m --port 8000", TRACE, SOCKET, TAKEN),
        (VLLM, "$ vllm serve m --port 8000", TAKEN),
    ),
    "Ollama's own word, and Docker's": (
        ("Error: listen tcp 0.0.0.0:11434: bind: address already in use",),
        ("Error response from daemon: driver failed programming external connectivity: listen tcp 0.0.0.0:11434: bind: address already in use",),
    ),
    "a context that is there, and hardly any": ((KV.format(4096),), (KV.format(1136),)),
    "a share a little smaller, and one that may not hold the weights": ((FREE.format("20.11"),), (FREE.format("12.50"),)),
    "a length of the model, and of its window": (
        (VLLM, LONGER.format("max_position_embeddings=32768")),
        (VLLM, LONGER.format("sliding_window=4096")),
    ),
    "a length of the model, and one that somebody stretches": (
        (VLLM, LONGER.format("max_position_embeddings=32768")),
        (VLLM, "non-default args: {'model': 'm', 'hf_overrides': {'rope_scaling': {'factor': 4.0}}}", LONGER.format("max_position_embeddings=32768")),
    ),
    "a model that is not quantized, and one whose config is missing": (
        (VLLM, "$ vllm serve an/other --quantization awq", "ValueError: Cannot find the config file for awq"),
        (VLLM, "$ vllm serve an/other-AWQ --quantization awq", "ValueError: Cannot find the config file for awq"),
    ),
    "files of a method, and a method that converts": (
        (VLLM, "ValueError: Cannot find the config file for gptq"),
        (VLLM, "ValueError: Cannot find the config file for bitsandbytes"),
    ),
    "float16 for AWQ, and for a model that cannot": (
        (DTYPE.format("bfloat16", "awq", "float16"),),
        (DTYPE.format("float32", "awq", "float16"),),
    ),
    "float16, which any GPU has, and bfloat16": (
        (DTYPE.format("bfloat16", "awq", "float16"),),
        (DTYPE.format("float16", "mxfp4", "bfloat16"),),
    ),
    "a quantization of the model, and of its draft": (
        (VLLM, "ValueError: Quantization method specified in the model config (gptq) does not match the quantization method specified in the `quantization` argument (awq)."),
        (VLLM, DRAFTS.replace("'m'", "'m', 'quantization': 'awq'"), "ValueError: Quantization method specified in the model config (gptq) does not match the quantization method specified in the `quantization` argument (awq)."),
    ),
    "a flag that SGLang spells otherwise, and one that it has not": (
        ("launch_server.py: error: unrecognized arguments: --max_prefill_tokens 32768",),
        ("launch_server.py: error: unrecognized arguments: --enable_nothing 1",),
    ),
    "an engine that wrote the log, and one that is named in it": (
        ("ValueError: LoRA rank 32 is greater than max_lora_rank 16.",),
        ("with vLLM:", "torch.utils.data: DataLoader workers are out of shared memory. Please raise your shared memory limit."),
    ),
    "a rank that every release takes, and one of newer ones": (
        (VLLM, "ValueError: LoRA rank 64 is greater than max_lora_rank 16."),
        (VLLM, "ValueError: LoRA rank 128 is greater than max_lora_rank 16."),
    ),
    "a driver that ended it, and a warning of one": (
        (VLLM, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        (VLLM, "torch/cuda/__init__.py:118: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."),
    ),
    "an error, and a sentence of somebody who had several": (
        (HEADS.format(40, 3),),
        (f"When I set it to 2 it gives me another one, and with 3 `{HEADS.format(40, 3)}`",),
    ),
    "vLLM's own list of classes, and that of a program that loads weights into it": (
        (OLD_VLLM, CLASS),
        (OLD_VLLM, CLASS.replace("['Qwen3VLForConditionalGeneration']", "Qwen3VLForConditionalGeneration")),
    ),
    "KV that the engine has estimated, and KV of which a part may not grow": (
        (VLLM, GIB + " Based on the available memory, the estimated maximum model length is 16384."),
        (VLLM, GIB),
    ),
    "KV of a model that is known, and of one with windows": (
        (VLLM, "$ vllm serve Qwen/Qwen3-8B", GIB),
        (VLLM, "$ vllm serve google/gemma-3-27b-it", GIB),
    ),
    "a context that is served, and a pool that is smaller than it": (
        ("input (9000 tokens) is longer than the model's context length (8192)",),
        ("[2025-03-03 06:49:28 TP5] Input length (9000 tokens) exceeds the maximum allowed length (8192 tokens). Use a shorter input or enable --allow-auto-truncate.",),
    ),
    "a request that was refused, and a server that fell over it": (
        ("input (9000 tokens) is longer than the model's context length (8192)",),
        ("TypeError: '>' not supported between instances of 'NoneType' and 'int'", "input (9000 tokens) is longer than the model's context length (8192)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_the_same_words_are_high_only_where_they_leave_no_choice(pair: str) -> None:
    sure, neighbour = PAIRS[pair]
    assert [_first(*sure).confidence, _first(*neighbour).confidence] == ["high", "medium"]


def test_a_model_type_is_not_told_a_release_where_transformers_may_be_the_older_one() -> None:
    """A newer vLLM may be there already, with an older transformers next to it: upgrading it changes nothing."""
    found = _first("(EngineCore pid=1) starting", "ValueError: model type `gpt_oss` is not supported")
    assert found.fix is not None
    assert "vllm>=" not in (found.fix.command or "")
    assert found.confidence == "medium"


@pytest.mark.parametrize(("rank", "size"), [(4, "8"), (17, "32"), (48, "64"), (300, "320"), (512, "512"), (1024, None)])
def test_a_rank_is_told_the_size_that_vllm_takes(rank: int, size: str | None) -> None:
    fix = _first(VLLM, f"ValueError: LoRA rank {rank} is greater than max_lora_rank 2.").fix
    assert fix is not None
    assert fix.changes.get("--max-lora-rank") == size


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "ranks find each other is taken: 29500"),
        ("zmq.error.ZMQError: Address already in use", "engine's own processes speak over is taken"),
        ("ERROR:    [Errno 13] error while attempting to bind on address ('0.0.0.0', 80): permission denied", "does not allow port 80"),
        ("start: couldn't bind HTTP server socket, hostname: /tmp/x.sock", "The socket could not be opened"),
    ],
)  # fmt: skip
def test_a_port_or_socket_of_another_kind_is_named(line: str, what: str) -> None:
    found = _first(VLLM, line)
    assert what in found.what
    assert found.confidence == "medium"


def test_a_refused_request_of_a_server_that_died_is_not_told_for_sure() -> None:
    ready, refused = "INFO:     Application startup complete.", f"ValueError: {CONTEXT}"
    assert _first(VLLM, ready, refused).confidence == "high"
    died = diagnose_lines([VLLM, ready, refused, "Segmentation fault (core dumped)"], "log").findings
    assert [one.cause for one in died] == ["other", "context_length_exceeded_request"]
    assert [one.confidence for one in died] == ["low", "medium"]


def test_an_error_without_a_name_after_it_may_be_what_ended_the_server() -> None:
    apart = tuple(f"INFO 11-01 10:00:02 [loader.py:{at}] loading" for at in range(20))
    said = (VLLM, "ValueError: LoRA rank 64 is greater than max_lora_rank 16.", *apart)
    assert _first(*said).confidence == "high"
    assert _first(*said, "ERROR 11-01 10:00:09 [worker.py:9] the link to rank 3 is gone").confidence == "medium"


def test_causes_that_hold_many_kinds_lend_each_other_no_certainty() -> None:
    """An import that failed somewhere, and a fork: that one is sure says nothing of the other."""
    found = _first(VLLM, "ModuleNotFoundError: No module named 'seven'", f"(VllmWorkerProcess pid=88) {FORKED}")
    assert "seven" in found.what
    assert found.cause_confidence == "medium"


FIXES = {
    # The last line of the log: what its first fix rests on.
    "ValueError: As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template": "usual",
    "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.": "first_try",
    HEADS.format(25, 8): "first_try",
    "ValueError: LoRA rank 1024 is greater than max_lora_rank 16.": "usual",
}


@pytest.mark.parametrize("line", FIXES)
def test_a_fix_of_which_threads_tell_others_is_not_called_sure(line: str) -> None:
    found = _first(VLLM, "$ vllm serve an/other --tensor-parallel-size 8", line)
    assert found.fix is not None
    assert (found.fix.basis, found.confidence) == (FIXES[line], "medium")


def test_a_hub_that_refuses_is_not_told_as_a_missing_model_for_sure() -> None:
    absent = "OSError: an/other is not a local folder and is not a valid model identifier listed on the hub"
    refused = "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://hub.example/an/other"
    assert [_first(VLLM, line).cause_confidence for line in (absent, refused)] == ["high", "medium"]


def test_a_value_that_another_flag_took_is_not_told_as_flash_attention_for_sure() -> None:
    bare = "error while handling argument \"{}\": error: unknown value for {} '-ctk'"
    told = [_first(PROGRAM, bare.format(flag, flag)) for flag in ("-fa", "--numa")]
    assert [one.confidence for one in told] == ["high", "medium"]
