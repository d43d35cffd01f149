"""Whole logs that were read wrongly: what a server survived is not told as its end, nor its end as a good one."""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.doctor import diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis

START = (
    "(APIServer pid=7) INFO 01-10 10:00:00 [api_server.py:1839] vLLM API server version 0.11.0\n"
    "(APIServer pid=7) INFO 01-10 10:00:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-8B'}\n"
    "(EngineCore_0 pid=9) INFO 01-10 10:00:09 [gpu_model_runner.py:1953] Starting to load model Qwen/Qwen3-8B...\n"
)
CORE = "(EngineCore_0 pid=9) ERROR 01-10 10:01:00 [core.py:700] "
NO_BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the"
    " engine (this flag also controls CPU memory reservation on the CPU backend, despite its name)."
)


def _read(text: str) -> Diagnosis:
    return diagnose_lines(text.splitlines(), "log")


def test_kv_of_a_cpu_is_told_as_ram() -> None:
    cpu = "(Worker pid=36) INFO 08-18 02:57:12 [cpu_worker.py:235] Explicitly set (0.0/11.65) GiB for KV cache on node 0.\n"
    first = _read(START + cpu + CORE + NO_BLOCKS).findings[0]
    assert first.cause == "no_memory_for_kv_blocks"
    assert "RAM" in first.what
    assert "GPU" not in first.what
    assert first.fix is not None
    assert str(first.fix.command).startswith("VLLM_CPU_KVCACHE_SPACE=4 vllm serve Qwen/Qwen3-8B")


def test_newer_words_about_the_cpu_make_no_cpu_of_a_gpu() -> None:
    first = _read(START + CORE + NO_BLOCKS).findings[0]
    assert "of the GPU" in first.what


def test_no_number_of_gpus_is_made_of_a_share_that_the_log_does_not_tell() -> None:
    lines = (
        "INFO 12-07 23:25:20 [gpu_model_runner.py:2007] Model loading took 8.4890 GiB and 54.733318 seconds\n"
        "INFO 12-07 23:25:59 [gpu_worker.py:276] Available KV cache memory: -6.24 GiB\n"
        "ERROR 12-07 23:25:59 [core.py:700] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n"
    )
    unknown = _read(lines).findings[0].fix
    assert unknown is not None
    assert "--gpu-memory-utilization" in unknown.changes
    told = _read(START + lines).findings[0].fix
    assert told is not None
    assert told.changes == {"--tensor-parallel-size": "2"}  # The card holds the weights at least.


def test_what_runs_slower_is_not_told_before_what_it_died_of() -> None:
    slow = "(EngineCore_0 pid=9) INFO 01-10 10:00:20 [cuda.py:270] Using Triton backend on V1 engine.\n"
    first = _read(START + slow + CORE + "FrobnicationError: the frobs do not match").findings[0]
    assert "FrobnicationError" in first.what
    experts = _read(
        START + slow.replace("cuda.py:270] Using Triton backend on V1 engine.", "mxfp4.py:164] Using Triton backend")
    )
    assert [one.cause for one in experts.findings] in ([], ["not_ready_yet"])


def test_an_import_that_was_only_warned_of_is_not_the_end() -> None:
    warned = "(EngineCore_0 pid=9) WARNING 06-11 01:28:03 [import_utils.py:408] "
    text = (
        f"{START}{warned}Module vllm.third_party.deep_gemm was found but failed to import\n"
        f"{warned}ImportError: cannot import name '_C' from partially initialized module 'vllm.third_party.deep_gemm'\n"
        f"{warned}FrobnicationError: not here\n"
        f"{CORE}RuntimeError: Unsupported max_mma_kv: 0\n"
    )
    first = _read(text).findings[0]
    assert "max_mma_kv" in first.what
    assert first.confidence == "low"


def test_code_of_a_traceback_is_never_quoted_as_the_error() -> None:
    text = (
        f"{START}{CORE}EngineCore failed to start.\n"
        f"{CORE}    result = run_method(self.driver_worker, method)\n"
        f"{CORE}             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"{CORE}RuntimeError: cutlass_gemm_caller, Error Internal\n"
    )
    assert "the first error is: RuntimeError: cutlass" in _read(text).findings[0].what


def test_a_class_that_could_not_be_looked_into_is_no_bad_setting() -> None:
    text = (
        f"{START}(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=1)   Value error, Model architectures ['Gemma4ForConditionalGeneration'] failed to be inspected."
        " Please check the logs for more details. [type=value_error]\n"
    )
    assert [one.cause for one in _read(text).findings] == ["arch_unsupported"]


def test_what_sglang_makes_after_its_pool_lacks_what_the_share_left() -> None:
    text = (
        "[2026-06-11 05:11:58 TP1] Memory pool end. avail mem=0.49 GB\n"
        "[2026-06-11 05:11:58 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/srv/sglang/python/sglang/srt/layers/attention/flashinfer_backend.py", line 202, in __init__\n'
        "    global_workspace_buffer = torch.empty(\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 338.75 MiB is free. Including non-PyTorch memory, this process has 23.06 GiB memory in use. Of the allocated memory 22.33 GiB is allocated by PyTorch, and 210.78 MiB is reserved by PyTorch but unallocated.\n"
    )
    assert _read(text).findings[0].cause == "cuda_graph_capture_oom"


def test_an_engine_that_died_before_its_last_answer_is_not_well() -> None:
    text = (
        "(EngineCore_DP0 pid=275) ERROR 06-25 14:34:27 [core.py:1008] RuntimeError: the model was not executed\n"
        "(APIServer pid=41) ERROR 06-25 14:34:27 [async_llm.py:710] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
        '(APIServer pid=41) INFO:     172.17.0.1:42160 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        "(APIServer pid=41) INFO:     Shutting down\n"
        "(APIServer pid=41) INFO:     Application shutdown complete.\n"
    )
    found = _read(text)
    assert not found.healthy
    assert "the model was not executed" in found.findings[0].what


def test_words_of_compose_itself_are_no_failure_beside_a_server_that_serves(tmp_path: Path) -> None:
    served = 'ollama-1  | time=2026-05-31T11:13:33.151Z level=INFO source=routes.go:1864 msg="Listening on [::]:11434 (version 0.24.0)"\n'
    log = tmp_path / "compose.log"
    log.write_text("[+] up 6/6\nunexpected EOF\n" + f"{served}app-1     | INFO:     Waiting\n" * 12)
    assert not [one for one in diagnose([str(log)]).findings if one.cause == "corrupt_download"]


def test_buffers_of_a_step_are_not_told_as_the_kv_cache() -> None:
    text = (
        "deep-seek-1  | llama_kv_cache_init:      CUDA1 KV buffer size =  1005.79 MiB\n"
        "deep-seek-1  | ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9866.00 MiB on device 1: cudaMalloc failed: out of memory\n"
        "deep-seek-1  | ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 10345253120\n"
        "deep-seek-1  | llama_kv_cache_update_impl: failed to allocate compute buffers\n"
    )
    assert [one.cause for one in _read(text).findings] == ["activation_oom_runtime"]


@pytest.mark.parametrize(
    "line",
    [
        "llama-server: /src/llama-sampler.cpp:1094: void llama_sampler_dist_apply(llama_sampler*): Assertion `found' failed.",
        "llama_model_load: llama_model_load: unknown tensor '' in model file",
        "ollama.service: Main process exited, code=dumped, status=11/SEGV",
        "[2023-07-11 15:20:41,680 E 42067 42067] logging.cc:97: Unhandled exception: St13runtime_error. what(): NCCL Error 5: invalid usage",
        'time=2024-08-26T09:53:44.346Z level=ERROR source=sched.go:451 msg="error loading llama server" error="llama runner process has terminated: signal: terminated"',
    ],
)
def test_what_ended_a_program_is_never_passed_over(line: str) -> None:
    found = _read(line)
    assert not found.healthy
    assert found.findings


def test_a_model_that_ollama_does_not_know_stays_so_beside_one_that_it_loads() -> None:
    text = (
        'time=2026-04-27T00:25:42.261+06:00 level=INFO source=routes.go:1718 msg="Listening on 127.0.0.1:11435 (version 0.17.4)"\n'
        "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'gemma4'\n"
        'time=2026-04-27T00:31:20.073+06:00 level=INFO source=server.go:1376 msg="llama runner started in 3.10 seconds"\n'
        '[GIN] 2026/04/27 - 00:31:29 | 200 |    9.1207635s |       127.0.0.1 | POST     "/api/generate"\n'
    )
    assert "gemma4" in _read(text).findings[0].what


def test_an_argument_that_is_missing_is_not_told_as_one_too_many() -> None:
    [finding] = _read(
        "usage: vllm serve <model_tag> [options]\nvllm serve: error: the following arguments are required: model_tag"
    ).findings
    assert "lacks what this version requires: model_tag" in finding.what
    assert finding.fix is not None
    assert finding.fix.changes == {}


def test_a_gpu_that_is_too_old_is_not_sent_to_another_type() -> None:
    text = (
        f"{START}Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla P100-PCIE-16GB GPU has compute capability 6.0.\n"
        "RuntimeError: GPUs with compute capability below 7.0 are not supported.\n"
    )
    assert [one.cause for one in _read(text).findings] == ["kernel_image_missing"]


@pytest.mark.parametrize(
    "line",
    [
        " actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: abd4",
        "CRITICAL 02-25 11:11:34 launcher.py:101] MQLLMEngine is already dead, terminating server process",
        "Worker VllmWorkerProcess pid 4711 died, exit code: -15",
    ],
)
def test_words_of_a_death_are_never_passed_over(line: str) -> None:
    served = 'INFO:     172.27.0.4:60994 - "POST /v1/chat/completions HTTP/1.0" 200 OK\n'
    found = _read(START + served + line)
    assert not found.healthy
    assert found.findings


def test_a_slower_all_reduce_is_only_a_warning() -> None:
    warned = "[2025-11-01 16:50:36 TP1] Setup Custom allreduce failed with CUDART error: peer access is not supported between these two devices. To silence this warning, specify --disable-custom-all-reduce explicitly.\n"
    assert not [one for one in _read(warned).findings if one.cause == "gpu_topology"]


@pytest.mark.usefixtures("every_rule_proven")
def test_a_class_that_vllm_has_is_not_told_as_unknown() -> None:
    known = "ValueError: Model architectures ['LlamaForCausalLM'] are not supported for now."
    found = _read(
        START
        + "ERROR 10-26 11:35:32 registry.py:267] Error in inspecting model architecture 'LlamaForCausalLM'\n"
        + known
    )
    assert "install is broken" in found.findings[0].what
    assert found.findings[0].confidence != "high"
    new = _read(START + known.replace("Llama", "Newest")).findings[0]
    assert (new.cause, new.cause_confidence) == ("arch_unsupported", "high")


def test_small_weights_are_not_said_to_fill_a_gpu() -> None:
    text = (
        "INFO 03-10 08:07:20 [gpu_model_runner.py:1067] Model loading took 0.2389 GB and 0.977005 seconds\n"
        "ERROR 03-10 08:07:20 [core.py:302] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n"
    )
    first = _read(text).findings[0]
    assert "other processes" in first.what
    assert "0.90" not in first.what
    assert first.fix is not None
    assert str(first.fix.command).startswith("nvidia-smi")


def test_no_type_is_offered_that_the_message_rules_out() -> None:
    served = "vllm serve gaunernst/gemma-3-27b-it-int4-awq --dtype bfloat16\n"
    line = "Value error, torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16] [type=value_error]"
    gemma = _read(served + line).findings[0].fix
    assert gemma is not None
    assert gemma.changes == {}
    qwen = _read(served.replace("gaunernst/gemma-3-27b-it-int4-awq", "Qwen/Qwen3-8B-AWQ") + line).findings[0].fix
    assert qwen is not None
    assert qwen.changes == {"--dtype": "float16"}


@pytest.mark.parametrize(("needed", "has", "said"), [(80, 75, "pip install --upgrade vllm"), (75, 70, "GPTQ")])
def test_awq_is_not_offered_to_a_gpu_that_cannot_run_it(needed: int, has: int, said: str) -> None:
    fix = (
        _read(
            START
            + f"ValueError: The quantization method awq is not supported for the current GPU. Minimum capability: {needed}. Current capability: {has}."
        )
        .findings[0]
        .fix
    )
    assert fix is not None
    assert said in f"{fix.why} {fix.command}"
    assert has == 75 or "AWQ" not in fix.why


def test_ranks_of_several_nodes_are_not_cut_to_one() -> None:
    line = "AssertionError: local_world_size (16) must be less than or equal to the number of visible devices (8)."
    served = "vllm serve a/b --tensor-parallel-size 16"
    ray = _read(f"{served} --distributed-executor-backend ray\n{line}").findings[0]
    assert ray.confidence == "medium"
    assert ray.fix is not None
    assert ray.fix.changes == {}
    one = _read(f"{served}\n{line}").findings[0].fix
    assert one is not None
    assert one.changes == {"--tensor-parallel-size": "8"}


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Tensor parallel size (2) exceeds available GPUs (1)",
        "AssertionError: please ensure that world_size (2) is less than than max local gpu count (1)",
    ],
)
def test_more_ranks_than_gpus_is_known_in_every_wording(line: str) -> None:
    assert _read(START + line).findings[0].what == "2 GPUs were requested, and 1 are there."


def test_a_hub_that_cannot_be_reached_is_not_told_as_a_model_that_is_not_there() -> None:
    text = (
        "huggingface_hub.utils._errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub\n"
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files and it looks like a/b is not the path to a directory containing a file named config.json.\n"
    )
    assert "cannot be reached" in _read(START + text).findings[0].what


def test_kv_in_ram_that_is_refused_is_told_as_kv() -> None:
    text = (
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 137438953504\n"
        "llama_kv_cache_init: failed to allocate buffer for kv cache\n"
    )
    assert _read(text).findings[0].cause == "kv_cache_too_small_for_max_len"
    assert _read(text.splitlines()[0]).findings[0].cause == "host_ram_oom"


@pytest.mark.parametrize(
    ("model", "width", "said"),
    [
        ("/models/DeepSeek-R1-BF16", 576, "quantization_config"),
        ("/models/DeepSeek-R1", 576, "--tp 16"),
        ("/models/Qwen3.5-FP8", 8, "newer release"),
    ],
)
def test_a_smaller_split_is_offered_only_where_it_helps(model: str, width: int, said: str) -> None:
    served = f"python3 -m sglang.launch_server --model-path {model} --tp 32 --trust-remote-code\n"
    line = f"ValueError: Weight output_partition_size = {width} is not divisible by weight quantization block_n = 128."
    fix = _read(served + line).findings[0].fix
    assert fix is not None
    assert said in f"{fix.why} {fix.command}"


def test_a_flag_that_is_set_is_not_offered_again() -> None:
    line = "ValueError: The repository for a/b contains custom code which must be executed to correctly load the model. You can avoid this prompt in future by passing the argument `trust_remote_code=True`.\n"
    told = "engine.py :43 vLLM config: {'model': 'a/b', 'trust_remote_code': True, 'max_model_len': 32000}\n"
    assert _read(told + line).findings[0].confidence == "medium"
    plain = _read(START + line).findings[0]
    assert plain.fix is not None
    assert "--trust-remote-code" in plain.fix.changes


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ValueError: At most 1 image(s) may be provided in one request.", "bad_flag"),
        (
            "ValueError: 'max_tokens' or 'max_completion_tokens' is too large: 32000",
            "context_length_exceeded_request",
        ),
        ("ray.exceptions: Task was killed due to the node running low on memory.", "host_ram_oom"),
    ],
)
def test_a_known_message_does_not_end_as_not_known(line: str, cause: str) -> None:
    assert _read(START + f"ERROR 10-27 09:04:47 serving_chat.py:156] {line}\n").findings[0].cause == cause


def test_a_config_of_another_copy_is_not_told_as_a_flag() -> None:
    line = "ValueError: Quantization method specified in the model config (fp8) does not match the quantization method specified in the `quantization` argument (gguf)."
    found = _read(START + line).findings[0]
    assert "config.json" in found.what
    assert found.confidence == "medium"


SGLANG = "[2025-11-01 10:00:00] server_args=ServerArgs(model_path='a/b', tp_size=8)"
TOLD_OTHERWISE = {
    "tensors that do not broadcast are no damaged weights": (
        f"{START}RuntimeError: shape mismatch: value tensor of shape [5] cannot be broadcast to indexing result of shape [1]",
        "corrupt_download",
    ),
    "a version that was not read while importing is no mismatch": (
        f"{START}cannot import name '_version' from partially initialized module 'vllm' (most likely due to a circular import)"
        "\nRuntimeError: shape '[332, -1]' is invalid for input of size 89128960",
        "lacks what is called",
    ),
    "a rank that lost another is not one whose links fail": (
        f"{SGLANG}\nRuntimeError: NCCL error: remote process exited or there was a network error", "cannot reach each other",
    ),
    "a comment is no model": (
        "api_server.py: error: unrecognized arguments: # smaller here", "given as a word",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD_OTHERWISE)
def test_what_whole_logs_were_told_and_is_not_so(case: str) -> None:
    text, wrong = TOLD_OTHERWISE[case]
    first = diagnose_lines(text.split("\n"), "log").findings[0]
    assert first.cause != wrong
    assert wrong not in first.what


def test_a_comment_among_arguments_is_told_as_one() -> None:
    first = diagnose_lines(["api_server.py: error: unrecognized arguments: # smaller here"], "log").findings[0]
    assert first.what.startswith("A comment (#) is among the arguments")


def test_a_setting_that_is_refused_is_quoted() -> None:
    refused = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, This scheduler supports max_num_seqs 1 through 4 [type=value_error, input_value=ArgsKwargs(())]",
    )
    first = diagnose_lines([*START.splitlines(), *refused], "log").findings[0]
    assert first.what == "The settings are refused: This scheduler supports max_num_seqs 1 through 4."


def test_a_refused_context_with_commas_in_its_numbers_is_read() -> None:
    line = "input (691,793 tokens) is longer than the model's context length (540000)"
    first = diagnose_lines([SGLANG, line], "log").findings[0]
    assert (first.cause, "691,793" in first.what) == ("context_length_exceeded_request", True)


def test_who_runs_ollama_without_its_library_installs_it_again() -> None:
    first = diagnose_lines(
        [
            'time=2024-08-28T18:43:24.393Z level=INFO source=server.go:591 msg="waiting for llama runner"',
            "/tmp/r/ollama_llama_server: error while loading shared libraries: libllama.so: cannot open shared object file",
        ],
        "log",
    ).findings[0]
    assert first.fix is not None
    assert "ollama.com/install.sh" in (first.fix.command or "")


@pytest.mark.parametrize("version", ["0.11.0", "0.14.0"])
def test_a_backend_that_does_not_run_the_model_is_taken_away(version: str) -> None:
    lines = [
        f"INFO 01-10 10:00:00 [api_server.py:1839] vLLM API server version {version}",
        "INFO 01-10 10:00:00 [utils.py:233] non-default args: {'model': 'a/b', 'attention_backend': 'flashinfer'}",
        "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['head size']",
    ]
    fix = diagnose_lines(lines, "log").findings[0].fix
    assert fix is not None
    assert fix.changes == {"--attention-backend": None}
    assert "flashinfer" not in (fix.command or "flashinfer")
