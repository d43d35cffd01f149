"""One engine, one model shape, the same offline work for each: `python benchmarks/gpu_worker.py holdfast llama-8b`.

    python benchmarks/gpu_worker.py ENGINE MODEL[+VARIANT] [ROW,ROW.../ROW...] [GO]

A variant is how the weights are stored: `awq`, `q4_k`, `fp8-file` and `bf16-file` are files of random weights, written
once into the folder that HOLDFAST_BENCHMARK_FILES names (with `files` for ENGINE that is all); `awq-dummy` is dummies
in the layout of such a file; `fp8` quantizes dummies while loading, with KV in FP8 too, as with `fp8-file`. Otherwise
dummy weights. Prompts of token ids, no tokenizer, ends ignored, no prefix cache. Each line of JSON holds the figures so
far. Needs nothing but the engine it is asked for, so that it runs where only that one is installed.

GO is for engines that start at the same time and are measured alone: when it is ready the worker makes GO.ready, and
before the rows after the Nth slash it waits for a file GO.N, which it takes away when they are done. Settings of such
an engine, its share of the memory for one, are JSON in HOLDFAST_BENCHMARK_SETTINGS.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "attention_bias": False, "head_dim": 128, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "llama-0.6b": LLAMA | {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPES["qwen3-30b-a3b"] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
LONGEST = {"llama-8b": 8192, "llama-0.6b": 4096, "qwen3-30b-a3b": 8192}
LONG_CONTEXT = 65536
"""For the rows of long prompts."""


WRITERS = {"awq": "write_awq", "fp8-file": "write_fp8", "bf16-file": "write_bf16", "q4_k": "write_q4_k"}
"""Of variants that are files."""


def place(model: str, variant: str, folder: Path) -> Path:
    """Of a file, or of a folder of files."""
    return folder / (f"{model}-q4_k.gguf" if variant == "q4_k" else f"{model}-{variant}")


def stored(model: str, variant: str, folder: Path) -> str:
    """Where the weights are; they are written if they are not there."""
    from benchmarks import random_checkpoints

    path = place(model, variant, Path(os.environ.get("HOLDFAST_BENCHMARK_FILES", folder)))
    # Both names appear when everything is written.
    if not (path if variant == "q4_k" else path / "config.json").exists():
        part = path.with_suffix(".part") if variant == "q4_k" else path
        getattr(random_checkpoints, WRITERS[variant])(SHAPES[model], part)
        if part != path:
            part.rename(path)
    return str(path)


def start(engine: str, asked: str, folder: str, context: int = 0) -> tuple[Any, Any, float]:
    """The module, its LLM, and the seconds until it was ready."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    model, _, variant = asked.partition("+")
    path, more = folder, dict[str, Any]()
    if variant in WRITERS:
        path = stored(model, variant, Path(folder))
    else:
        from benchmarks import random_checkpoints

        config = random_checkpoints.awq_config(SHAPES[model]) if variant == "awq-dummy" else SHAPES[model]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        more["load_format"] = "dummy"
    if variant == "fp8":
        more["quantization"] = "fp8"
    if variant.startswith("fp8"):
        more["kv_cache_dtype"] = "fp8"
    more |= {"gpu_memory_utilization": 0.9} | json.loads(os.environ.get("HOLDFAST_BENCHMARK_SETTINGS", "{}"))
    module = importlib.import_module(engine)
    begin = time.perf_counter()
    llm = module.LLM(
        model=path,
        skip_tokenizer_init=True,
        max_model_len=context or LONGEST[model],
        enable_prefix_caching=False,
        **more,
    )
    return module, llm, time.perf_counter() - begin


class Work:
    def __init__(self, module: Any, llm: Any, vocabulary: int) -> None:
        self._module, self._llm = module, llm
        self._rng = random.Random(0)
        self._vocabulary = vocabulary - 300

    def between(self, low: int, high: int) -> Callable[[], int]:
        return lambda: self._rng.randint(low, high)

    def run(self, requests: int, prompt: Callable[[], int], output: Callable[[], int]) -> dict[str, float]:
        prompts = [[self._rng.randint(0, self._vocabulary) for _ in range(prompt())] for _ in range(requests)]
        params = [
            self._module.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output(), detokenize=False)
            for _ in prompts
        ]
        begin = time.perf_counter()
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        produced = sum(len(answer.outputs[0].token_ids) for answer in answers)
        if produced != sum(one.max_tokens for one in params):
            raise SystemExit("an engine must produce every token that it is asked for")
        read = sum(map(len, prompts))
        return {"s": seconds, "out_tok_per_s": produced / seconds, "in_tok_per_s": read / seconds}


ROWS: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "mixed": (256, (100, 1024), (100, 1024)),
    "one_stream": (1, (32, 32), (256, 256)),
    "one_stream_again": (1, (32, 32), (256, 256)),
    "streams_8": (8, (128, 128), (256, 256)),
    "streams_32": (32, (128, 128), (128, 128)),
    "streams_64": (64, (128, 128), (256, 256)),
    "burst": (512, (512, 512), (128, 128)),
    "decode_128": (1, (1, 1), (128, 128)),
    "streams_1_128": (1, (128, 128), (128, 128)),
    "streams_8_128": (8, (128, 128), (128, 128)),
    "prompt_1500": (1, (1500, 1500), (1, 1)),
    "prefill": (32, (4000, 4000), (1, 1)),
    "long_30k": (1, (30000, 30000), (1, 1)),
    "long_60k": (1, (60000, 60000), (1, 1)),
}
"""Requests, and the least and most tokens of a prompt and of an output."""
USUAL = ("mixed", "one_stream", "one_stream_again", "prefill", "streams_64")


def main(engine: str, model: str, rows: str = ",".join(USUAL), go: str = "") -> None:
    if engine == "files":
        name, _, variant = model.partition("+")
        if variant in WRITERS:
            stored(name, variant, Path())
        return
    context = LONG_CONTEXT if "long" in rows else 0
    with tempfile.TemporaryDirectory() as folder:
        module, llm, ready_s = start(engine, model, folder, context)
        work = Work(module, llm, SHAPES[model.partition("+")[0]]["vocab_size"])
        work.run(4, work.between(64, 64), work.between(16, 16))
        figures = {"engine": engine, "version": module.__version__, "model": model, "ready_s": ready_s}
        if go:
            Path(f"{go}.ready").touch()
        for turn, asked in enumerate(rows.split("/")):
            while go and not Path(f"{go}.{turn}").exists():
                time.sleep(0.05)
            for row in asked.split(","):
                requests, prompt, output = ROWS[row]
                figures[row] = work.run(requests, work.between(*prompt), work.between(*output))
            print(json.dumps(figures), flush=True)
            if go:
                Path(f"{go}.{turn}").unlink()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(*sys.argv[1:5])
