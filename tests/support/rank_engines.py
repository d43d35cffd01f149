"""Engines of several ranks for tests: tiny, greedy, and quick to start."""

from __future__ import annotations

import itertools

from holdfast import LLM, SamplingParams
from holdfast.records import EngineOutput

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


def tokens(llm: LLM, prompts=PROMPTS, params: SamplingParams = GREEDY, lora=None) -> list[list[int]]:
    """`lora`: a LoRARequest for all, or one or None for each."""
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    return [list(output.outputs[0].token_ids) for output in outputs]


CROWD = [f"{number} times " + "one two " * 90 for number in range(4)]
"""More than a pool for one sequence of full length has room for."""


def tokens_while_resized(llm: LLM) -> list[list[int]]:
    """Of these, while the pool becomes as small as it may be and as large as it was, again and again."""
    core, least, most = llm._core, llm._core.scheduler.least_blocks, llm._core.scheduler.kv.blocks_total + 1
    step, steps, sizes = core.step, itertools.count(1), itertools.cycle((least, most))
    before = core.stats().preemptions_total

    def resized() -> list[EngineOutput]:
        if next(steps) % 3 == 0:
            core.resize_kv(next(sizes))
        return step()

    core.step = resized
    try:
        return tokens(llm, CROWD)
    finally:
        del core.step
        core.resize_kv(most)
        assert core.stats().preemptions_total > before
