"""The sampler: distributions against a float64 reference, seeds against company, penalties against a naive loop."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from holdfast.execution.batch import RunnerLimits, SlotBuffers
from holdfast.execution.sampling import sampler as sampling
from holdfast.execution.sampling.nonfinite import NO_TOKEN, broken_rows
from holdfast.execution.sampling.sampler import Sampler, draw, likeliest, logprobs, penalize, uniforms
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.records import Row, SamplingParams, SequenceStart

VOCABULARY = 60


def reference_chances(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The definition, in float64, over a full sort."""
    scores = logits.double() / params.temperature
    chances = scores.softmax(-1)
    if params.min_p:
        chances = chances.where(chances >= params.min_p * chances.max(), 0.0)
    ordered = chances.sort(descending=True).values
    if params.top_k:
        chances = chances.where(chances >= ordered[min(params.top_k, len(ordered)) - 1], 0.0)
    if params.top_p < 1:
        ordered = (chances / chances.sum()).sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        floor = ordered[before < params.top_p].min()
        chances = chances.where(chances / chances.sum() >= floor, 0.0)
    return chances / chances.sum()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.97, "temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 1},
    {"top_k": 1000, "top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.3, "top_p": 0.5},
    {"top_k": 4, "top_p": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("first_look", [64, 4])
def test_draws_follow_the_reference_distribution(
    options: dict[str, Any], first_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FIRST_LOOK", first_look)
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference_chances(logits, params)
    count = 20_000
    numbers = torch.from_numpy(uniforms(numpy.full(count, 5), numpy.arange(count)))
    drawn = draw(logits.repeat(count, 1), [params] * count, numbers)
    observed = torch.bincount(drawn, minlength=VOCABULARY).double()
    assert observed[expected == 0].sum() == 0
    # Cells too rare for the approximation are counted together.
    likely = expected * count >= 5
    cells = int(likely.sum()) + 1
    statistic = float(((observed - expected * count)[likely] ** 2 / (expected * count)[likely]).sum())
    freedom = max(1, cells - 1)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_mixed_rows_are_filtered_each_by_its_own_options() -> None:
    logits = torch.randn(len(OPTIONS), VOCABULARY, generator=torch.Generator().manual_seed(2)) * 2
    params = [SamplingParams(**{"temperature": 1.0, **options}) for options in OPTIONS]
    numbers = torch.linspace(0.01, 0.99, len(OPTIONS), dtype=torch.float64)
    together = draw(logits.clone(), params, numbers)
    alone = [draw(logits[i : i + 1].clone(), [params[i]], numbers[i : i + 1])[0] for i in range(len(OPTIONS))]
    assert together.tolist() == [int(token) for token in alone]


def test_ties_at_the_cut_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    params = [SamplingParams(temperature=1.0, top_k=2)]
    seen = {
        int(draw(logits.clone(), params, torch.tensor([number], dtype=torch.float64)))
        for number in (0.0, 0.5, 0.7, 0.85, 0.999999)
    }
    assert seen == {0, 1, 2, 3}


def test_random_numbers_are_even_and_unrelated() -> None:
    positions = numpy.arange(50_000)
    numbers = uniforms(numpy.zeros(50_000, dtype=numpy.int64), positions)
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = numpy.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 99 + 6 * math.sqrt(2 * 99)
    others = uniforms(numpy.ones(50_000, dtype=numpy.int64), positions)
    assert abs(numpy.corrcoef(numbers, others)[0, 1]) < 0.02
    assert abs(numpy.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    extremes = uniforms(numpy.array([-(2**63), 2**63 - 1, -1]), numpy.array([0, 0, 0]))
    assert len(set(extremes.tolist())) == 3


def buffers(slots: int = 8, vocabulary: int = VOCABULARY) -> SlotBuffers:
    groups, places = form_groups([None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=8, element_bytes=4)
    limits = RunnerLimits(max_num_seqs=slots, max_num_batched_tokens=64, max_model_len=128)
    return SlotBuffers(limits, layout, vocabulary)


def sampler_with(starts: list[SequenceStart]) -> tuple[Sampler, numpy.ndarray, numpy.ndarray]:
    slot_buffers = buffers()
    sampler = Sampler(slot_buffers, VOCABULARY)
    for start in starts:
        slot_buffers.tokens[start.slot, : len(start.token_ids)] = start.token_ids
        sampler.start(start)
    return (
        sampler,
        numpy.array([start.slot for start in starts]),
        numpy.array([len(start.token_ids) for start in starts]),
    )


def test_a_seeded_row_does_not_notice_its_neighbours() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(4))
    starts = [
        SequenceStart(slot, f"r{slot}", [1, 2, 3, 4][: slot % 4 + 1], 1, SamplingParams(seed=slot % 3, top_p=0.9))
        for slot in range(6)
    ]
    sampler, slots, lengths = sampler_with(starts)
    together, _ = sampler.sample(logits.clone(), slots, lengths)
    turned, _ = sampler.sample(logits.flip(0), slots[::-1].copy(), lengths[::-1].copy())
    assert together.tolist() == turned[::-1].tolist()
    for index in range(6):
        alone, _ = sampler.sample(logits[index : index + 1].clone(), slots[[index]], lengths[[index]])
        assert alone[0] == together[index]


def test_the_same_seed_at_the_same_output_position_draws_alike_whatever_the_slot_and_prompt() -> None:
    logits = torch.zeros(2, VOCABULARY)
    params = SamplingParams(seed=11)
    starts = [SequenceStart(2, "a", [1, 2, 3], 2, params), SequenceStart(5, "b", [9] * 8, 7, params)]
    sampler, slots, lengths = sampler_with(starts)
    tokens, _ = sampler.sample(logits, slots, lengths)
    assert tokens[0] == tokens[1]


def test_penalties_equal_a_naive_loop() -> None:
    """Rows of unlike lengths and options among rows that have none, all at once."""
    options = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 1.5},
        {"repetition_penalty": 1.3},
    ]
    prompts = [[1, 5, 5, 9, 30], [2], [7, 7], [1, 5, 5, 9, 30], [3, 4]]
    outputs = [[5, 7, 7, 7, 2], [], [7, 2, 2], [5, 7, 7, 7, 2], [4] * 20]
    rows = numpy.array([1, 2, 4, 5, 7])
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(6)) * 3
    expected = logits.clone()
    for row, option, prompt, output in zip(rows, options, prompts, outputs, strict=True):
        params = SamplingParams(**option)
        for token in set(prompt + output):
            value = expected[row, token]
            expected[row, token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for token in set(output):
            expected[row, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    lengths = numpy.array([len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)])
    known = numpy.full((len(rows), lengths.max()), 11, dtype=numpy.int32)  # what lies behind a row's end is no token
    for line, prompt, output in zip(known, prompts, outputs, strict=True):
        line[: len(prompt) + len(output)] = prompt + output
    asked = [SamplingParams(**option) for option in options]
    penalize(logits, rows, known, lengths, numpy.array([len(prompt) for prompt in prompts]), asked)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_bias_and_bans() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 4] = 5.0
    greedy = {"temperature": 0.0}
    starts = [
        SequenceStart(0, "a", [1], 1, SamplingParams(**greedy, logit_bias={7: 50.0, 4: -1.0, 10**6: 3.0})),
        SequenceStart(1, "b", [1, 2], 1, SamplingParams(**greedy, min_tokens=2), (4,)),
        SequenceStart(2, "c", [1, 2, 3], 1, SamplingParams(**greedy, min_tokens=2), (4,)),
    ]
    sampler, slots, lengths = sampler_with(starts)
    tokens, found = sampler.sample(logits, slots, lengths)
    assert tokens[0] == 7
    assert tokens[1] != 4
    assert tokens[2] == 4
    assert found == []


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Neither temperature nor penalties nor filters show in them; the chosen token stands first."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 2
    expected = logits.double().log_softmax(-1)
    starts = [
        SequenceStart(0, "a", [3, 4], 1, SamplingParams(temperature=5.0, repetition_penalty=3.0, seed=1, logprobs=3)),
        SequenceStart(1, "b", [3, 4], 1, SamplingParams(temperature=0.0)),
        SequenceStart(2, "c", [3, 4], 1, SamplingParams(temperature=0.0, logprobs=0)),
    ]
    sampler, slots, lengths = sampler_with(starts)
    tokens, found = sampler.sample(logits.clone(), slots, lengths)
    assert found[1] is None
    for row, count in ((0, 3), (2, 0)):
        entry = found[row]
        assert entry is not None
        assert entry.token_ids[0] == tokens[row]
        assert entry.token_ids[1:] == expected[row].topk(count).indices.tolist()
        torch.testing.assert_close(
            torch.tensor(entry.logprobs).double(), expected[row][entry.token_ids], atol=1e-5, rtol=0
        )
        assert entry.rank == int((expected[row] >= expected[row][tokens[row]]).sum())
    assert logprobs(logits, torch.tensor([0, 0, 0]), [0, 2, 1])[1].token_ids[1:] == expected[1].topk(2).indices.tolist()


def test_a_vocabulary_may_have_fewer_tokens_than_are_asked_for() -> None:
    (found,) = logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), [20])
    assert found.token_ids == [2, 1, 2, 0]
    assert found.rank == 2


@pytest.mark.parametrize("width", [60, 512, 1000, 49152])
def test_likeliest_is_argmax_and_takes_the_first_of_equals(width: int) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(9)).round(decimals=1)
    best = logits.max(-1, keepdim=True).values
    first = [int((row == top).nonzero()[0]) for row, top in zip(logits, best, strict=True)]
    assert likeliest(logits).tolist() == first


def test_plain_greedy_rows_sample_what_they_would_among_others() -> None:
    """Rows of which nothing else is asked take a shorter way; rows that nothing can be sampled for are told by both."""
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    logits[1, 7], logits[2, 9], logits[3] = float("inf"), float("nan"), float("-inf")
    starts = [
        SequenceStart(slot, f"r{slot}", [1, 2], 1, SamplingParams(temperature=0.0, logprobs=0 if slot == 5 else None))
        for slot in range(6)
    ]
    sampler, slots, lengths = sampler_with(starts)
    together, told = sampler.sample(logits.clone(), slots, lengths)
    alone, nothing = sampler.sample(logits[:5].clone(), slots[:5], lengths[:5])
    assert told[5] is not None
    assert nothing == []
    assert alone.tolist() == together[:5].tolist()
    assert (alone[1], alone[2]) == (NO_TOKEN, NO_TOKEN)


def test_of_a_row_without_numbers_earlier_chunks_are_not_trusted_either() -> None:
    rows = [Row(0, 0, 4, True), Row(1, 0, 4, False), Row(2, 8, 4, True)]
    (failed,) = broken_rows(rows, [7, NO_TOKEN])
    assert (failed.slot, failed.earlier_too) == (2, True)
