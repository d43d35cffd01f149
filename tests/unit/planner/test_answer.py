"""Whole answers: the configurations of published guides, the JSON document, and what more memory may never do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.models import catalogue, describe_config
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.report.compare import compare_lines
from holdfast.planner.report.json import VERSION
from holdfast.planner.report.text import lines
from holdfast.planner.sizing.sharded_weights import parallel_sizes
from holdfast.units import GIB, counted

Ask = Callable[..., Question]
TOP = {
    "version", "fits", "short_bytes", "weights_bytes", "kv_bytes_per_token", "kv_bytes_fixed_per_sequence", "kv_tokens",
    "max_model_len", "concurrency", "devices", "decisions", "ways_out", "commands", "throughput", "safe", "max",
    "warnings", "interval",
}  # fmt: skip


def codes(found: PlanAnswer) -> set[str]:
    return {warning.code for warning in found.warnings}


# Configurations that guides print


def test_24_gb_and_llama_3_8b(ask: Ask) -> None:
    found = answer(ask("llama-3-8b", "rtx4090", utilization=0.85, max_model_len=8192, max_num_seqs=32))
    assert found.fits
    assert found.max_model_len == 8192
    assert 2.5 < found.concurrency < 4
    assert codes(found) == {"HFW25"}, "32 sequences of 8,192 tokens are not held at once"


def test_40_gb_and_llama_3_70b_awq_is_refused_with_what_would_do(ask: Ask) -> None:
    question = ask("llama-3-70b-awq", "a100-40", utilization=0.88, max_model_len=8192, max_num_seqs=16)
    found = answer(question)
    assert not found.fits
    assert found.fit.weights_bytes > found.fit.ranks[0].budget_bytes
    assert found.fit.short_bytes > 4 * GIB
    assert [way.kind for way in found.ways_out if way.available][:2] == ["tiers", "more_gpus"], "RAM costs less"


def test_24_gb_and_llama_3_70b_does_not_fit_in_four_bits_or_more(ask: Ask) -> None:
    found = answer(ask("llama-3-70b", "rtx4090"))
    assert not found.fits
    variants = [way.settings for way in found.ways_out if way.kind == "quantization"]
    assert variants == [{"quantization": "IQ2_XXS"}]
    assert "tiers" in {way.kind for way in found.ways_out}


@pytest.mark.parametrize(("count", "fits"), [(1, False), (2, True), (4, True)])
def test_70b_over_gpus(ask: Ask, count: int, fits: bool) -> None:
    found = answer(ask("llama-3-70b", "h100-80", count=count, utilization=0.95))
    assert found.fits == fits
    if fits:
        assert found.fit.tensor_parallel == (2 if count == 2 else found.fit.tensor_parallel)


def test_405b_over_eight_times_four(ask: Ask) -> None:
    found = answer(ask("llama-3.1-405b", "h100-80", count=32, tensor_parallel=8, pipeline_parallel=4))
    assert found.fits
    assert len(found.fit.ranks) == 32
    assert {rank.stage for rank in found.fit.ranks} == {0, 1, 2, 3}
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 4" in found.commands["vllm"].text


def test_two_models_side_by_side(ask: Ask) -> None:
    """CUDA_VISIBLE_DEVICES=0,1 and 2,3: each plan sees two GPUs."""
    for model in ("llama-3-70b", "qwen2.5-72b"):
        found = answer(ask(model, "h100-80", count=2, utilization=0.95))
        assert found.fits
        assert found.fit.tensor_parallel == 2


def test_traffic_takes_the_fewest_gpus_that_serve_it(ask: Ask) -> None:
    """The theoretical context is not what is planned for."""
    light = answer(ask("llama-3.1-8b", "rtx4090", count=4, traffic=(4, 1000, 200)))
    assert light.fit.tensor_parallel == 1
    assert answer(ask("llama-3.1-8b", "rtx4090", count=4)).fit.tensor_parallel == 2


@pytest.mark.parametrize(
    ("model", "works", "does_not"),
    [
        ("gpt-oss-120b", (2, 4, 8), (3,)),
        ("qwen3-235b-a22b-fp8", (2, 4), (8,)),
        ("llama-3-70b-awq", (2, 4, 16), (6, 64)),
    ],
)
def test_sizes_that_engines_can_split_into(
    ask: Ask, model: str, works: tuple[int, ...], does_not: tuple[int, ...]
) -> None:
    """vLLM pads gpt-oss's experts, and refuses FP8 blocks of 128 in experts of 1536 / 8 columns."""
    sizes = parallel_sizes(ask(model, "h200").model.spec)
    assert set(works) <= set(sizes)
    assert not set(does_not) & set(sizes)


# Configurations to start from


def test_safe_leaves_room_for_every_error(ask: Ask) -> None:
    found = answer(ask("llama-3.1-8b", "rtx4090"))
    assert found.safe is not None
    assert found.max is not None
    safe = found.safe.fit
    assert safe.utilization == 0.85
    rank = safe.ranks[0]
    assert found.safe.max_num_seqs * rank.kv.sequence_bytes(safe.limits.max_model_len) <= (
        rank.room_bytes - rank.uncertain_bytes
    )
    assert found.max.fit.utilization == 0.95
    assert found.max.fit.limits.max_model_len > found.max_model_len > safe.limits.max_model_len
    for one in (found.safe, found.max):
        assert fit(one.fit.question).fits


@pytest.mark.parametrize(("model", "free_gib"), [("llama-3.1-8b", 64), ("smollm2-135m", 2), ("llama-3.2-1b", 8)])
def test_safe_is_safe_on_a_cpu(ask: Ask, cpu: Callable[..., Device], model: str, free_gib: int) -> None:
    """The pool has a usual size there, and is smaller for a shorter context."""
    found = answer(ask(model, device=cpu(free_gib)))
    assert found.safe is not None
    held = found.safe.fit
    assert found.safe.max_num_seqs * held.limits.max_model_len <= held.kv_tokens
    assert found.safe.max_num_seqs == held.limits.max_num_seqs
    assert found.safe.reason.startswith(f"{found.safe.max_num_seqs} sequence")


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("qwen3-8b", "l4", {"max_num_seqs": 256, "max_model_len": 8192}),
        ("llama-3.1-8b", "rtx4090", {"max_num_seqs": 32}),
        ("qwen3-32b-awq", "rtx4090", {"max_num_seqs": 8, "max_num_batched_tokens": 512, "utilization": 0.95}),
        ("llama-3.1-8b", "rtx4090", {"traffic": (4, 1000, 200)}),
    ],
)
def test_max_claims_no_more_than_its_pool_holds(ask: Ask, model: str, gpu: str, settings: dict[str, Any]) -> None:
    found = answer(ask(model, gpu, **settings))
    assert found.max is not None
    of, each = found.max.fit, found.max.fit.usual_tokens
    assert found.max.max_num_seqs <= of.concurrency(each)
    assert f"{counted(found.max.max_num_seqs, 'sequence')} of {each:,} tokens" in found.max.reason
    assert of.limits.max_num_seqs == found.max.max_num_seqs


def test_safe_serves_the_traffic(ask: Ask) -> None:
    found = answer(ask("llama-3.1-8b", "h100-80", traffic=(16, 1800, 200)))
    assert found.safe is not None
    assert found.safe.max_num_seqs == 16
    assert found.safe.fit.limits.max_model_len == 2048


def test_safe_lets_some_wait_where_it_is_tight(ask: Ask) -> None:
    found = answer(ask("llama-3.1-8b", "rtx4090", traffic=(13, 2000, 500)))
    assert found.fits
    assert found.safe is not None
    assert found.safe.max_num_seqs < 13
    assert "is queued" in found.safe.reason


# The document


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "llama-3-8b", "gpu": "rtx4090"},
        {"model": "llama-3-70b", "gpu": "rtx4090", "ram_bytes": 64 * GIB},
        {"model": "gemma-3-12b", "gpu": "l40s", "count": 2, "traffic": (8, 2000, 500)},
        {"model": "qwen3-next-80b-a3b", "gpu": "h200"},
    ],
)
def test_the_document_has_its_keys_and_is_json(ask: Ask, asked: dict[str, Any]) -> None:
    found = answer(ask(asked.pop("model"), asked.pop("gpu"), **asked))
    document = json.loads(json.dumps(found.to_json()))
    assert set(document) >= TOP
    assert document["version"] == VERSION
    assert document["fits"] == found.fits
    for device in document["devices"]:
        assert set(device) >= {"total_bytes", "budget_bytes", "terms"}
        assert device["budget_bytes"] <= device["total_bytes"]
        if document["fits"] and device["used"]:
            assert sum(device["terms"].values()) == device["budget_bytes"]
    if document["fits"]:
        assert set(document["commands"]) == {"holdfast", "vllm", "sglang", "llama.cpp"}
        assert document["ways_out"] == []
        assert document["interval"]["kv_tokens"][0] <= document["kv_tokens"] <= document["interval"]["kv_tokens"][1]
    else:
        assert document["short_bytes"] > 0
        assert document["ways_out"]
        for way in document["ways_out"]:
            assert {"kind", "change", "settings", "available", "commands"} <= set(way)


def test_windows_cost_nothing_once_they_are_full(ask: Ask) -> None:
    """Gemma 3: five of six layers see 1,024 tokens. What grows is one sixth, what stays is the windows."""
    document = answer(ask("gemma-3-12b", "h100-80")).to_json()
    assert document["kv_bytes_per_token"] == 8 * 2 * 8 * 256 * 2
    assert document["kv_bytes_fixed_per_sequence"] == 40 * 2 * 8 * 256 * 2 * 1024


def test_copies_on_ranks_are_no_cost_of_the_model(ask: Ask) -> None:
    """Gemma 3 1B has one KV head: every rank keeps it whole."""
    asked = (ask("gemma-3-1b", "h100-80", count=size, tensor_parallel=size, runs_here=False) for size in (1, 4))
    one, four = (answer(question).to_json() for question in asked)
    for key in ("kv_bytes_per_token", "kv_bytes_fixed_per_sequence"):
        assert one[key] == four[key] == one[f"{key}_all_ranks"]
        assert four[f"{key}_all_ranks"] == 4 * one[key]


def test_every_device_and_every_way_out_has_the_same_keys(ask: Ask) -> None:
    document = answer(ask("llama-3.1-8b", "h100-80", count=3, tensor_parallel=2)).to_json()
    assert [device["used"] for device in document["devices"]] == [True, True, False]
    assert len({tuple(sorted(device)) for device in document["devices"]}) == 1
    ways = answer(ask("llama-3.1-70b", "rtx4090", ram_bytes=256 << 30)).to_json()["ways_out"]
    assert {"tiers", "more_gpus"} <= {way["kind"] for way in ways}
    assert len({tuple(sorted(way)) for way in ways}) == 1
    assert all(way["kv_tokens"] for way in ways), "Holdfast does these tiers: a pool is planned"
    two = answer(ask("llama-3.1-70b", "rtx4090", count=2, tensor_parallel=2, ram_bytes=256 << 30)).to_json()["ways_out"]
    assert all((way["kv_tokens"] is None) == (way["tiers"] is not None) for way in two)


def test_what_a_gpu_plan_chose_is_said(ask: Ask) -> None:
    def said(*arguments: str, **settings: object) -> dict[str, str]:
        document = answer(ask(*arguments, **settings)).to_json()
        return {decision["field"]: f"{decision['value']}: {decision['reason']}" for decision in document["decisions"]}

    on_t4 = said("qwen2.5-0.5b", "t4")
    assert on_t4["dtype"].startswith("float16: ")
    assert "does not support bfloat16" in on_t4["dtype"]
    assert on_t4["kv_cache_dtype"] == "float16: same as dtype"
    assert on_t4["max_num_batched_tokens"] == "8,192: the default"
    assert not {"dtype", "kv_cache_dtype"} & set(said("qwen2.5-0.5b", "l4", dtype="half", kv_cache_dtype="fp8"))
    too_large = said("llama-3.1-405b", "rtx4090", count=2)
    assert "that hold it" not in too_large["tensor_parallel_size"]
    assert "does not fit" in too_large["tensor_parallel_size"]


def test_every_decision_has_a_reason(ask: Ask) -> None:
    document = answer(ask("llama-3.1-70b", "h100-80", count=8)).to_json()
    assert {"max_model_len", "max_num_seqs", "tensor_parallel_size", "budget"} <= {
        decision["field"] for decision in document["decisions"]
    }
    assert all(decision["reason"] for decision in document["decisions"])


def test_idle_devices_are_in_the_document(ask: Ask) -> None:
    document = answer(ask("qwen2.5-7b", "h100-80", count=2)).to_json()
    assert [device["used"] for device in document["devices"]] == [True, False]


# What must hold of any plan

MODELS = ("smollm2-135m", "llama-3-8b", "llama-3.1-70b", "gemma-3-12b", "qwen3-30b-a3b", "deepseek-v2-lite")


@cache
def model_of(name: str) -> PlannedModel:
    return PlannedModel(name=name, spec=describe_config(catalogue.find(name).config), origin="catalogue")


@st.composite
def questions(draw: st.DrawFn) -> Question:
    total = draw(st.integers(2, 200)) * GIB
    kind = draw(st.sampled_from(["gpu", "cpu"]))
    count = draw(st.sampled_from([1, 2, 4])) if kind == "gpu" else 1
    device = Device(index=0, name="a device", kind=kind, total_bytes=total, free_bytes=total)
    traffic = st.builds(
        Traffic, concurrency=st.integers(1, 200), prompt_tokens=st.integers(1, 2000), output_tokens=st.integers(1, 500)
    )
    return Question(
        model=model_of(draw(st.sampled_from(MODELS))),
        machine=Machine(devices=tuple(replace(device, index=index) for index in range(count))),
        settings=Settings(
            max_model_len=draw(st.sampled_from([None, 1024, 4096])),
            max_num_seqs=draw(st.sampled_from([None, 4, 256])),
            utilization=draw(st.sampled_from([None, 0.5, 0.95])),
        ),
        traffic=draw(st.one_of(st.none(), traffic)),
    )


def grown(question: Question, more_bytes: int) -> Question:
    devices = tuple(
        replace(device, total_bytes=device.total_bytes + more_bytes, free_bytes=device.free_bytes + more_bytes)
        for device in question.machine.devices
    )
    return replace(question, machine=replace(question.machine, devices=devices))


@given(questions(), st.integers(1, 64 * GIB))
@settings(max_examples=examples(60), deadline=None)
def test_more_memory_never_fits_less(question: Question, more_bytes: int) -> None:
    before, after = fit(question), fit(grown(question, more_bytes))
    assert after.fits or not before.fits
    stated = question.traffic is not None or question.settings.max_model_len is not None
    if not stated or before.tensor_parallel == after.tensor_parallel:
        # What was asked for, and fewer GPUs can do, is done by fewer.
        assert after.longest_tokens >= before.longest_tokens
        assert after.limits.max_model_len >= before.limits.max_model_len
    if before.tensor_parallel == after.tensor_parallel:
        # Limits that are not set grow with the memory up to their defaults, and the pool after them.
        assert after.kv_tokens >= before.kv_tokens or after.limits.max_num_batched_tokens > (
            before.limits.max_num_batched_tokens
        )
        assert after.short_bytes <= before.short_bytes


@given(questions())
@settings(max_examples=examples(40), deadline=None)
def test_terms_and_room_are_the_budget(question: Question) -> None:
    found = fit(question)
    for rank in found.ranks:
        taken = sum(term.nbytes for term in rank.terms)
        assert not found.fits or taken + rank.pool_bytes + rank.unused_bytes == rank.budget_bytes
        assert rank.room_bytes <= rank.budget_bytes - taken
        assert rank.budget_bytes <= rank.device.free_bytes
    assert found.fits == (found.short_bytes == 0)
    if found.fits:
        assert found.concurrency(found.required_tokens) >= found.required_sequences


@given(questions())
@settings(max_examples=examples(15), deadline=None)
def test_any_answer_is_json_and_its_configurations_fit(question: Question) -> None:
    found = answer(question)
    json.dumps(found.to_json())
    for one in (found.safe, found.max):
        if one is not None:
            assert fit(one.fit.question).fits


# Requests longer than the model reads


def test_requests_longer_than_the_model_reads_do_not_fit(ask: Ask) -> None:
    found = answer(ask("llama-3-8b", "h100-80", traffic=(4, 9505, 500)))
    assert not found.fits
    document = found.to_json()
    assert document["fits"] is False
    assert document["problem"] == "requests reach 10,005 tokens, but the model's context length is 8,192"
    assert document["safe"] is document["max"] is document["throughput"] is None
    assert document["commands_of"] == "shorter_requests"
    shown = lines(found, width=120)
    assert "does not fit: requests reach 10,005 tokens" in shown[0]
    of_this_model = shown[: shown.index("Remedies, in order of preference")]
    assert not any("sequences of 10,005" in line for line in of_this_model)
    assert "too long" in "\n".join(compare_lines([found, found], width=120))


def test_kv_a_token_is_the_models_once_and_with_its_copies(ask: Ask) -> None:
    """8 KV heads on 16 ranks lie there twice; a latent lies whole on each."""
    for model, count, copies in (("llama-3.1-70b", 8, 1), ("llama-3.1-70b", 16, 2), ("deepseek-v2-lite", 4, 4)):
        document = answer(ask(model, "h200", count=count, tensor_parallel=count)).to_json()
        once, whole = document["kv_bytes_per_token"], document["kv_bytes_per_token_all_ranks"]
        assert whole == copies * once
        alone = answer(ask(model, "h200")).to_json()
        assert alone["kv_bytes_per_token"] == once == alone["kv_bytes_per_token_all_ranks"]


def test_commands_carry_their_notes_everywhere(ask: Ask) -> None:
    found = answer(ask("llama-3-70b", "rtx4090"), engine="vllm==9.9")
    for part in (found.to_json(), *found.to_json()["ways_out"]):
        assert set(part["command_notes"]) == set(part["commands"])
    notes = found.to_json()["command_notes"]["vllm"]["notes"]
    assert "vLLM 9.9" in notes[0]


@pytest.mark.parametrize(
    ("model", "gpu", "settings"),
    [
        ("qwen3-8b", "l4", {"max_model_len": 29000}),
        ("qwen3-8b", "l4", {"max_model_len": 22400, "max_num_seqs": 4, "max_num_batched_tokens": 8192}),
    ],
)
def test_a_warning_never_points_at_a_safe_configuration_that_is_not_there(
    ask: Ask, model: str, gpu: str, settings: dict[str, Any]
) -> None:
    found = answer(ask(model, gpu, runs_here=False, **settings))
    (close,) = [warning for warning in found.warnings if warning.code == "HFW30"]
    assert found.safe is None
    assert "safe configuration" not in (close.fix or "")
    words = shlex.split((close.fix or "").removesuffix(" leaves that margin"))
    assert words, close
    changed = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {name: int(value) if value.isdigit() else value for name, value in changed.items()}
    assert answer(ask(model, gpu, **{**settings, **numbers})).safe is not None


def test_a_warning_points_at_the_safe_configuration_that_is_there(ask: Ask) -> None:
    found = answer(ask("qwen3-8b", "l4", traffic=(8, 1500, 532)))
    for warning in found.warnings:
        if warning.code == "HFW30":
            assert found.safe is not None
            assert "safe configuration" in (warning.fix or "")


def test_printed_it_is_the_table_and_its_repr_is_a_line(ask: Ask) -> None:
    found = answer(ask("llama-3.1-8b", "rtx4090"))
    assert str(found) == "\n".join(lines(found))
    assert repr(found) == f"<PlanAnswer meta-llama/Llama-3.1-8B-Instruct on {found.fit.ranks[0].device.name}: fits>"
    short = answer(ask("llama-3.1-70b", "rtx4090"))
    assert "GiB short; runs with 73 of 80 layers streamed from RAM, given " in repr(short)
    assert repr(answer(ask("llama-3.1-70b", "rtx4090", count=2))).endswith("GiB short>")


def test_replicas_are_counted(ask: Ask) -> None:
    eight = answer(ask("llama-3.1-8b", "mi300x", count=8))
    assert eight.to_json()["replicas"] == 8
    assert "8 servers like this" in "\n".join(lines(eight))
    assert answer(ask("llama-3.1-8b", "mi300x")).to_json()["replicas"] == 1
    assert answer(ask("llama-3.1-405b", "rtx4090", count=2)).to_json()["replicas"] == 0


# The engine that was asked for


def test_the_command_that_is_printed_is_of_the_best_way_out(ask: Ask) -> None:
    question = ask("olmo-2-32b", "rtx4090")
    for engine in ("vllm", "holdfast"):
        assert {"more_gpus", "bigger_gpu"} <= {way.kind for way in answer(question, engine=engine).ways_out}
    found = answer(question, engine="holdfast")
    assert found.best is not None
    assert found.commands["holdfast"].available
    assert found.commands_of == found.ways_out[found.best].kind == "quantization"
    brief = lines(found, brief=True, width=300)
    assert f"{found.best + 1}. {found.ways_out[found.best].change}" in "\n".join(brief)
    assert any(line.startswith(f"Commands of remedy {found.best + 1}: ") for line in brief)
