"""What must hold of `fit` for every model, machine and setting: order, sums and edges, not numbers.

Numbers are held against published and measured ones in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from named_gpus import device_of

from holdfast.checkpoints import StoredTensor
from holdfast.errors import ConfigurationError
from holdfast.hardware import gpus
from holdfast.models import catalogue, describe_config
from holdfast.planner.fit.count import cannot_hold_weights
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.sizing.kv_cost import kv_cost
from holdfast.planner.sizing.sharded_weights import (
    check_parallel,
    parallel_sizes,
    rank_bytes,
    stage_layers,
    total_bytes,
    weights_of,
)

GIB, MIB = 1 << 30, 1 << 20
Ask = Callable[..., Question]
NAMES = (
    "smollm2-135m", "llama-3-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma-3-12b", "gpt-oss-20b",
    "deepseek-v2-lite", "mixtral-8x7b", "phi-3-mini-128k",
)  # fmt: skip
"""Full, windowed and latent layers; many, few and shared KV heads; dense and experts; plain and quantized."""


@cache
def model_of(name: str) -> PlannedModel:
    method, _, plain = name.rpartition("/")
    spec = describe_config(catalogue.find(plain).config)
    found = PlannedModel(name=plain, spec=spec, origin="catalogue")
    return quantized_as(found, method) if method else found


@cache
def stored_in_blocks() -> PlannedModel:
    """A file of Q4_0 that this engine can run: on a CPU it is kept or expanded."""
    found = quantized_as(model_of("smollm2-135m"), "Q4_0")
    assert found.stored is not None
    canonical: dict[str, StoredTensor] = dict(found.stored)
    return replace(found, canonical=canonical)


def gpu_machine(total_bytes: int, count: int = 1, free_bytes: int | None = None) -> Machine:
    device = Device(
        index=0,
        name="rtx4090",
        kind="gpu",
        total_bytes=total_bytes,
        free_bytes=free_bytes or total_bytes,
        gpu=gpus.find("rtx4090"),
    )
    return Machine(devices=tuple(replace(device, index=index) for index in range(count)))


def cpu_machine(free_bytes: int, features: frozenset[str]) -> Machine:
    device = Device(index=0, name="cpu", kind="cpu", total_bytes=free_bytes, free_bytes=free_bytes)
    return Machine(devices=(device,), cpu_features=features)


models = st.sampled_from([*NAMES, "awq/llama-3-8b", "Q4_K_M/llama-3-8b", "fp8/llama-3.1-70b"]).map(model_of)
memories = st.integers(64 * MIB, 200 * GIB)
lengths = st.integers(1, 8192)
settings_strategy = st.builds(
    Settings,
    kv_cache_dtype=st.sampled_from(["auto", "fp8"]),
    max_model_len=st.none() | st.integers(1, 4096),
    max_num_seqs=st.none() | st.integers(1, 512),
    max_num_batched_tokens=st.none() | st.integers(1, 16384),
    utilization=st.none() | st.floats(0.05, 1.0),
    block_tokens=st.sampled_from([1, 8, 16, 32]),
    max_loras=st.integers(0, 4),
)
traffics = st.none() | st.builds(
    Traffic, concurrency=st.integers(1, 64), prompt_tokens=st.integers(1, 2000), output_tokens=st.integers(0, 2000)
)
questions = st.builds(
    Question,
    model=models,
    machine=st.builds(gpu_machine, memories, st.integers(1, 4)),
    settings=settings_strategy,
    traffic=traffics,
)


def with_settings(question: Question, **changes: object) -> Question:
    return replace(question, settings=replace(question.settings, **changes))  # type: ignore[arg-type]


def with_limits(question: Question) -> Question:
    """Every limit set: as it is, or to a default."""
    asked = question.settings
    return with_settings(
        question, max_num_seqs=asked.max_num_seqs or 256, max_num_batched_tokens=asked.max_num_batched_tokens or 8192
    )


def needed_bytes(found: Plan) -> int:
    """Of the rank that takes most: terms and KV."""
    return max(sum(term.nbytes for term in rank.terms) + found.needed_bytes(rank) for rank in found.ranks)


# Memory


@settings(max_examples=examples(60), deadline=None)
@given(questions, memories)
def test_more_memory_never_fits_less(question: Question, more: int) -> None:
    before = fit(question)
    larger = replace(
        question.machine,
        devices=tuple(
            replace(device, total_bytes=device.total_bytes + more, free_bytes=device.free_bytes + more)
            for device in question.machine.devices
        ),
    )
    after = fit(replace(question, machine=larger))
    assert after.fits >= before.fits
    assert after.short_bytes <= before.short_bytes
    # What was asked for may now be done by fewer GPUs, and then those decide what they hold beyond it.
    assert after.tensor_parallel < before.tensor_parallel or after.longest_tokens >= before.longest_tokens
    same = with_settings(replace(question, machine=larger), tensor_parallel=before.tensor_parallel)
    assert fit(same).longest_tokens >= before.longest_tokens


def test_fewer_gpus_are_enough_for_the_traffic_with_more_memory() -> None:
    """Two GPUs hold a longer context, but nobody asked for it: what was asked for fits on one now, and that is said."""
    traffic = Traffic(concurrency=31, prompt_tokens=96, output_tokens=477)
    settings = Settings(block_tokens=1, max_loras=3)

    def found(free: int) -> Plan:
        model = model_of("fp8/llama-3.1-70b")
        return fit(Question(model=model, machine=gpu_machine(free, 2), settings=settings, traffic=traffic))

    before, after = found(90_000_000_000 + 1750 * MIB), found(90_000_000_000 + 3000 * MIB)
    assert (before.fits, before.tensor_parallel) == (True, 2)
    assert (after.fits, after.tensor_parallel) == (True, 1)
    assert after.longest_tokens >= traffic.length
    assert "the fewest GPUs that hold it, of 2" in [decision.reason for decision in after.decisions]


@settings(max_examples=examples(50), deadline=None)
@given(
    st.integers(2000 * MIB, 2500 * MIB),
    st.integers(1, 100 * MIB),
    st.sampled_from([frozenset(), frozenset({"asimddp"}), frozenset({"amx_bf16"})]),
    st.integers(1, 4000),
)
def test_more_ram_never_fits_less(free: int, more: int, features: frozenset[str], length: int) -> None:
    """Weights in blocks are expanded where there is room to spare (here from 2,281 MiB on), but not at the cost of
    sequences. The traffic is as much as the smaller memory holds."""
    limits = Settings(max_num_seqs=8)
    alone = fit(Question(model=stored_in_blocks(), machine=cpu_machine(free, features), settings=limits))
    held = int(alone.concurrency(length))
    assume(held >= 1)
    traffic = Traffic(concurrency=held, prompt_tokens=length, output_tokens=0)
    before, after = (
        fit(Question(model=stored_in_blocks(), machine=cpu_machine(size, features), settings=limits, traffic=traffic))
        for size in (free, free + more)
    )
    assert before.fits
    assert after.fits
    assert after.longest_tokens >= before.longest_tokens


def gpu_of(name: str, total_bytes: int) -> Device:
    return Device(index=9, name=name, kind="gpu", total_bytes=total_bytes, free_bytes=total_bytes, gpu=gpus.find(name))


others = st.none() | st.builds(gpu_of, st.sampled_from(["t4", "rtx3090", "h100-80", "mi300x"]), memories)


@settings(max_examples=examples(60), deadline=None)
@given(questions, others, others, st.integers(0, 4), st.sampled_from([None, 1]))
def test_another_gpu_never_fits_less(
    question: Question, there: Device | None, other: Device | None, place: int, split: int | None
) -> None:
    """A like one, or one of another kind and size, wherever it stands among the others."""
    devices = (*question.machine.devices, *(() if there is None else (there,)))
    question = with_settings(
        replace(question, machine=replace(question.machine, devices=devices)), tensor_parallel=split
    )
    before = fit(question)
    added = replace(devices[0], index=len(devices)) if other is None else other
    more = replace(question.machine, devices=(*devices[:place], added, *devices[place:]))
    after = fit(replace(question, machine=more))
    assert after.fits >= before.fits
    assert after.short_bytes <= before.short_bytes
    # What was asked for may now be done by fewer GPUs, and then those decide what they hold beyond it.
    assert after.tensor_parallel < before.tensor_parallel or after.longest_tokens >= before.longest_tokens


def test_a_small_gpu_beside_a_large_one_takes_nothing_away(ask: Ask) -> None:
    def found(name: str, *names: str, **settings: object) -> Plan:
        alone = ask(name, "h100-80", **settings)
        devices = tuple(device_of(gpu, index) for index, gpu in enumerate(names))
        return fit(replace(alone, machine=Machine(devices=devices)))

    for name in ("qwen2.5-14b", "llama-3.1-8b"):
        alone, beside = found(name, "h100-80"), found(name, "t4", "h100-80")
        assert beside.fits
        assert (beside.kv_tokens, beside.dtype) == (alone.kv_tokens, "bfloat16")
        assert [rank.device.index for rank in beside.ranks] == [1]
        said = {decision.field: decision for decision in beside.decisions}
        assert "H100" in str(said["gpus"].value)
        assert "left out: Tesla T4 (14.56 GiB)" in said["gpus"].reason
    asked = found("llama-3.1-8b", "t4", "h100-80", tensor_parallel=1)
    assert "H100" in asked.ranks[0].device.name
    # Together only where both are needed: then in what both compute in.
    both = found("llama-3.1-8b", "t4", "h100-80", tensor_parallel=2)
    assert (both.dtype, len(both.ranks)) == ("float16", 2)


@settings(max_examples=examples(60), deadline=None)
@given(models, st.lists(memories, min_size=2, max_size=3), memories, st.integers(0, 3))
def test_another_stage_can_be_any_gpu(model: PlannedModel, sizes: list[int], more: int, place: int) -> None:
    devices = [gpu_of("rtx4090", size) for size in sizes]
    asked = Settings(tensor_parallel=1, pipeline_parallel=2)
    before, after = (
        fit(Question(model=model, machine=Machine(devices=tuple(given)), settings=asked))
        for given in (devices, [*devices[:place], gpu_of("rtx4090", more), *devices[place:]])
    )
    assert after.fits >= before.fits
    assert after.longest_tokens >= before.longest_tokens


@settings(max_examples=examples(50), deadline=None)
@given(questions, st.floats(0.0, 0.5))
def test_more_utilization_never_fits_less(question: Question, more: float) -> None:
    share = question.settings.utilization or 0.5
    before = fit(with_settings(question, utilization=share))
    after = fit(with_settings(question, utilization=min(1.0, share + more)))
    assert after.fits >= before.fits
    assert after.short_bytes <= before.short_bytes


@settings(max_examples=examples(50), deadline=None)
@given(questions, st.integers(0, 24 * GIB))
def test_no_more_than_is_free_is_budgeted(question: Question, free: int) -> None:
    device = replace(question.machine.devices[0], free_bytes=min(free, question.machine.devices[0].total_bytes))
    found = fit(replace(question, machine=replace(question.machine, devices=(device,))))
    assert all(rank.budget_bytes <= rank.device.free_bytes for rank in found.ranks)


# What is asked for


@settings(max_examples=examples(60), deadline=None)
@given(questions, st.integers(1, 2048), st.integers(0, 2048))
def test_a_longer_context_never_needs_less(question: Question, length: int, more: int) -> None:
    """Limits that nobody set give way before it does not fit, and then less is needed: they are held for the count."""
    for asked in (question, with_limits(question)):
        shorter, longer = (
            fit(with_settings(asked, max_model_len=size, tensor_parallel=1)) for size in (length, length + more)
        )
        assert longer.short_bytes >= shorter.short_bytes
        assert longer.fits <= shorter.fits
        assert asked is question or needed_bytes(longer) >= needed_bytes(shorter)


@settings(max_examples=examples(50), deadline=None)
@given(questions, st.integers(1, 512), st.integers(0, 512))
def test_more_sequences_never_need_less(question: Question, count: int, more: int) -> None:
    """Tokens a step that nobody set give way before it does not fit: they are held for the count."""
    for asked in (question, with_limits(question)):
        fewer, many = (
            fit(with_settings(asked, max_num_seqs=size, tensor_parallel=1)) for size in (count, count + more)
        )
        assert many.short_bytes >= fewer.short_bytes
        assert many.fits <= fewer.fits
        assert many.longest_tokens <= fewer.longest_tokens
        if asked is not question:
            assert needed_bytes(many) >= needed_bytes(fewer)
            assert many.kv_tokens <= fewer.kv_tokens


@settings(max_examples=examples(50), deadline=None)
@given(questions)
def test_fp8_kv_costs_half_and_never_fits_less(question: Question) -> None:
    plain, small = (
        fit(with_settings(question, kv_cache_dtype=dtype, tensor_parallel=1)) for dtype in ("bfloat16", "fp8")
    )
    assert plain.kv_bytes_per_token == 2 * small.kv_bytes_per_token
    assert small.fits >= plain.fits


@settings(max_examples=examples(60), deadline=None)
@given(questions)
def test_what_is_not_even_counted_does_not_fit(question: Question) -> None:
    if cannot_hold_weights(question):
        assert not fit(question).fits


@settings(max_examples=examples(60), deadline=None)
@given(questions)
def test_the_verdict_follows_from_the_terms(question: Question) -> None:
    found = fit(question)
    short = max(
        found.needed_bytes(rank) + sum(term.nbytes for term in rank.terms) - rank.budget_bytes for rank in found.ranks
    )
    # While a quantized model is loaded, more may be missing.
    assert found.short_bytes == max(0, short, *(rank.loading_short_bytes for rank in found.ranks))
    assert found.fits == (found.short_bytes == 0)
    for rank in found.ranks:
        side_by_side = rank.kv.needed_bytes(found.required_sequences, found.required_tokens)
        assert found.needed_bytes(rank) >= side_by_side >= rank.kv.sequence_bytes(found.required_tokens)
        assert found.needed_bytes(rank) >= rank.kv.sequence_bytes(question.settings.max_model_len or 0)
    assert all(term.nbytes > 0 for rank in found.ranks for term in rank.terms)
    assert found.limits.max_model_len <= question.model.spec.max_position


@settings(max_examples=examples(50), deadline=None)
@given(questions)
def test_the_longest_context_fits_when_asked_for_and_one_more_block_does_not(question: Question) -> None:
    question = replace(question, traffic=None)
    found = fit(with_settings(question, max_model_len=None, tensor_parallel=1))
    if not found.longest_tokens:
        return
    assert fit(with_settings(question, max_model_len=found.longest_tokens, tensor_parallel=1)).fits
    beyond = found.longest_tokens + question.settings.block_tokens
    if beyond <= question.model.spec.max_position:
        # Asked for the model's own length, tables are as large as they get; a shorter context leaves room for more.
        room = min(rank.room_bytes for rank in found.ranks)
        assert found.ranks[0].kv.sequence_bytes(beyond) > room


# Ranks


@settings(max_examples=examples(60), deadline=None)
@given(models, st.integers(1, 64))
def test_every_listed_size_works_and_no_other(model: PlannedModel, size: int) -> None:
    listed = parallel_sizes(model.spec)
    assert 1 in listed
    machine = gpu_machine(80 * GIB, size)
    question = Question(model=model, machine=machine, settings=Settings(tensor_parallel=size))
    if size in listed:
        check_parallel(model.spec, size, 1)
        assert len(fit(question).ranks) == size
        return
    with pytest.raises(ConfigurationError) as refused:
        fit(question)
    assert (refused.value.code, refused.value.field) == ("HF131", "tensor_parallel_size")
    assert refused.value.needed is not None
    assert all(str(one) in refused.value.needed for one in listed)


@settings(max_examples=examples(50), deadline=None)
@given(models, st.data())
def test_ranks_hold_the_whole_model_together(model: PlannedModel, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(parallel_sizes(model.spec)))
    stages = data.draw(st.integers(1, min(8, len(model.spec.layers))))
    weights = weights_of(model, dtype="bfloat16")
    whole = total_bytes(weights)
    held = [
        rank_bytes(weights, model.spec, tensor_parallel=size, layers=layers)
        for layers in stage_layers(len(model.spec.layers), stages)
    ]
    assert size * sum(held) >= whole
    assert max(held) <= whole
    if size == 1 and not model.spec.tied_embeddings:
        assert sum(held) == whole


@settings(max_examples=examples(50), deadline=None)
@given(models, st.data())
def test_a_larger_split_never_holds_more_a_rank(model: PlannedModel, data: st.DataObject) -> None:
    sizes = parallel_sizes(model.spec)
    fewer, more = sorted(data.draw(st.tuples(st.sampled_from(sizes), st.sampled_from(sizes))))
    weights = weights_of(model, dtype="bfloat16")
    held = [rank_bytes(weights, model.spec, tensor_parallel=size) for size in (fewer, more)]
    assert held[1] <= held[0] * 1.01  # The vocabulary is padded to a multiple of the ranks.


# KV


@settings(max_examples=examples(200), deadline=None)
@given(models, st.integers(0, 200_000), st.integers(0, 10_000), st.integers(1, 64), st.integers(0, 8192))
def test_kv_grows_with_the_sequence(model: PlannedModel, tokens: int, more: int, block: int, step: int) -> None:
    cost = kv_cost(model.spec, element_bytes=2, state_bytes=2, block_tokens=block, step_tokens=step)
    one, longer = cost.sequence_bytes(tokens), cost.sequence_bytes(tokens + more)
    assert longer >= one
    assert one >= tokens * cost.growing_bytes
    grown = longer - one
    assert grown <= (more + block) * (cost.growing_bytes + sum(size for _, size in cost.windows))


@settings(max_examples=examples(200), deadline=None)
@given(models, st.integers(0, 100 * GIB), st.sampled_from([1, 16, 32]))
def test_the_longest_sequence_is_the_longest(model: PlannedModel, pool: int, block: int) -> None:
    cost = kv_cost(model.spec, element_bytes=2, state_bytes=2, block_tokens=block, step_tokens=512)
    longest = cost.longest(pool, model.spec.max_position)
    assert cost.sequence_bytes(longest) <= pool or longest == 0
    assert longest == model.spec.max_position or cost.sequence_bytes(longest + 1) > pool


@settings(max_examples=examples(50), deadline=None)
@given(models, st.data())
def test_ranks_keep_all_kv_heads_together(model: PlannedModel, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(parallel_sizes(model.spec)))
    whole = kv_cost(model.spec, element_bytes=2, state_bytes=2)
    rank = kv_cost(model.spec, element_bytes=2, state_bytes=2, tensor_parallel=size)
    assert whole.growing_bytes <= size * rank.growing_bytes
    assert rank.growing_bytes <= whole.growing_bytes
    if all(layer.latent is None for layer in model.spec.layers) and model.spec.kv_heads % size == 0:
        assert size * rank.growing_bytes == whole.growing_bytes
