"""How each engine spells what they all have: aliases of its flags, and our word for a limit in its words. Data only."""

from __future__ import annotations

MODEL_FLAGS = ("model", "model-path", "model-id", "hf-repo", "model-tag")
_MANY = ("lora-modules", "served-model-name", "cudagraph-capture-sizes", "cuda-graph-sizes")
MANY_VALUED: dict[str, tuple[str, ...]] = {
    "vllm": (*_MANY, "api-key"),
    "holdfast": (*_MANY, "api-key"),
    "sglang": ("lora-paths", "cuda-graph-bs", "lora-target-modules"),
}
"""Flags that take all words up to the next flag."""
BOOLEAN_STARTS = ("enable-", "disable-", "no-", "trust-remote-code", "enforce-eager", "async-scheduling", "headless")
BOOLEANS = {
    "llama.cpp": (
        "mlock",
        "no-mmap",
        "cont-batching",
        "no-kv-offload",
        "jinja",
        "metrics",
        "embedding",
        "verbose",
        "no-webui",
        "swa-full",
        "no-context-shift",
    ),
    "vllm": (
        "skip-tokenizer-init",
        "use-v2-block-manager",
        "calculate-kv-scales",
        "return-tokens-as-token-ids",
        "fully-sharded-loras",
        "kv-sharing-fast-prefill",
        "skip-mm-profiling",
        "language-model-only",
        "numa-bind",
        "trust-request-chat-template",
        "exclude-tools-when-tool-choice-none",
        "allow-credentials",
        "log-error-stack",
        "use-tqdm-on-load",
        "interleave-mm-strings",
        "aggregate-engine-logging",
        "grpc",
        "worker-use-ray",
        "ray-workers-use-nsight",
        "scheduler-reserve-full-isl",
        "mm-encoder-only",
        "cudagraph-metrics",
        "kv-cache-metrics",
        "tokens-only",
        "engine-use-ray",
        "multi-step-stream-outputs",
        "data-parallel-hybrid-lb",
        "data-parallel-external-lb",
        "help",
    ),
    "sglang": ("skip-tokenizer-init", "log-requests", "show-time-cost", "is-embedding"),
    "tgi": ("trust-remote-code", "sharded", "json-output"),
}

_VLLM = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
    "model-tag": "model",
    "swap-space-gib": "swap-space",
}
_ALIASES: dict[str, dict[str, str]] = {
    "vllm": _VLLM,
    "holdfast": _VLLM,
    "sglang": {
        "model": "model-path",
        "tp": "tensor-parallel-size",
        "tp-size": "tensor-parallel-size",
        "dp": "data-parallel-size",
        "dp-size": "data-parallel-size",
        "pp-size": "pipeline-parallel-size",
    },
    "llama.cpp": {
        "c": "ctx-size",
        "n-ctx": "ctx-size",
        "ngl": "n-gpu-layers",
        "gpu-layers": "n-gpu-layers",
        "m": "model",
        "np": "parallel",
        "b": "batch-size",
        "n-batch": "batch-size",
        "ub": "ubatch-size",
        "ts": "tensor-split",
        "fa": "flash-attn",
        "ctk": "cache-type-k",
        "ctv": "cache-type-v",
        "t": "threads",
        "hf": "hf-repo",
        "hfr": "hf-repo",
        "sm": "split-mode",
        "mg": "main-gpu",
        "md": "model-draft",
        "n-parallel": "parallel",
        "ncmoe": "n-cpu-moe",
    },
    "tgi": {"p": "port"},
}

TRANSLATED: dict[str, dict[str, str]] = {
    "vllm": {},
    "holdfast": {"gpu-memory-utilization": "gpu-memory-utilization"},
    "sglang": {
        "max-model-len": "context-length",
        "gpu-memory-utilization": "mem-fraction-static",
        "max-num-seqs": "max-running-requests",
        "tensor-parallel-size": "tp",
        "max-num-batched-tokens": "chunked-prefill-size",
        "kv-cache-dtype": "kv-cache-dtype",
        "enforce-eager": "disable-cuda-graph",
        "dtype": "dtype",
        "quantization": "quantization",
        "max-loras": "max-loras-per-batch",
        "max-lora-rank": "max-lora-rank",
        "cpu-offload-gb": "cpu-offload-gb",
        "port": "port",
        "max-cudagraph-capture-size": "cuda-graph-max-bs",
        "speculative-config": "speculative-algorithm",
        "attention-backend": "attention-backend",
        "trust-remote-code": "trust-remote-code",
        "schedule-conservativeness": "schedule-conservativeness",
    },
    "llama.cpp": {
        "max-model-len": "ctx-size",
        "max-num-seqs": "parallel",
        "max-num-batched-tokens": "ubatch-size",
        "port": "port",
        "n-gpu-layers": "n-gpu-layers",
        "flash-attn": "flash-attn",
        "cache-type-k": "cache-type-k",
        "cache-type-v": "cache-type-v",
    },
    "tgi": {
        "max-model-len": "max-total-tokens",
        "gpu-memory-utilization": "cuda-memory-fraction",
        "tensor-parallel-size": "num-shard",
        "max-num-batched-tokens": "max-batch-prefill-tokens",
        "max-num-seqs": "max-batch-size",
        "dtype": "dtype",
        "port": "port",
        "quantization": "quantize",
        "kv-cache-dtype": "kv-cache-dtype",
        "trust-remote-code": "trust-remote-code",
    },
    "ollama": {"max-model-len": "OLLAMA_CONTEXT_LENGTH", "max-num-seqs": "OLLAMA_NUM_PARALLEL", "port": "OLLAMA_HOST"},
}
"""Our word (vLLM's, for most) to the engine's; what is absent, the engine has not. vLLM has all."""


def canonical(engine: str, spelled: str) -> str:
    """-tp, --tp, tensor_parallel_size: one name."""
    name = spelled.lstrip("-").replace("_", "-")
    return _ALIASES.get(engine, {}).get(name, name)


def translated(engine: str, ours: str) -> str | None:
    """The engine's flag or variable for our word; None where it has none."""
    if ours.isupper():
        return ours
    if engine in ("vllm", "holdfast"):
        return f"--{ours}"
    theirs = TRANSLATED.get(engine, {}).get(ours)
    if theirs is None:
        return None
    return theirs if theirs.isupper() else f"--{theirs}"
