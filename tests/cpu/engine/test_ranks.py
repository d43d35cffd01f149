"""Several ranks compute one model: the tokens of one rank, whatever the division, and nothing left behind."""

from __future__ import annotations

import pytest

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


@pytest.fixture(scope="module")
def of_one(tiny_model) -> list[list[int]]:
    with make(tiny_model, 1) as llm:
        return tokens(llm)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_say_what_one_says(tiny_model, of_one, ranks: int) -> None:
    """With three and four ranks, two KV heads are on several of them."""
    with make(tiny_model, ranks) as llm:
        assert tokens(llm) == of_one
