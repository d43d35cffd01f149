"""A program that holds tensors of its own on the GPU, and makes an LLM beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast import LLM, SamplingParams
from holdfast.units import GIB


def test_what_the_caller_holds_is_not_counted_as_the_engines(shape: Callable[[str], str]) -> None:
    mine = torch.ones(10 * GIB, dtype=torch.uint8, device="cuda")
    freed = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    del freed  # torch keeps it.
    with LLM(
        model=shape("1B"),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cuda",
        max_model_len=4096,
        vram="20GiB",
    ) as llm:
        memory = llm.info.memory
        assert memory is not None
        measured = {term.term: term.measured_bytes or 0 for term in memory.terms}
        # All of the budget that other terms did not take is the pool's, but for what they may still take, a context of
        # our own among it.
        assert 18.5 * GIB < sum(measured.values()) <= memory.held_bytes + (64 << 20)
        assert memory.held_bytes <= memory.budget_bytes == 20 * GIB
        assert measured["context"] < GIB
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        (answer,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 4
    assert int(mine.sum(dtype=torch.int64)) == 10 * GIB
