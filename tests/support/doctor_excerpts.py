"""Excerpts of logs in the engines' own formats, written for the doctor's tests, with what is the matter in each."""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Excerpt(NamedTuple):
    cause: str
    """`none`: healthy; `unknown`: nothing can be said."""
    phase: str | None
    engine: str | None
    text: str


EXCERPTS: list[Excerpt] = []


def excerpt(cause: str, phase: str | None, engine: str | None, text: str) -> None:
    EXCERPTS.append(Excerpt(cause, phase, engine, text))


HEADER = "INFO 01-10 10:00:0{} [api_server.py:1034] vLLM API server version 0.{}\nINFO 01-10 10:00:01 [utils.py:233] non-default args: {}\n"
LOADING = (
    HEADER.format(
        0,
        "11.0",
        "{'model_tag': 'Qwen/Qwen3-8B', 'model': 'Qwen/Qwen3-8B', 'max_model_len': 40960, 'gpu_memory_utilization': 0.95}",
    )
    + "(EngineCore_DP0 pid=88) INFO 01-10 10:00:09 [core.py:77] Initializing a LOADING LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B', speculative_config=None, dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=1\n(EngineCore_DP0 pid=88) INFO 01-10 10:00:10 [gpu_model_runner.py:2602] Starting to load model Qwen/Qwen3-8B...\n"
)
LOADED = "(EngineCore_DP0 pid=88) INFO 01-10 10:00:20 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 9.8 seconds\n"
PROFILED = (
    LOADED
    + "(EngineCore_DP0 pid=88) INFO 01-10 10:00:30 [monitor.py:34] torch.compile takes 12.0 s in total\n(EngineCore_DP0 pid=88) INFO 01-10 10:00:31 [gpu_worker.py:298] Available KV cache memory: 5.10 GiB\n(EngineCore_DP0 pid=88) INFO 01-10 10:00:31 [kv_cache_utils.py:1087] GPU KV cache size: 37,136 tokens\n"
)
CAPTURING = (
    PROFILED
    + "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|####      | 27/67 [00:02<00:03, 12.1it/s]\n"
)
READY = (
    PROFILED
    + "(EngineCore_DP0 pid=88) INFO 01-10 10:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 6 secs, took 0.61 GiB\n(APIServer pid=7) INFO:     Started server process [7]\n(APIServer pid=7) INFO:     Application startup complete.\n"
)


def out_of_memory(
    tried="512.00 MiB",
    total="23.65 GiB",
    free="90.00 MiB",
    this="23.55 GiB",
    alloc="22.80 GiB",
    res="120.00 MiB",
    pre="(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] ",
):
    return f"{pre}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} of which {free} is free. Including non-PyTorch memory, this process has {this} memory in use. Of the allocated memory {alloc} is allocated by PyTorch, and {res} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"


def trace(*frames, pre="(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] "):
    return (
        pre
        + "Traceback (most recent call last):\n"
        + "".join(
            f'{pre}  File "/venv/lib/python3.12/site-packages/vllm/v1/{f}", line 10, in {n}\n{pre}    x = y()\n'
            for f, n in frames
        )
    )


WRAPPER = (
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
excerpt(
    "weights_do_not_fit",
    "load",
    "vllm",
    LOADING
    + trace(("worker/gpu_worker.py", "load_model"), ("worker/gpu_model_runner.py", "load_model"))
    + out_of_memory()
    + WRAPPER,
)
excerpt(
    "cuda_graph_capture_oom",
    "capture",
    "vllm",
    LOADING
    + CAPTURING
    + trace(
        ("engine/core/loop.py", "_initialize_kv_caches"),
        ("worker/gpu_worker.py", "compile_or_warm_up_model"),
        ("worker/gpu_model_runner.py", "capture_model"),
        ("worker/gpu_model_runner.py", "_dummy_run"),
    )
    + out_of_memory()
    + WRAPPER,
)
excerpt(
    "activation_oom_runtime",
    "serve",
    "vllm",
    LOADING
    + READY
    + trace(
        ("engine/core/loop.py", "run_busy_loop"),
        ("engine/core/loop.py", "_process_engine_step"),
        ("worker/gpu_model_runner.py", "execute_model"),
    )
    + out_of_memory(tried="1.20 GiB")
    + "(APIServer pid=7) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n",
)
excerpt(
    "prompt_logprobs_oom",
    "serve",
    "vllm",
    LOADING
    + READY
    + trace(("engine/core/loop.py", "run_busy_loop"), ("worker/gpu_model_runner.py", "_get_prompt_logprobs_dict"))
    + out_of_memory(tried="4.60 GiB"),
)
excerpt(
    "sampler_warmup_oom",
    "warmup",
    "vllm",
    LOADING
    + PROFILED
    + trace(("worker/gpu_worker.py", "compile_or_warm_up_model"), ("worker/gpu_model_runner.py", "_dummy_sampler_run"))
    + "(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\n"
    + WRAPPER,
)
excerpt(
    "fragmentation",
    "serve",
    "vllm",
    LOADING
    + READY
    + trace(("engine/core/loop.py", "run_busy_loop"))
    + out_of_memory(tried="1.00 GiB", alloc="18.00 GiB", res="4.90 GiB"),
)
excerpt(
    "other_process_on_gpu",
    "load",
    "vllm",
    LOADING + trace(("worker/gpu_model_runner.py", "load_model")) + out_of_memory(this="9.10 GiB", alloc="8.70 GiB"),
)
excerpt(
    "slow_attention_backend",
    "serve",
    "vllm",
    LOADING + READY + trace(("engine/core/loop.py", "run_busy_loop")) + out_of_memory(tried="1029.51 GiB"),
)
excerpt(
    "lora_memory",
    "load",
    "vllm",
    LOADING
    + trace(("worker/gpu_model_runner.py", "load_model")).replace("vllm/v1/worker/gpu_model_runner", "vllm/lora/layers")
    + out_of_memory(),
)
excerpt(
    "multimodal_profiling_oom",
    "profile",
    "vllm",
    LOADING
    + LOADED
    + "(EngineCore_DP0 pid=88) INFO 01-10 10:00:22 [gpu_model_runner.py:3000] Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 video items of the maximum feature size.\n"
    + trace(
        ("worker/gpu_worker.py", "determine_available_memory"),
        ("worker/gpu_model_runner.py", "profile_run"),
        ("models/qwen2_vl.py", "embed_multimodal"),
    )
    + out_of_memory(tried="8.00 GiB", alloc="16.00 GiB", this="17.00 GiB", free="6.40 GiB"),
)
excerpt(
    "kv_cache_too_small_for_max_len",
    "profile",
    "vllm",
    "vllm-1  | "
    + LOADING.replace("\n", "\nvllm-1  | ")
    + PROFILED.replace("\n", "\nvllm-1  | ")
    + "(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (5.10 GiB). Based on the available memory, the estimated maximum model length is 37120. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\nvllm-1  | "
    + WRAPPER,
)
excerpt(
    "no_memory_for_kv_blocks",
    "profile",
    "vllm",
    "Jan 10 10:00:00 gpu01 vllm[88]: INFO 01-10 10:00:00 [gpu_worker.py:276] Available KV cache memory: -1.20 GiB\nJan 10 10:00:00 gpu01 vllm[88]: ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\nJan 10 10:00:01 gpu01 systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE\n",
)
excerpt(
    "host_ram_oom",
    "load",
    "vllm",
    "[pod/llm-0/vllm] "
    + LOADING.replace("\n", "\n[pod/llm-0/vllm] ")
    + "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:10<00:30, 10.1s/it]\n    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
)
excerpt(
    "shm_too_small",
    "load",
    "vllm",
    LOADING
    + "(VllmWorker rank=1 pid=99) ERROR 01-10 10:01:00 [multiproc_executor.py:559] torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error, NCCL version 2.21.5\n(VllmWorker rank=1 pid=99) ERROR 01-10 10:01:00 [multiproc_executor.py:559] Error while creating shared memory segment /dev/shm/nccl-Xa4Vq1 (size 9637888)\n",
)
excerpt(
    "dtype_unsupported_gpu",
    "load",
    "vllm",
    LOADING
    + "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: --dtype=half.\n"
    + WRAPPER,
)
excerpt(
    "driver_too_old",
    "load",
    "vllm",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11070). Please update your GPU driver by downloading and installing a new version from the URL\nRuntimeError: Engine process failed to start. See stack trace for the root cause.\n",
)
excerpt(
    "heads_not_divisible",
    "args",
    "vllm",
    HEADER.format(0, "9.1", "{'model': 'Qwen/Qwen2.5-7B-Instruct', 'tensor_parallel_size': 8}")
    + "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, Total number of attention heads (28) must be divisible by tensor parallel size (8). [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n",
)
excerpt(
    "tensor_parallel_mismatch",
    "args",
    "vllm",
    HEADER.format(0, "9.1", "{'model': 'a/b', 'tensor_parallel_size': 4}")
    + "ValueError: World size (4) is larger than the number of available GPUs (2) in this node. If this is intentional and you are using:\n",
)
excerpt(
    "quant_shape_mismatch",
    "load",
    "vllm",
    LOADING
    + trace(("worker/gpu_model_runner.py", "load_model"))
    + "(EngineCore_DP0 pid=88) ERROR 01-10 10:01:00 [core.py:708] ValueError: Weight input_size_per_partition = 6912 is not divisible by min_thread_k = 128. Consider reducing tensor_parallel_size or running with --quantization gptq.\n"
    + WRAPPER,
)
excerpt(
    "arch_unsupported",
    "args",
    "vllm",
    HEADER.format(0, "6.3", "{'model': 'new/Model-9B'}")
    + "ValueError: Model architectures ['Qwen9ForCausalLM'] are not supported for now. Supported architectures: dict_keys(['AquilaModel'])\n",
)
excerpt(
    "gated_or_missing_model",
    "download",
    None,
    "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-ab)\n\nCannot access gated repo for url https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json.\nOSError: You are trying to access a gated repo.\n",
)
excerpt(
    "bad_flag",
    "args",
    "vllm",
    "usage: vllm serve [model_tag] [options]\nvllm: error: unrecognized arguments: --max-model-length 4096\n",
)
excerpt(
    "other",
    "args",
    "vllm",
    "Traceback (most recent call last):\n  File \"/venv/bin/vllm\", line 5, in <module>\n    from vllm.entrypoints.cli.main import main\nModuleNotFoundError: No module named 'vllm._C'\n",
)
excerpt(
    "timeout_or_hang",
    "serve",
    "vllm",
    LOADING
    + READY
    + "(VllmWorker rank=0 pid=9) INFO 01-10 11:00:00 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 second.\n"
    * 5,
)
excerpt(
    "preemption_thrash",
    "serve",
    "vllm",
    LOADING
    + READY
    + "".join(
        f"(APIServer pid=7) INFO 01-10 11:0{i}:00 [loggers.py:123] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 90.0 tokens/s, Running: 40 reqs, Waiting: {60 + i} reqs, GPU KV cache usage: 99.{i}%, Prefix cache hit rate: 1.0%\n"
        for i in range(9)
    ),
)
excerpt(
    "none",
    "serve",
    "vllm",
    LOADING + READY + '(APIServer pid=7) INFO:     10.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 3,
)
# SGLang
SGLANG = "[2025-06-01 10:00:00] server_args=ServerArgs(model_path='Qwen/Qwen2.5-32B-Instruct', tokenizer_path='Qwen/Qwen2.5-32B-Instruct', tp_size=2, mem_fraction_static=0.7, context_length=None, port=30000)\n[2025-06-01 10:00:05 TP0] Load weight begin. avail mem=78.60 GB\n"
SGLANG_LOADED = "[2025-06-01 10:01:00 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem=47.90 GB, mem usage=30.70 GB.\n"


def sglang_trace(*fr):
    return "[2025-06-01 10:02:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n" + "".join(
        f'  File "/sgl-workspace/sglang/python/sglang/srt/{f}", line 3, in {n}\n    go()\n' for f, n in fr
    )


excerpt(
    "no_memory_for_kv_blocks",
    "profile",
    "sglang",
    SGLANG
    + SGLANG_LOADED
    + sglang_trace(
        ("managers/scheduler.py", "run_scheduler_process"), ("model_executor/model_runner.py", "init_memory_pool")
    )
    + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n\n[2025-06-01 10:02:01] Received sigquit from a child process. It usually means the child failed.\n",
)
excerpt(
    "cuda_graph_capture_oom",
    "capture",
    "sglang",
    SGLANG
    + SGLANG_LOADED
    + "[2025-06-01 10:01:10 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=2.10 GB\n"
    + sglang_trace(
        ("model_executor/model_runner.py", "init_cuda_graphs"), ("model_executor/cuda_graph_runner.py", "capture")
    )
    + out_of_memory(pre="", total="79.10 GiB", this="78.90 GiB", alloc="77.00 GiB")
    + "Possible solutions:\n1. set --mem-fraction-static to a smaller value\n",
)
excerpt(
    "activation_oom_runtime",
    "serve",
    "sglang",
    SGLANG
    + SGLANG_LOADED
    + "[2025-06-01 10:03:00] The server is fired up and ready to roll!\n[2025-06-01 10:05:00 TP0] Prefill batch. #new-seq: 3, #new-token: 8192, #cached-token: 0, token usage: 0.20, #running-req: 3, #queue-req: 0\n"
    + sglang_trace(
        ("managers/scheduler.py", "event_loop_overlap"), ("model_executor/model_runner.py", "forward_extend")
    )
    + out_of_memory(pre="", tried="3.20 GiB", total="79.10 GiB", this="78.90 GiB", alloc="76.00 GiB"),
)
excerpt(
    "weights_do_not_fit",
    "load",
    "sglang",
    SGLANG
    + sglang_trace(("model_executor/model_runner.py", "load_model"), ("model_loader/loader.py", "_initialize_model"))
    + out_of_memory(pre="", total="39.40 GiB", this="39.30 GiB", alloc="38.90 GiB"),
)
excerpt(
    "none",
    "serve",
    "sglang",
    SGLANG
    + SGLANG_LOADED
    + "[2025-06-01 10:03:00] INFO:     Application startup complete.\n[2025-06-01 10:03:00] The server is fired up and ready to roll!\n[2025-06-01 10:05:00 TP0] Decode batch. #running-req: 3, #token: 1200, token usage: 0.02, cuda graph: True, gen throughput (token/s): 320.11, #queue-req: 0,\n",
)
# llama.cpp
LLAMA = "build: 6500 (abcdef12) with cc (GCC) 13 for x86_64-linux-gnu\nggml_cuda_init: found 1 CUDA devices:\n  Device 0: NVIDIA GeForce RTX 4070, compute capability 8.9, VMM: yes\nsrv    load_model: loading model '/m/q.gguf'\nllama_model_loader: loaded meta data with 30 key-value pairs and 579 tensors from /m/q.gguf (version GGUF V3 (latest))\nprint_info: n_layer          = 48\nprint_info: file size   = 18.48 GiB (4.87 BPW)\nload_tensors: loading model tensors, this can take a while... (mmap = true)\n"
LLAMA_CONTEXT = (
    LLAMA
    + "load_tensors: offloaded 49/49 layers to GPU\nllama_context: n_ctx         = 131072\nllama_context: n_batch       = 2048\n"
)
excerpt(
    "weights_do_not_fit",
    "load",
    "llama.cpp",
    LLAMA
    + "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 18508.35 MiB on device 0: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 19407413248\nllama_model_load: error loading model: unable to allocate CUDA0 buffer\nllama_model_load_from_file_impl: failed to load model\ncommon_init_from_params: failed to load model '/m/q.gguf'\nsrv    load_model: failed to load model, '/m/q.gguf'\nmain: exiting due to model loading error\n",
)
excerpt(
    "kv_cache_too_small_for_max_len",
    "load",
    "llama.cpp",
    LLAMA_CONTEXT
    + "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 24576.00 MiB on device 0: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 25769803776\nllama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\ncommon_init_from_params: failed to create context with model '/m/q.gguf'\nmain: exiting due to model loading error\n",
)
excerpt(
    "activation_oom_runtime",
    "load",
    "llama.cpp",
    LLAMA_CONTEXT
    + "llama_kv_cache:      CUDA0 KV buffer size =  3072.00 MiB\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 8448.00 MiB on device 0: cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 8858370048\ngraph_reserve: failed to allocate compute buffers\nllama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers\n",
)
excerpt(
    "arch_unsupported",
    "load",
    "llama.cpp",
    LLAMA
    + "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'qwen9'\nllama_model_load_from_file_impl: failed to load model\n",
)
excerpt(
    "gated_or_missing_model",
    "load",
    "llama.cpp",
    "build: 6500 (abcdef12) with cc\nsrv    load_model: loading model '/m/none.gguf'\ngguf_init_from_file: failed to open GGUF file '/m/none.gguf'\nllama_model_load: error loading model: llama_model_loader: failed to load model from /m/none.gguf\nmain: exiting due to model loading error\n",
)
excerpt(
    "none",
    "serve",
    "llama.cpp",
    LLAMA_CONTEXT
    + "llama_kv_cache:      CUDA0 KV buffer size =  3072.00 MiB\ncommon_init_from_params: warming up the model with an empty run - please wait ... (--no-warmup to disable)\nmain: server is listening on http://127.0.0.1:8080 - starting the main loop\nsrv  update_slots: all slots are idle\n",
)
excerpt(
    "other",
    "serve",
    "llama.cpp",
    "main: server is listening on http://127.0.0.1:8080 - starting the main loop\nsrv  update_slots: all slots are idle\nCUDA error: an illegal memory access was encountered\n  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2500\n",
)
# TGI
TGI = '2025-05-01T10:00:00.1Z  INFO text_generation_launcher: Args {\n    model_id: "tiiuae/falcon-7b",\n    num_shard: Some(\n        2,\n    ),\n}\n2025-05-01T10:00:01.1Z  INFO download: text_generation_launcher: Starting check and download process for tiiuae/falcon-7b\n2025-05-01T10:00:09.1Z  INFO shard-manager: text_generation_launcher: Starting shard rank=0\n'
excerpt(
    "activation_oom_runtime",
    "warmup",
    "tgi",
    TGI
    + '2025-05-01T10:00:19.1Z  INFO shard-manager: text_generation_launcher: Shard ready in 10s rank=0\n2025-05-01T10:00:20.1Z  INFO text_generation_router: router/src/main.rs:210: Warming up model\n2025-05-01T10:00:22.1Z ERROR warmup{max_input_length=4095 max_prefill_tokens=8192}:warmup: text_generation_client: router/client/src/lib.rs:33: Server error: Not enough memory to handle 8192 prefill tokens. You need to decrease `--max-batch-prefill-tokens`\nError: Warmup(Generation("Not enough memory to handle 8192 prefill tokens. You need to decrease `--max-batch-prefill-tokens`"))\n2025-05-01T10:00:22.2Z ERROR text_generation_launcher: Webserver Crashed\n',
)
excerpt(
    "weights_do_not_fit",
    "load",
    "tgi",
    TGI
    + '2025-05-01T10:00:22.1Z ERROR text_generation_launcher: Error when initializing model\nTraceback (most recent call last):\n  File "/usr/lib/python3.11/site-packages/text_generation_server/models/__init__.py", line 10, in get_model\n    x\n'
    + out_of_memory(pre="", total="21.96 GiB", this="21.90 GiB", alloc="21.50 GiB")
    + " rank=0\n2025-05-01T10:00:22.2Z ERROR shard-manager: text_generation_launcher: Shard complete standard error output:\nError: ShardCannotStart\n",
)
# Ollama
excerpt(
    "host_ram_oom",
    "load",
    "ollama",
    'time=2025-05-01T10:00:00.000Z level=INFO source=routes.go:1200 msg="Listening on [::]:11434 (version 0.6.2)"\ntime=2025-05-01T10:00:05.000Z level=WARN source=server.go:133 msg="model request too large for system" requested="40.2 GiB"\nError: model requires more system memory (40.2 GiB) than is available (14.9 GiB)\n',
)
excerpt(
    "weights_do_not_fit",
    "load",
    "ollama",
    'May 01 10:00:00 box ollama[99]: time=2025-05-01T10:00:00.000Z level=INFO source=sched.go:715 msg="new model will fit in available VRAM"\nMay 01 10:00:01 box ollama[99]: load_tensors: loading model tensors, this can take a while... (mmap = true)\nMay 01 10:00:02 box ollama[99]: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9100.00 MiB on device 0: cudaMalloc failed: out of memory\nMay 01 10:00:02 box ollama[99]: time=2025-05-01T10:00:02.000Z level=ERROR source=sched.go:456 msg="error loading llama server" error="llama runner process has terminated: error loading model: unable to allocate CUDA0 buffer"\n',
)
# not known
excerpt("unknown", None, None, "hello\nworld\n")
excerpt(
    "other",
    None,
    "vllm",
    "ERROR 02-07 03:25:19 engine.py:389] something odd\nRuntimeError: Engine process failed to start. See stack trace for the root cause.\n",
)
excerpt(
    "none",
    "serve",
    "holdfast",
    "2026-01-10 10:00:00 INFO holdfast: holdfast 0.1.0\n"
    "2026-01-10 10:00:01 INFO holdfast: model smollm2: llama, 134,515,008 parameters\n"
    "2026-01-10 10:00:05 INFO holdfast: KV cache size: 32,768 tokens\n"
    "2026-01-10 10:00:05 INFO holdfast: Ready: http://127.0.0.1:8000/v1 (try: curl http://127.0.0.1:8000/v1/models)\n",
)
excerpt(
    "bad_flag",
    "load",
    "holdfast",
    "2026-01-10 10:00:00 INFO holdfast: holdfast 0.1.0\n"
    "2026-01-10 10:00:01 INFO holdfast: model smollm2: llama, 134,515,008 parameters\n"
    "holdfast: max_model_len is 99,999, but the model was made for 8,192 tokens [HF111]\n"
    "  fix:    --max-model-len 8192, or leave it out\n",
)
excerpt(
    "cuda_graph_capture_oom",
    "capture",
    "vllm",
    "2026-01-09 14:01:54.604 [Info] (Process) "
    + (
        LOADING
        + CAPTURING
        + trace(("worker/gpu_worker.py", "compile_or_warm_up_model"), ("worker/gpu_model_runner.py", "capture_model"))
        + out_of_memory()
    ).replace("\n", "\n2026-01-09 14:01:54.604 [Info] (Process) "),
)
