"""What the options of sampling mean, plainly and in float64, and whether draws follow it: chi-square, as a p-value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.records import SamplingParams

VOCABULARY = 48
PROMPT = [3, 5, 5, 40, 7]
OUTPUT = [11, 5, 11, 29, 8, 11]
LEAST_EXPECTED = 5.0
"""Cells with fewer draws are counted together: the approximation does not hold for them."""


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]
    bad_words: list[list[int]] = field(default_factory=list)
    ends: tuple[int, ...] = ()

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, **self.options)


CASES = {
    "plain": Case({}),
    "cold": Case({"temperature": 0.6}),
    "warm": Case({"temperature": 1.7}),
    "top_k": Case({"top_k": 9}),
    "top_p": Case({"top_p": 0.8}),
    "min_p": Case({"min_p": 0.08}),
    "all three": Case({"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3}),
    "repetition": Case({"repetition_penalty": 1.5}),
    "presence and frequency": Case({"presence_penalty": 0.9, "frequency_penalty": 0.4}),
    "biases": Case({"logit_bias": {2: 1.5, 11: -2.0, 30: 4.0}}),
    "allowed": Case({"allowed_token_ids": [1, 5, 8, 11, 29, 33, 40, 47]}),
    "bad words": Case({}, bad_words=[[5], [8, 11], [29, 8, 11, 30], [11, 29], [8, 11, 2]]),
    "early": Case({"min_tokens": 9}, ends=(30, 11)),
    "everything": Case(
        {
            "temperature": 1.2, "top_k": 12, "top_p": 0.93, "min_p": 0.01, "repetition_penalty": 1.2,
            "presence_penalty": 0.3, "frequency_penalty": -0.2, "logit_bias": {2: 1.0, 33: -0.5}, "min_tokens": 9,
            "allowed_token_ids": list(range(2, 46)),
        },
        bad_words=[[11, 4], [8, 11, 30], [17]],
        ends=(22,),
    ),
}  # fmt: skip


def some_logits() -> torch.Tensor:
    """The same for every run; tokens that options change are likely ones, so that it shows."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(11)) * 1.2
    logits[[*PROMPT, *OUTPUT, 2, 30, 33]] = torch.tensor(
        [2.1, 1.5, 1.5, 2.4, 0.8, 2.6, 1.5, 2.6, 1.9, 1.2, 2.6, 2.0, 2.2, 1.7]
    )
    return logits


def reference(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """The chance of every token to follow OUTPUT, by the definitions alone."""
    params, scores = case.params(0), logits.double().clone()
    if params.allowed_token_ids is not None:
        kept = set(params.allowed_token_ids)
        scores[[token for token in range(len(scores)) if token not in kept]] = -math.inf
    for word in case.bad_words:
        before = word[:-1]
        if not before or OUTPUT[-len(before) :] == before:
            scores[word[-1]] = -math.inf
    if len(OUTPUT) < params.min_tokens:
        scores[list(case.ends)] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        repetition = params.repetition_penalty
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token, count in Counter(OUTPUT).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    chances = (scores / params.temperature).softmax(-1)
    chances = chances.where(chances >= params.min_p * chances.max(), 0.0)
    if params.top_k:
        chances = chances.where(chances >= chances.sort(descending=True).values[params.top_k - 1], 0.0)
    chances /= chances.sum()
    ordered = chances.sort(descending=True).values
    inside = ordered.cumsum(0) - ordered < params.top_p
    return _shares(chances.where(chances >= ordered[inside].min(), 0.0))


def _shares(chances: torch.Tensor) -> torch.Tensor:
    return chances / chances.sum()


def p_value(drawn: Sequence[int], chances: torch.Tensor) -> float:
    """How often draws with these chances would be as far off as these are; 0 where an impossible token was drawn."""
    observed = torch.bincount(torch.tensor(drawn), minlength=len(chances)).double()
    if observed[chances == 0].sum() > 0:
        return 0.0
    expected = chances * len(drawn)
    order = expected.argsort(descending=True)
    large = order[expected[order] >= LEAST_EXPECTED]
    small = order[expected[order] < LEAST_EXPECTED]
    cells = [(float(observed[cell]), float(expected[cell])) for cell in large]
    if float(expected[small].sum()) >= LEAST_EXPECTED:
        cells.append((float(observed[small].sum()), float(expected[small].sum())))
    if len(cells) < 2:
        return 1.0
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
