"""Many draws of the CPU's sampler against chances in float64, option by option; and the measure itself can say no."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy
import pytest
from distributions import CASES, OUTPUT, PROMPT, VOCABULARY, Case, p_value, reference, some_logits
from examples import examples

from holdfast.execution.sampling.sampler import Sampler
from holdfast.records import SequenceStart

DRAWS, DRAWS_OF_ALL = examples(30_000), 4_000
"""Of one option, and of all at once, which take far longer."""
LENGTH = len(PROMPT) + len(OUTPUT)


@cache
def draws(name: str, count: int = DRAWS) -> tuple[int, ...]:
    """One token for each of so many seeds, one after the other as users choose them; all rows at once."""
    case = CASES[name]
    tokens = numpy.tile(numpy.array(PROMPT + OUTPUT, dtype=numpy.int32), (count, 1))
    sampler = Sampler(SimpleNamespace(tokens=tokens), VOCABULARY)  # type: ignore[arg-type]
    for slot in range(count):
        params = case.params(slot)
        sampler.start(SequenceStart(slot, "", PROMPT + OUTPUT, len(PROMPT), params, case.ends, case.bad_words))
    logits = some_logits().repeat(count, 1)
    found, _ = sampler.sample(logits, numpy.arange(count), numpy.full(count, LENGTH))
    return tuple(int(token) for token in found)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_their_chances(name: str) -> None:
    found = draws(name, DRAWS_OF_ALL) if name == "everything" else draws(name)
    assert p_value(found, reference(some_logits(), CASES[name])) > 1e-3


WRONG = {
    "plain": Case({"temperature": 1.1}),
    "cold": Case({"temperature": 0.57}),
    "top_k": Case({"top_k": 10}),
    "top_p": Case({"top_p": 0.84}),
    "min_p": Case({"min_p": 0.06}),
    "repetition": Case({"repetition_penalty": 1.2}),
    "presence and frequency": Case({"presence_penalty": 0.9, "frequency_penalty": 0.1}),
    "biases": Case({"logit_bias": {2: 1.5, 11: -2.0, 30: 3.75}}),
    "allowed": Case({"allowed_token_ids": [1, 5, 8, 11, 29, 33, 40, 46]}),
    "bad words": Case({}, bad_words=[[5], [8, 11], [29, 8, 11, 30], [11, 29]]),
    "early": Case({"min_tokens": 9}, ends=(30,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_draws_of_a_little_else_are_told_apart(name: str) -> None:
    """The same draws against the chances of an option that is a little off: were it so, the test above would fail."""
    assert p_value(draws(name), reference(some_logits(), WRONG[name])) < 1e-6


def test_right_draws_are_seldom_called_wrong() -> None:
    """p-values of right draws are even: of many, a tenth lies under a tenth."""
    chances = reference(some_logits(), CASES["plain"])
    source = numpy.random.default_rng(5)
    found = [p_value(source.choice(VOCABULARY, 2_000, p=chances.numpy()).tolist(), chances) for _ in range(400)]
    assert 0.05 < sum(value < 0.1 for value in found) / len(found) < 0.16
