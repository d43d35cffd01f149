"""Engines of several ranks for tests: tiny, greedy, and quick to start."""

from __future__ import annotations

from holdfast import LLM, SamplingParams

PROMPTS = ["Hello there, my", "The cat sat on", "one two " * 90]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make(model, ranks: int, **settings) -> LLM:
    given = {
        "model": str(model),
        "load_format": "dummy",
        "tokenizer": "smollm2",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": "16MiB",
        "threads": 2,
        "tensor_parallel_size": ranks,
    }
    return LLM(**given | settings)


def tokens(llm: LLM, prompts=PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
