"""What the figures of a log say of memory, and what is worked out from them: shaped after logs of public threads, with
names and numbers of our own.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple

import pytest

from holdfast.doctor.diagnosis.diagnose import diagnose_lines


class Told(NamedTuple):
    text: str
    cause: str
    phase: str
    confidence: str
    changes: dict[str, str | None]
    """Of the fix."""


ROUTER = '2025-02-11T09:14:44.6Z ERROR warmup{{max_input_length={} max_prefill_tokens={}}}:warmup: text_generation_client: router/client/src/lib.rs:33: Server error: {}\nError: Warmup(Generation("{}"))\n'
OUT = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 22.06 GiB of which {} GiB is free. Process 4242 has 20.85 GiB memory in use. Of the allocated memory 20.10 GiB is allocated by PyTorch, and 310.00 MiB is reserved by PyTorch but unallocated."
LAUNCHED = '2025-02-11T09:14:02.0Z  INFO text_generation_launcher: Args {{ model_id: "q/w", num_shard: {}, max_input_length: {}, max_total_tokens: {}, max_batch_prefill_tokens: {}, port: 80 }}\n'
SHARDED = "2025-02-11T09:14:03.0Z  INFO text_generation_launcher: Sharding model on 2 processes\n"

TGI = {
    "the traceback of the server": Told(
        LAUNCHED.format("Some(2)", 8000, 8192, 32768)
        + "2025-02-11T09:14:08.1Z  INFO shard-manager: text_generation_launcher: Waiting for shard to be ready... rank=0\n2025-02-11T09:14:44.5Z ERROR text_generation_launcher: Method Warmup encountered an error.\nTraceback (most recent call last):\n  File \"/usr/src/server/text_generation_server/models/flash_causal_lm.py\", line 753, in warmup\n    _, batch = self.generate_token(batch)\n  File \"/usr/src/server/text_generation_server/utils/layers.py\", line 90, in forward\n    return F.linear(input, self.weight)\ntorch.cuda.OutOfMemoryError: " + OUT.format("3.50", "1.20"),
        "activation_oom_runtime", "warmup", "medium", {"--max-batch-prefill-tokens": "8192"},
    ),
    "the router's line alone, while shards are waited for": Told(
        SHARDED + "2025-02-11T09:14:08.1Z  INFO shard-manager: text_generation_launcher: Waiting for shard to be ready... rank=0\n" + ROUTER.format(4000, 4096, OUT.format("1.20", "0.90"), OUT.format("1.20", "0.90")),
        "activation_oom_runtime", "warmup", "medium", {"--max-batch-prefill-tokens": "2048", "--max-input-tokens": "2048"},
    ),
    "so few tokens that it is not the step": Told(
        SHARDED + ROUTER.format(64, 256, OUT.format("0.20", "0.10"), OUT.format("0.20", "0.10")),
        "activation_oom_runtime", "warmup", "medium", {"--num-shard": "4"},
    ),
    "the limit of a fraction, in the oldest words": Told(
        LAUNCHED.format("None", 1024, 2048, 4096) + "thread 'main' panicked at 'Unable to warmup model: Generation(\"Allocation on device 0 would exceed allowed memory. (out of memory)\\nCurrently allocated     : 16.10 GiB\\nRequested               : 4.80 GiB\\nDevice limit            : 22.20 GiB\\nFree (according to CUDA): 2.50 GiB\")', router/src/main.rs:216:18",
        "activation_oom_runtime", "warmup", "medium", {"--max-batch-prefill-tokens": "2048"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TGI)
def test_a_warm_up_of_tgi_that_runs_out_is_its_step(case: str) -> None:
    told = TGI[case]
    found = diagnose_lines(told.text.split("\n"), "log")
    first = found.findings[0]
    assert (first.cause, found.phase, first.confidence) == (told.cause, told.phase, told.confidence)
    assert first.fix is not None
    assert first.fix.changes == told.changes


LLAMA = "$ llama-server -m /m/x.gguf {}\nbuild: 6500 (abcdef12) with cc (Ubuntu) for x86_64-linux-gnu\n{}srv    load_model: loading model '/m/x.gguf'\n"
DEVICE = "llama_model_load_from_file_impl: using device CUDA{} (NVIDIA GeForce RTX 3090) (0000:01:00.0) - {} MiB free\n"
SHAPE = "print_info: n_layer          = 80\nprint_info: n_embd_k_gqa     = 1024\nprint_info: n_embd_v_gqa     = 1024\n"
REFUSED = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {} MiB on device {}: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA{} buffer of size 41921523712\nllama_model_load: error loading model: unable to allocate CUDA{} buffer\n"
STEP = "load_tensors: offloaded 33/33 layers to GPU\nload_tensors:        CUDA0 model buffer size =  7605.33 MiB\nllama_context: n_ctx         = 512\nllama_kv_cache:      CUDA0 KV buffer size =  2048.00 MiB\nggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 2516582400\ngraph_reserve: failed to allocate compute buffers\n"
PROJECTED = "llama_params_fit_impl: projected to use 34500 MiB of device memory vs. 21800 MiB of free device memory\nllama_params_fit: failed to fit params to free device memory: n_gpu_layers already set by user to 99, abort\n"
LAYERS = {
    "weights, with the KV of 8192 tokens": (LLAMA.format("-ngl 99 -c 8192", DEVICE.format(0, 23800)) + SHAPE + REFUSED.format("39979.48", 0, 0, 0), "44"),
    "weights alone, where the context is not told": (LLAMA.format("-ngl 99", DEVICE.format(0, 23800)) + SHAPE + REFUSED.format("39979.48", 0, 0, 0), "46"),
    "as many as were asked for, and not all": (LLAMA.format("-ngl 20", DEVICE.format(0, 7000)) + SHAPE + REFUSED.format("9870.00", 0, 0, 0), "12"),
    "the device that was too small of two": (LLAMA.format("-ngl 99 -ts 1,1", DEVICE.format(0, 23800) + DEVICE.format(1, 11700)) + SHAPE + REFUSED.format("19800.00", 1, 1, 1), "45"),
    "what llama.cpp projected": (LLAMA.format("-ngl 99", PROJECTED) + SHAPE + REFUSED.format("15814.99", 0, 0, 0), "48"),
    "no device holds even one": (LLAMA.format("-ngl 99", DEVICE.format(0, 700)) + SHAPE + REFUSED.format("39979.48", 0, 0, 0), "0"),
    "buffers of a step beside weights and KV": (LLAMA.format("-ngl 99 -c 512", DEVICE.format(0, 11756)) + STEP, "31"),
    "nothing is told of what is free": (LLAMA.format("-ngl 20", "") + SHAPE + REFUSED.format("15814.99", 0, 0, 0), "15"),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_the_layers_that_a_gpu_holds_are_reckoned(case: str) -> None:
    text, layers = LAYERS[case]
    first = diagnose_lines(text.split("\n"), "log").findings[0]
    every = [fix for fix in (first.fix, *first.alternatives) if fix is not None]
    fix = next(one for one in every if "--n-gpu-layers" in one.changes)
    assert fix.changes == {"--n-gpu-layers": layers}
    assert f"-ngl {layers}" in (fix.command or "")
    first_try = "as a first try" in fix.why
    assert first_try == case.startswith("nothing")


VLLM = "INFO 10-01 10:00:00 [api_server.py:1839] vLLM API server version 0.11.0\nINFO 10-01 10:00:00 [utils.py:233] non-default args: {{'model': 'q/w', 'gpu_memory_utilization': {}}}\n"
LOADED = "INFO 10-01 10:00:20 [gpu_model_runner.py:2653] Model loading took {} GiB and 9.8 seconds\n"
SHORT = "INFO 10-01 10:00:31 [gpu_worker.py:298] Available KV cache memory: -{} GiB\n"
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
OLD = "INFO 02-26 09:54:05 worker.py:267] the current vLLM instance can use total_gpu_memory ({}GiB) x gpu_memory_utilization ({}) = 5.60GiB\nINFO 02-26 09:54:05 worker.py:267] model weights take 5.20GiB; non_torch_memory takes 0.03GiB; PyTorch activation peak memory takes 1.42GiB; the rest of the memory reserved for KV Cache is -{}GiB.\n"
SGLANG = "[2025-07-02 07:40:58] server_args=ServerArgs(model_path='q/w', tp_size=1, mem_fraction_static={})\n[2025-07-02 07:41:50 TP0] Load weight begin. avail mem=78.60 GB\n[2025-07-02 07:41:58 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem={} GB, mem usage={} GB.\n{}"
NO_POOL = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
SHARES = {
    "weights of more than the card, by what is missing": (VLLM.format(0.8) + LOADED.format("131.42") + SHORT.format("70.10") + NO_BLOCKS, {"--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.9"}),
    "weights of more than the card, by its name": (VLLM.format(0.8) + "GPU 0: NVIDIA H100 80GB HBM3\n" + LOADED.format("131.42") + NO_BLOCKS, {"--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.9"}),
    "a share that was meant to be small": (VLLM.format(0.3) + LOADED.format("7.16") + SHORT.format("3.10") + NO_BLOCKS, {"--gpu-memory-utilization": "0.9"}),
    "a share that is nearly enough": (VLLM.format(0.9) + LOADED.format("20.10") + SHORT.format("0.30") + NO_BLOCKS, {"--gpu-memory-utilization": "0.95"}),
    "more than any share gives": (VLLM.format(0.9) + LOADED.format("21.80") + SHORT.format("3.30") + NO_BLOCKS, {"--tensor-parallel-size": "2"}),
    "the sums of older releases": (OLD.format("8.00", "0.70", "1.05") + NO_BLOCKS, {"--gpu-memory-utilization": "0.9"}),
    "a step that is most of what is missing": (OLD.format("8.00", "0.92", "0.70") + NO_BLOCKS, {"--gpu-memory-utilization": "0.95", "--max-num-batched-tokens": "2048", "--enforce-eager": ""}),
    "SGLang's, by what is free before and after the weights": (SGLANG.format(0.8, "10.73", "67.87", NO_POOL), {"--mem-fraction-static": "0.89"}),
    "SGLang's, where the share that was refused should have been enough by the sums": (SGLANG.format(0.75, "20.73", "57.87", NO_POOL), {"--mem-fraction-static": "0.78"}),
    "SGLang's, with the share in the message alone": ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.6.", {"--mem-fraction-static": "0.66"}),
    "SGLang's, that no share gives": (SGLANG.format(0.8, "1.73", "76.87", "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8."), {"--tp": "2"}),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_the_share_that_leaves_room_for_kv_is_reckoned(case: str) -> None:
    text, changes = SHARES[case]
    first = diagnose_lines(text.split("\n"), "log").findings[0]
    assert first.cause == "no_memory_for_kv_blocks"
    assert first.fix is not None
    assert first.fix.changes == changes


@pytest.mark.parametrize(
    ("context", "changes", "planned"),
    [
        ("None", {"--mem-fraction-static": "0.87"}, "planned: 131.42 GiB of weights fit 4 GPUs of 78.60 GiB each"),
        ("131072", {"--tp": "4"}, "planned: 131.42 GiB of weights fit 4 GPUs of 78.60 GiB each"),
    ],
)
def test_what_is_offered_for_sglang_is_planned_as_it_divides_a_gpu(
    context: str, changes: dict[str, str], planned: str
) -> None:
    text = SGLANG.format(0.8, "12.73", "65.87", NO_POOL).replace(
        "'q/w', tp_size=1", f"'meta-llama/Llama-3.1-70B-Instruct', tp_size=2, context_length={context}"
    )
    first = diagnose_lines(text.split("\n"), "log").findings[0]
    assert first.fix is not None
    assert first.fix.changes == changes
    assert planned in " ".join(fix.why for fix in (first.fix, *first.alternatives))


STARTED = "[2025-07-02 07:40:58] server_args=ServerArgs(model_path='q/w', tp_size={}, chunked_prefill_size={}, cuda_graph_max_bs={}, page_size=1)\n"


@pytest.mark.parametrize(
    ("ranks", "chunk", "batch", "written"),
    [
        (1, 2048, 256, " --chunked-prefill-size 2048 --cuda-graph-max-bs 256"),
        (1, 8192, 32, " --chunked-prefill-size 8192 --cuda-graph-max-bs 32"),
        (1, 8192, 256, ""),
        (4, 8192, 512, " --tensor-parallel-size 4"),
        (4, 8192, 256, " --tensor-parallel-size 4 --chunked-prefill-size 8192 --cuda-graph-max-bs 256"),
    ],
)
def test_sglang_s_steps_are_kept_unless_they_are_its_own_choice(
    ranks: int, chunk: int, batch: int, written: str
) -> None:
    text = STARTED.format(ranks, chunk, batch) + NO_POOL
    command = diagnose_lines(text.split("\n"), "log").command
    assert command == f"python -m sglang.launch_server --model-path q/w{written}"


@pytest.mark.parametrize(("batch", "smaller"), [(160, "64"), (32, "16")])
def test_graphs_are_made_fewer_and_never_more(batch: int, smaller: str) -> None:
    failed = f"Exception: Capture cuda graph failed: {OUT.format('0.32', '0.21')}"
    first = diagnose_lines([*STARTED.format(1, 2048, batch).split("\n"), failed], "log").findings[0]
    every = [fix.changes for fix in (first.fix, *first.alternatives) if fix is not None]
    assert {"--cuda-graph-max-bs": smaller} in every


@pytest.mark.parametrize("digits", [20, 400])
def test_a_context_of_absurd_length_is_only_words(digits: int) -> None:
    length = "9" * digits
    text = f"{VLLM.format(0.9)}INFO args: Namespace(model='Qwen/Qwen2.5-7B-Instruct', max_model_len={length})\n{NO_BLOCKS}\nValueError: To serve at least one request with the models's max seq len ({length}), (8.00 GiB KV cache is needed, which is larger than the available KV cache memory (3.10 GiB)."
    found = diagnose_lines(text.split("\n"), "log")
    assert {one.cause for one in found.findings} == {"no_memory_for_kv_blocks", "kv_cache_too_small_for_max_len"}
    assert "inf" not in " ".join(one.what for one in found.findings)


def test_a_pool_that_cannot_be_allocated_is_told_apart_from_the_profile_run() -> None:
    frames = ("line 6756, in initialize_kv_cache_tensors", "line 6537, in _allocate_kv_cache_tensors")
    text = "Traceback (most recent call last):\n" + "".join(
        f'  File "/venv/vllm/v1/worker/gpu_model_runner.py", {frame}\n    make()\n' for frame in frames
    )
    out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.50 GiB of which 0.20 GiB is free. Including non-PyTorch memory, this process has 23.30 GiB memory in use. Of the allocated memory 22.60 GiB is allocated by PyTorch, and 0.20 GiB is reserved by PyTorch but unallocated."
    [finding] = diagnose_lines((text + out).splitlines(), "log").findings
    assert finding.cause == "utilization_too_high"
    assert finding.what.startswith("The KV cache itself could not be allocated")
