"""One engine, one model shape, the same offline work for each: `python benchmarks/gpu_worker.py holdfast llama-8b`.

Dummy weights, prompts of token ids, no tokenizer, ends ignored, no prefix cache. The last line is JSON. Needs nothing
but the engine it is asked for, so that it runs where only that one is installed.
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
LONGEST = {"llama-8b": 8192, "llama-0.6b": 4096}


def start(engine: str, model: str, folder: str) -> tuple[Any, Any, float]:
    """The module, its LLM, and the seconds until it was ready."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
    module = importlib.import_module(engine)
    begin = time.perf_counter()
    llm = module.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.9,
        max_model_len=LONGEST[model],
        enable_prefix_caching=False,
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


def main(engine: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        module, llm, ready_s = start(engine, model, folder)
        work = Work(module, llm, SHAPES[model]["vocab_size"])
        work.run(4, work.between(64, 64), work.between(16, 16))
        figures = {
            "engine": engine, "version": module.__version__, "model": model, "ready_s": ready_s,
            "mixed": work.run(256, work.between(100, 1024), work.between(100, 1024)),
            "one_stream": work.run(1, work.between(32, 32), work.between(256, 256)),
            "one_stream_again": work.run(1, work.between(32, 32), work.between(256, 256)),
            "prefill": work.run(32, work.between(4000, 4000), work.between(1, 1)),
            "streams_64": work.run(64, work.between(128, 128), work.between(256, 256)),
        }  # fmt: skip
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
