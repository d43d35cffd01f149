"""Log-probabilities of the tokens of a given text, whatever the model would have said: what differs between two engines
is then neither hidden nor enlarged by a choice of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast import LLM, SamplingParams


def forced(llm: LLM, texts: Sequence[list[int]]) -> list[list[float]]:
    """Of each token but the first of each text, given those before it. Nothing comes from the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    scores = []
    for ids, one in zip(texts, found, strict=True):
        assert one.prompt_logprobs is not None
        scores.append([place[token].logprob for token, place in zip(ids[1:], one.prompt_logprobs[1:], strict=True)])
    return scores


def forced_over_cache(llm: LLM, text: list[int], places: Sequence[int]) -> tuple[list[float], int]:
    """Of the tokens at these places of a text, each asked for with all before it as a prompt; and how many tokens of
    these prompts came from the prefix cache."""
    scores, cached = [], 0
    for place in places:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, allowed_token_ids=[text[place]])
        (one,) = llm.generate({"prompt_token_ids": text[:place]}, params, use_tqdm=False)
        (said,) = one.outputs
        assert said.logprobs is not None
        scores.append(said.logprobs[0][text[place]].logprob)
        cached += one.num_cached_tokens
    return scores, cached
