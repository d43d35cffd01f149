"""Whole logs of five engines in their own forms, from the first line to the last, each with its truth said by hand.

The truth is what may be said of the log with high confidence: nothing at all of a healthy one.
"""

# ruff: noqa: E501 (lines are as long as engines print them)

from __future__ import annotations

from typing import NamedTuple


class WholeLog(NamedTuple):
    name: str
    truth: frozenset[str]
    lines: tuple[str, ...]


def _log(name: str, truth: str, text: str) -> WholeLog:
    return WholeLog(name, frozenset(truth.split()), tuple(text.strip("\n").split("\n")))


_V1_START = """
INFO 10-01 10:00:01 [__init__.py:216] Automatically detected platform cuda.
(APIServer pid=1) INFO 10-01 10:00:09 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=1) INFO 10-01 10:00:09 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 32768}
(APIServer pid=1) INFO 10-01 10:00:17 [model.py:547] Resolved architecture: Qwen3ForCausalLM
(APIServer pid=1) INFO 10-01 10:00:17 [model.py:1510] Using max model len 32768
(EngineCore_DP0 pid=88) INFO 10-01 10:00:25 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B', dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1
(EngineCore_DP0 pid=88) INFO 10-01 10:00:27 [parallel_state.py:1208] rank 0 in world size 1 is assigned as DP rank 0
(EngineCore_DP0 pid=88) INFO 10-01 10:00:28 [gpu_model_runner.py:2602] Starting to load model Qwen/Qwen3-8B...
(EngineCore_DP0 pid=88) INFO 10-01 10:00:40 [default_loader.py:267] Loading weights took 9.51 seconds
(EngineCore_DP0 pid=88) INFO 10-01 10:00:41 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 11.7 seconds
(EngineCore_DP0 pid=88) INFO 10-01 10:00:55 [backends.py:559] Dynamo bytecode transform time: 8.12 s
"""
_V1_READY = """
(EngineCore_DP0 pid=88) INFO 10-01 10:01:09 [gpu_worker.py:298] Available KV cache memory: 52.31 GiB
(EngineCore_DP0 pid=88) INFO 10-01 10:01:09 [kv_cache_utils.py:1087] GPU KV cache size: 380,912 tokens
(EngineCore_DP0 pid=88) INFO 10-01 10:01:09 [kv_cache_utils.py:1091] Maximum concurrency for 32,768 tokens per request: 11.62x
(EngineCore_DP0 pid=88) INFO 10-01 10:01:24 [gpu_model_runner.py:3480] Graph capturing finished in 14 secs, took 0.61 GiB
(EngineCore_DP0 pid=88) INFO 10-01 10:01:24 [core.py:210] init engine (profile, create kv cache, warmup model) took 43.01 seconds
(APIServer pid=1) INFO 10-01 10:01:26 [api_server.py:1912] Starting vLLM API server 0 on http://0.0.0.0:8000
(APIServer pid=1) INFO:     Started server process [1]
(APIServer pid=1) INFO:     Application startup complete.
(APIServer pid=1) INFO:     10.0.0.4:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK
(APIServer pid=1) INFO 10-01 10:02:26 [loggers.py:127] Engine 000: Avg prompt throughput: 120.1 tokens/s, Avg generation throughput: 310.4 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%, Prefix cache hit rate: 40.2%
"""
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.10 GiB of "
    "which {free} is free. Process 88 has {used} memory in use. Of the allocated memory {allocated} is allocated by "
    "PyTorch, and 210.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def _v1_trace(*frames: tuple[str, str], error: str, at: str = "core.py:708") -> str:
    stamp = f"(EngineCore_DP0 pid=88) ERROR 10-01 10:01:10 [{at}] "
    rows = ["EngineCore failed to start.", "Traceback (most recent call last):"]
    for file, name in frames:
        rows += [f'  File "/usr/lib/python3.12/site-packages/vllm/{file}", line 123, in {name}', f"    self.{name}()"]
    return "\n".join(stamp + row for row in (*rows, error))


_V1_WRAPPED = """
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "/usr/lib/python3.12/site-packages/vllm/v1/engine/utils.py", line 779, in wait_for_engine_startup
(APIServer pid=1)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}
"""
_CORE = (("v1/engine/core.py", "run_engine_core"), ("v1/engine/core.py", "__init__"))
_V0_START = """
INFO 03-04 09:00:01 api_server.py:219] vLLM API server version 0.6.3
INFO 03-04 09:00:01 api_server.py:220] args: Namespace(host=None, port=8000, model='meta-llama/Llama-3.1-8B-Instruct', max_model_len=8192, tensor_parallel_size=1, gpu_memory_utilization=0.9)
INFO 03-04 09:00:07 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1
INFO 03-04 09:00:12 model_runner.py:1056] Starting to load model meta-llama/Llama-3.1-8B-Instruct...
Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:03<00:00,  1.10it/s]
INFO 03-04 09:00:17 model_runner.py:1067] Loading model weights took 14.9888 GB
"""
_SGLANG_START = """
[2025-05-05 11:00:00] server_args=ServerArgs(model_path='Qwen/Qwen2.5-14B-Instruct', tp_size=2, mem_fraction_static=0.88, context_length=32768)
[2025-05-05 11:00:12 TP0] Init torch distributed begin.
[2025-05-05 11:00:12 TP1] Init torch distributed begin.
[2025-05-05 11:00:14 TP0] Load weight begin. avail mem=23.20 GB
[2025-05-05 11:00:14 TP1] Load weight begin. avail mem=23.20 GB
[2025-05-05 11:00:30 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem=9.10 GB, mem usage=14.10 GB.
[2025-05-05 11:00:30 TP1] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem=9.10 GB, mem usage=14.10 GB.
[2025-05-05 11:00:31 TP0] KV Cache is allocated. #tokens: 70112, K size: 3.21 GB, V size: 3.21 GB
[2025-05-05 11:00:31 TP0] Memory pool end. avail mem=2.31 GB
[2025-05-05 11:00:32 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=2.10 GB
"""
_LLAMA_START = """
build: 5410 (e298d2fb) with cc (Debian 12.2.0-14) 12.2.0 for x86_64-linux-gnu
ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA GeForce RTX 3060, compute capability 8.6, VMM: yes
main: loading model
srv    load_model: loading model '/models/qwen2.5-14b-q4_k_m.gguf'
llama_model_loader: loaded meta data with 26 key-value pairs and 579 tensors from /models/qwen2.5-14b-q4_k_m.gguf (version GGUF V3 (latest))
print_info: file size   = 8.37 GiB (4.87 BPW)
load_tensors: loading model tensors, this can take a while... (mmap = true)
"""
_TGI_START = """
2025-02-02T08:00:00.000001Z  INFO text_generation_launcher: Args {
    model_id: "mistralai/Mistral-7B-Instruct-v0.3",
    num_shard: Some(
        1,
    ),
    max_input_tokens: Some(
        4096,
    ),
}
2025-02-02T08:00:02.000001Z  INFO download: text_generation_launcher: Starting check and download process for mistralai/Mistral-7B-Instruct-v0.3
2025-02-02T08:00:05.000001Z  INFO download: text_generation_launcher: Successfully downloaded weights for mistralai/Mistral-7B-Instruct-v0.3
2025-02-02T08:00:05.100001Z  INFO shard-manager: text_generation_launcher: Starting shard rank=0
2025-02-02T08:00:15.100001Z  INFO shard-manager: text_generation_launcher: Waiting for shard to be ready... rank=0
"""
_OLLAMA_START = """
time=2025-06-06T07:00:00.000Z level=INFO source=routes.go:1234 msg="Listening on [::]:11434 (version 0.6.5)"
time=2025-06-06T07:00:01.000Z level=INFO source=gpu.go:217 msg="looking for compatible GPUs"
time=2025-06-06T07:00:02.000Z level=INFO source=types.go:130 msg="inference compute" id=GPU-1 library=cuda variant=v12 compute=8.6 name="NVIDIA GeForce RTX 3060" total="11.6 GiB" available="11.2 GiB"
"""

WHOLE_LOGS = (
    _log("vllm-v1-healthy", "", _V1_START + _V1_READY.strip("\n")),
    _log("vllm-v1-kv-too-small", "kv_cache_too_small_for_max_len", _V1_START + _v1_trace(
        *_CORE, ("v1/engine/core.py", "_initialize_kv_caches"), ("v1/core/kv_cache_utils.py", "check_enough_kv_cache_memory"),
        error="ValueError: To serve at least one request with the models's max seq len (32768), (4.50 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (2.10 GiB). Based on the available memory, the estimated "
        "maximum model length is 15280. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
        "initializing the engine.") + _V1_WRAPPED),
    _log("vllm-v1-serving-oom", "activation_oom_runtime", _V1_START + _V1_READY + _v1_trace(
        ("v1/engine/core.py", "run_busy_loop"), ("v1/engine/core.py", "_process_engine_step"),
        ("v1/worker/gpu_model_runner.py", "execute_model"),
        error=_OOM.format(tried="1.20 GiB", free="310.00 MiB", used="78.70 GiB", allocated="77.90 GiB"), at="core.py:717")),
    _log("vllm-v1-capture-oom", "cuda_graph_capture_oom", _V1_START + _v1_trace(
        *_CORE, ("v1/worker/gpu_worker.py", "compile_or_warm_up_model"), ("v1/worker/gpu_model_runner.py", "capture_model"),
        error=_OOM.format(tried="64.00 MiB", free="30.00 MiB", used="79.00 GiB", allocated="78.10 GiB")) + _V1_WRAPPED),
    _log("vllm-v0-port", "other", _V0_START + """
INFO 03-04 09:00:30 launcher.py:19] Available routes are:
ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use
"""),
    _log("vllm-v0-no-blocks", "no_memory_for_kv_blocks", _V0_START + """
INFO 03-04 09:00:20 gpu_executor.py:122] # GPU blocks: 0, # CPU blocks: 2048
Traceback (most recent call last):
  File "/usr/lib/python3.10/site-packages/vllm/engine/llm_engine.py", line 348, in __init__
    self._initialize_kv_caches()
  File "/usr/lib/python3.10/site-packages/vllm/worker/worker.py", line 250, in initialize_cache
    raise_if_cache_size_invalid(num_gpu_blocks,
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
"""),
    _log("vllm-v0-heads", "heads_not_divisible", """
INFO 03-04 09:00:01 api_server.py:219] vLLM API server version 0.6.3
INFO 03-04 09:00:01 api_server.py:220] args: Namespace(host=None, port=8000, model='Qwen/Qwen2.5-7B-Instruct', tensor_parallel_size=8)
Traceback (most recent call last):
  File "/usr/lib/python3.10/site-packages/vllm/config.py", line 412, in verify_with_parallel_config
    raise ValueError(
ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).
"""),
    _log("sglang-healthy", "", _SGLANG_START + """
[2025-05-05 11:00:55 TP0] Capture cuda graph end. Time elapsed: 22.10 s. avail mem=1.60 GB.
[2025-05-05 11:00:56 TP0] max_total_num_tokens=70112, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768
[2025-05-05 11:00:57] INFO:     Application startup complete.
[2025-05-05 11:00:59] The server is fired up and ready to roll!
[2025-05-05 11:01:02 TP0] Prefill batch. #new-seq: 1, #new-token: 30, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0
[2025-05-05 11:01:03 TP0] Decode batch. #running-req: 1, #token: 63, token usage: 0.00, gen throughput (token/s): 30.10, #queue-req: 0
"""),
    _log("sglang-capture-oom", "cuda_graph_capture_oom", _SGLANG_START + """
[2025-05-05 11:00:40 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2215, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank)
  File "/sgl-workspace/sglang/python/sglang/srt/model_executor/model_runner.py", line 1001, in init_cuda_graphs
    self.cuda_graph_runner = CudaGraphRunner(self)
Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.60 GiB of which 300.00 MiB is free. Process 70 has 23.20 GiB memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated.
[2025-05-05 11:00:40] Received sigquit from a child process. It usually means the child failed.
"""),
    _log("llama-healthy", "", _LLAMA_START + """
load_tensors: offloaded 49/49 layers to GPU
load_tensors:        CUDA0 model buffer size =  8148.38 MiB
llama_context: n_ctx         = 8192
llama_kv_cache_unified:      CUDA0 KV buffer size =  1536.00 MiB
common_init_from_params: warming up the model with an empty run - please wait ... (--no-warmup to disable)
main: model loaded
main: server is listening on http://0.0.0.0:8080 - starting the main loop
srv  update_slots: all slots are idle
srv  log_server_r: request: POST /v1/chat/completions 10.0.0.9 200
"""),
    _log("llama-weights", "weights_do_not_fit", _LLAMA_START.replace("14b", "72b").replace("8.37", "44.15") + """
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 44090.10 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 46231814144
llama_model_load: error loading model: unable to allocate CUDA0 buffer
llama_model_load_from_file_impl: failed to load model
common_init_from_params: failed to load model '/models/qwen2.5-72b-q4_k_m.gguf'
srv    load_model: failed to load model, '/models/qwen2.5-72b-q4_k_m.gguf'
main: exiting due to model loading error
"""),
    _log("tgi-healthy", "", _TGI_START + """
2025-02-02T08:00:20.100001Z  INFO shard-manager: text_generation_launcher: Shard ready in 14.9s rank=0
2025-02-02T08:00:20.200001Z  INFO text_generation_launcher: Starting Webserver
2025-02-02T08:00:21.200001Z  INFO text_generation_router_v3: backends/v3/src/lib.rs:125: Warming up model
2025-02-02T08:00:25.200001Z  INFO text_generation_router_v3: backends/v3/src/lib.rs:137: Setting max batch total tokens to 62224
2025-02-02T08:00:25.300001Z  INFO text_generation_router::server: router/src/server.rs:2402: Connected
"""),
    _log("tgi-gated", "gated_or_missing_model", """
2025-02-02T08:00:02.000001Z  INFO download: text_generation_launcher: Starting check and download process for meta-llama/Llama-3.1-8B
2025-02-02T08:00:05.000001Z ERROR download: text_generation_launcher: Download encountered an error:
Traceback (most recent call last):
  File "/usr/src/server/text_generation_server/cli.py", line 200, in download_weights
    utils.weight_files(model_id, revision, extension)
huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6)
Cannot access gated repo for url https://huggingface.co/api/models/meta-llama/Llama-3.1-8B.
Error: DownloadError
"""),
    _log("ollama-healthy", "", _OLLAMA_START + """
time=2025-06-06T07:00:09.000Z level=INFO source=sched.go:715 msg="new model will fit in available VRAM in single GPU, loading" model=/usr/share/ollama/.ollama/models/blobs/sha256-1 gpu=GPU-1 parallel=2 available=11900000000 required="6.2 GiB"
time=2025-06-06T07:00:09.100Z level=INFO source=server.go:405 msg="starting llama server" cmd="/usr/bin/ollama runner --model /usr/share/ollama/.ollama/models/blobs/sha256-1 --ctx-size 8192"
time=2025-06-06T07:00:12.000Z level=INFO source=server.go:619 msg="llama runner started in 3.01 seconds"
[GIN] 2025/06/06 - 07:00:13 | 200 |  4.1s |       127.0.0.1 | POST     "/api/chat"
"""),
)  # fmt: skip

NOISE = (
    "WARNING 10-01 10:00:20 [custom_all_reduce.py:144] Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify disable_custom_all_reduce=True explicitly.",
    "/usr/lib/python3.12/site-packages/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated.",
    "Special tokens have been added in the vocabulary, make sure the associated word embeddings are fine-tuned or trained.",
    "host1:88:88 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)",
    "host1:88:88 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct",
    'INFO:     10.0.0.7:40112 - "GET /favicon.ico HTTP/1.1" 404 Not Found',
    'INFO:     10.0.0.7:40113 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
    "INFO 10-01 10:02:20 [async_llm.py:420] Request chatcmpl-1 aborted: the client disconnected.",
    "WARNING 10-01 10:00:20 [interface.py:389] Using 'pin_memory=False' as WSL is detected. This may slow down the performance.",
    "The attention mask and the pad token id were not set. As a consequence, you may observe unexpected behavior.",
    "[W1001 10:00:20 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (9000 > 8192).",
    "WARNING 10-01 10:00:20 [arg_utils.py:1] Chunked prefill is enabled by default for models with max_model_len > 32K.",
    "2025-01-01 12:00:00,000 - app - ERROR - user request failed: the database does not answer",
    "Traceback (most recent call last):",
    "KeyError: 'user_id'",
    "INFO 10-01 10:00:20 [cuda.py:290] Using Flash Attention backend on V1 engine.",
)
"""What engines and what runs beside them print at good starts too."""
