"""Ways out: in their order, true, and none that does not fit when it is planned again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.hardware import gpus
from holdfast.models import catalogue, describe_config
from holdfast.planner.fit import Fit, Question, fit
from holdfast.planner.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.tiers import RAM_SHARE, place
from holdfast.planner.way import WayOut
from holdfast.planner.ways_hardware import device_of
from holdfast.planner.ways_out import ways_out
from holdfast.units import GIB

Ask = Callable[..., Question]
ORDER = (
    "utilization", "context", "sequences", "idle_gpus", "configuration", "kv_cache_dtype", "quantization", "more_gpus",
    "tiers", "bigger_gpu", "more_ram", "smaller_model",
)  # fmt: skip


def kinds(found: Fit) -> list[str]:
    return list(dict.fromkeys(way.kind for way in ways_out(found)))


def only(found: Fit, kind: str) -> list[WayOut]:
    return [way for way in ways_out(found) if way.kind == kind]


def check(way: WayOut, question: Question) -> None:
    """Planned anew, from the question that the way says it is."""
    if way.tiers is None:
        again = fit(way.fit.question)
        assert again.fits, (way.kind, way.change)
        assert again.short_bytes == 0
        return
    assert not way.available
    assert not way.fit.fits
    rank = min(way.fit.ranks, key=lambda one: one.budget_bytes)
    assert way.tiers.gpu_bytes <= rank.budget_bytes
    if question.machine.ram_bytes is not None:
        assert way.tiers.ram_bytes <= question.machine.ram_bytes * RAM_SHARE
    assert way.tiers.moved_bytes > 0


def test_nothing_is_offered_where_it_fits(ask: Ask) -> None:
    assert ways_out(fit(ask("llama-3.1-8b", "h100-80"))) == ()


def test_configuration_first_a_smaller_model_last(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=40000))
    order = kinds(found)
    assert order == sorted(order, key=ORDER.index)
    assert order[0] == "utilization"
    assert order[-1] == "smaller_model"


def test_the_context_offered_is_the_longest(ask: Ask) -> None:
    question = ask("llama-3.1-8b", "rtx4090", max_model_len=131072)
    (way,) = only(fit(question), "context")
    length = way.settings["max_model_len"]
    assert isinstance(length, int)
    assert fit(way.fit.question).fits
    longer = replace(question, settings=replace(question.settings, max_model_len=length + 16))
    assert not fit(longer).fits


def test_70b_on_24_gb_needs_more_gpus_or_tiers(ask: Ask) -> None:
    found = fit(ask("llama-3-70b", "rtx4090", ram_bytes=64 * GIB))
    assert not found.fits
    assert kinds(found) == ["more_gpus", "tiers", "bigger_gpu", "smaller_model"]
    (tiers,) = only(found, "tiers")
    assert tiers.tiers is not None
    assert tiers.tiers.one is not None
    assert "no tiers yet" in (tiers.note or "")
    assert 20 <= tiers.tiers.resident_layers <= 45
    assert 0.5 < tiers.tiers.one.tokens_per_s < 3


def test_tiers_need_the_ram(ask: Ask) -> None:
    assert only(fit(ask("llama-3-70b", "rtx4090", ram_bytes=8 * GIB)), "tiers") == []


def test_tiers_move_what_the_physics_say(ask: Ask, gpu: Callable[..., Device]) -> None:
    """Int4 70B in 22.93 GiB over PCIe 5: about half of 80 layers stay, and 32 sequences share every byte moved."""
    budget = int(22.93 * GIB)
    device = gpu("h100-80", budget_bytes=budget)
    question = ask("llama-3-70b-awq", device=device, traffic=(32, 128, 128), max_num_batched_tokens=512)
    found = place(fit(question))
    assert found is not None
    assert found.one is not None
    assert found.at_batch is not None
    assert 35 <= found.resident_layers <= 45
    assert found.moved_bytes / 1e9 == pytest.approx(17.8, rel=0.15)
    assert found.one.high == pytest.approx(3.08, rel=0.03), "54.9 GB/s, and the link never idles"
    assert found.at_batch.high == pytest.approx(99, rel=0.03)


def test_awq_70b_on_40_gb_does_not_fit_and_two_hold_it(ask: Ask) -> None:
    found = fit(ask("llama-3-70b-awq", "a100-40", utilization=0.88, max_model_len=8192, max_num_seqs=16))
    assert not found.fits
    assert found.weights_bytes / GIB == pytest.approx(37, abs=0.2)
    first = only(found, "more_gpus")[0]
    assert first.settings["gpus"] == 2
    assert first.settings["tensor_parallel_size"] == 2


def test_published_variants_come_before_what_has_to_be_made(ask: Ask) -> None:
    ways = only(fit(ask("llama-3.1-8b", "rtx3060")), "quantization")
    assert ways
    assert all(catalogue.find(str(way.settings["model"])).quantized for way in ways)
    made = only(fit(ask("llama-3-8b", "rtx3060")), "quantization")
    assert [way.settings["quantization"] for way in made] == ["fp8", "nf4"]


def test_fp8_kv_only_where_the_gpu_has_it(ask: Ask) -> None:
    """A 4090 has FP8 units, a 3090 of the same size has none."""
    settings = {"max_model_len": 60000}
    assert only(fit(ask("llama-3.1-8b", "rtx4090", **settings)), "kv_cache_dtype")
    assert not only(fit(ask("llama-3.1-8b", "rtx3090", **settings)), "kv_cache_dtype")


def test_traffic_that_is_too_much_may_wait(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", traffic=(64, 2000, 500)))
    (way,) = only(found, "sequences")
    count = way.settings["max_num_seqs"]
    assert isinstance(count, int)
    assert 8 <= count < 64
    assert not only(found, "context"), "traffic cannot be shortened"


def test_gpus_that_stand_idle_are_used_first(ask: Ask) -> None:
    found = fit(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=1))
    way = ways_out(found)[0]
    assert way.kind == "idle_gpus"
    assert way.settings == {"tensor_parallel_size": 4}


def test_a_low_utilization_is_raised_with_a_variant(ask: Ask) -> None:
    ways = only(fit(ask("llama-3.1-8b", "rtx3060", utilization=0.5)), "quantization")
    assert any(way.settings.get("gpu_memory_utilization") == 0.9 for way in ways)


def test_on_a_cpu_ggufs_more_ram_and_no_gpus(ask: Ask, cpu: Callable[..., Device]) -> None:
    found = fit(ask("llama-3.1-8b", device=cpu(12, 16)))
    assert kinds(found) == ["quantization", "more_ram", "smaller_model"]
    first = only(found, "quantization")[0]
    assert first.fit.question.model.name.endswith("-Q8_0.gguf")
    assert not first.available
    assert "made" in (first.note or "")


def test_a_model_unknown_to_the_catalogue_has_ways_out_too(ask: Ask) -> None:
    known = ask("llama-3-70b", "rtx4090")
    question = replace(known, model=replace(known.model, name="./some/folder", origin="folder"))
    assert {"more_gpus", "tiers", "smaller_model"} <= set(kinds(fit(question)))


MODELS = (
    "llama-3-8b",
    "llama-3.1-70b",
    "qwen2.5-7b",
    "gemma-3-12b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
)
SPECS = {name: describe_config(catalogue.find(name).config) for name in MODELS}


@st.composite
def questions(draw: st.DrawFn) -> Question:
    name = draw(st.sampled_from(MODELS))
    gpu = draw(st.sampled_from(["rtx3060", "rtx4090", "a100-40", "l4", "h100-80", "t4"]))
    limits = Settings(
        max_model_len=draw(st.sampled_from([None, 2048, 8192])),
        max_num_seqs=draw(st.sampled_from([None, 8, 256])),
        utilization=draw(st.sampled_from([None, 0.3, 0.85, 0.95])),
    )
    traffic = draw(
        st.one_of(
            st.none(),
            st.builds(Traffic, concurrency=st.integers(1, 300), prompt_tokens=st.integers(1, 1500),
                      output_tokens=st.integers(1, 500)),
        )
    )  # fmt: skip
    device = device_of(gpus.find(gpu))
    free = draw(st.sampled_from([1.0, 0.7, 0.4]))
    device = replace(device, free_bytes=int(device.total_bytes * free))
    if draw(st.booleans()):
        device = replace(device, budget_bytes=int(device.total_bytes * 0.6))
    return Question(
        model=PlannedModel(name=name, spec=SPECS[name], origin="catalogue"),
        machine=Machine(devices=(device,), ram_bytes=draw(st.sampled_from([None, 16 * GIB, 256 * GIB]))),
        settings=limits,
        traffic=traffic,
    )


@given(questions())
@settings(max_examples=25, deadline=None)
def test_every_way_out_fits_when_it_is_planned(question: Question) -> None:
    found = fit(question)
    ways = ways_out(found)
    assert not (found.fits and ways)
    for way in ways:
        check(way, question)
    order = [way.kind for way in ways]
    assert order == sorted(order, key=ORDER.index)
