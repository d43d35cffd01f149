"""`LLM.beam_search` held against transformers' beam search, and how ends and lengths are counted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from holdfast import LLM
from holdfast.engine.requests.beam_search import BeamSearch
from holdfast.errors import RequestError
from holdfast.records import Logprob
from holdfast.sampling_params import BeamSearchParams


def test_the_beams_are_transformers_own(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt, width = [5, 6, 7, 8], 3
    with torch.inference_mode():
        wanted = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    with LLM(str(tmp_path), tokenizer="smollm2", dtype="float32", max_num_seqs=4, kv_cache_memory_bytes="4MiB") as llm:
        asked = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
        (found,) = llm.beam_search([{"prompt_token_ids": prompt}], asked)
        assert [beam.tokens for beam in found.sequences] == wanted.tolist()
        assert found.sequences[0].text == llm.get_tokenizer().decode(found.sequences[0].tokens)
        with pytest.raises(RequestError, match="width 11"):
            llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=1))


def likely(**logprobs: float) -> dict[int, Logprob]:
    return {int(token[1:]): Logprob(value) for token, value in logprobs.items()}


@pytest.mark.parametrize(("penalty", "first"), [(0.0, [7]), (4.0, [8, 9])])
def test_an_end_completes_a_beam_and_lengths_count(penalty: float, first: list[int]) -> None:
    """Token 2 ends. The short beam is likelier, the long one better where length is rewarded."""
    search = BeamSearch(3, BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty), {2})
    search.expand([likely(t7=-0.5, t8=-0.9, t9=-5.0)])
    assert [beam.tokens for beam in search.beams] == [[7], [8]]
    search.expand([likely(t2=-0.6, t7=-9.0), likely(t9=-0.4, t7=-9.0)])
    best = search.best()
    assert best[0].tokens == first
    assert {beam.finish_reason for beam in best} == {"stop", "length"}
    ended = next(beam for beam in best if beam.finish_reason == "stop")
    assert (ended.tokens, ended.stop_reason, ended.cum_logprob) == ([7], 2, pytest.approx(-1.1))


def test_only_beams_that_can_still_win_are_kept() -> None:
    """Every beam may end at every step: the best of them all are returned, and no more than these are held."""
    draw, width, prompt_length = random.Random(3), 3, 4
    search = BeamSearch(prompt_length, BeamSearchParams(beam_width=width, max_tokens=40), {2})
    every: list[tuple[float, list[int]]] = []
    for _ in range(40):
        likeliest = [{token: Logprob(-draw.uniform(0.1, 5)) for token in (2, 5, 6, 7)} for _ in search.beams]
        for beam, found in zip(search.beams, likeliest, strict=True):
            every.append(((beam.cum_logprob + found[2].logprob) / (prompt_length + len(beam.tokens)), beam.tokens))
        search.expand(likeliest)
        assert len(search._completed) <= width
    every += [(beam.cum_logprob / (prompt_length + len(beam.tokens)), beam.tokens) for beam in search.beams]
    best = sorted(every, key=lambda one: one[0], reverse=True)[:width]
    assert [beam.tokens for beam in search.best()] == [tokens for _, tokens in best]
