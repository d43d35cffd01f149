"""Which quantized variant stands first: one that can be fetched, one that needs no file, one that has to be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device

Ask = Callable[..., Question]


def quantized(question: Question) -> list[Remedy]:
    return [way for way in ways_out(fit(question)) if way.kind == "quantization"]


def test_a_published_checkpoint_with_a_shorter_context_comes_before_a_file_that_holds_all_of_it(ask: Ask) -> None:
    ways = quantized(ask("llama-3.1-8b", "rtx2080ti", max_model_len=34000))
    *ready, made = ways
    assert all(way.available and "model" in way.settings and not way.meets_request for way in ready)
    assert made.settings["quantization"] == "Q4_K_M"
    assert made.meets_request
    assert not made.available


def test_a_published_checkpoint_with_kv_in_fewer_bits_on_a_gpu_without_units_for_it(ask: Ask) -> None:
    """Two 3090: vLLM reads FP8 KV there, and AWQ with it holds what neither holds alone."""
    first = quantized(ask("llama-3.3-70b", "rtx3090", count=2, max_model_len=32768))[0]
    assert first.settings["model"] == "casperhansen/llama-3.3-70b-instruct-awq"
    assert first.settings["kv_cache_dtype"] == "fp8"
    assert first.meets_request


def test_with_kv_in_fewer_bits_where_neither_alone_is_enough(ask: Ask) -> None:
    whole = quantized(ask("llama-3.1-8b", "rtx4060ti-16", max_model_len=90000))
    assert whole[0].settings["kv_cache_dtype"] == "fp8"
    assert "AWQ" in whole[0].change
    assert whole[0].meets_request
    cut = quantized(ask("qwen3-32b", "l4", max_model_len=32000))
    alone = [way.fit.limits.max_model_len for way in cut if "kv_cache_dtype" not in way.settings]
    (both,) = (way for way in cut if "kv_cache_dtype" in way.settings)
    assert both.settings["model"] == "Qwen/Qwen3-32B-AWQ"
    assert both.fit.limits.max_model_len > max(alone)
    assert not both.meets_request


@pytest.mark.parametrize("engine", [None, "holdfast"])
def test_what_is_made_while_loading_needs_no_file(ask: Ask, engine: str | None) -> None:
    published, way = quantized(replace(ask("qwen3-30b-a3b", "rtx4090"), engine=engine))
    assert published.settings == {"model": "Qwen/Qwen3-30B-A3B-GPTQ-Int4"}, "calibrated, as its makers published it"
    assert way.settings == {"quantization": "int4"}
    assert way.available
    command = way.commands()["holdfast"]
    assert command.available
    assert command.text.startswith("holdfast serve Qwen/Qwen3-30B-A3B --quantization int4 ")
    assert "without calibration" in (way.price or "")


def test_holdfast_is_not_given_what_it_does_not_compute_with(ask: Ask) -> None:
    question = ask("llama-3.1-70b", "rtx4090")
    assert [way.settings for way in quantized(question)] == [{"quantization": "IQ2_XXS"}]
    assert quantized(replace(question, engine="holdfast")) == []


def test_over_several_gpus_nothing_is_made_by_an_engine_of_one(ask: Ask) -> None:
    for way in ways_out(fit(ask("llama-3.1-70b", "rtx4090"))):
        if len(way.fit.ranks) > 1 or way.tiers is not None:
            assert way.settings.get("quantization") != "int4"
    over_two = quantized(ask("mixtral-8x7b", "rtx4090", count=2))
    assert over_two
    assert "int4" not in {way.settings.get("quantization") for way in over_two}


def test_a_cpu_has_them_all_and_says_which_is_fast(ask: Ask, cpu: Callable[..., Device]) -> None:
    ways = quantized(ask("llama-3-8b", device=cpu(16, 18)))
    methods = [way.settings["quantization"] for way in ways]
    assert methods[:2] == ["fp8", "int4"]
    assert set(methods[2:]) == {"Q8_0", "Q4_1", "Q4_0"}
    assert all("a GGUF of as many bits is faster" in (way.note or "") for way in ways[:2])


def test_of_an_fp8_checkpoint_what_its_model_is_published_in_or_made_into(ask: Ask) -> None:
    """Qwen3-30B-A3B-FP8 takes 29 GiB; four bits of the same model fit a card of 24."""
    first, made = quantized(ask("qwen3-30b-a3b-fp8", "rtx4090"))
    assert first.settings == {"model": "Qwen/Qwen3-30B-A3B-GPTQ-Int4"}
    assert made.settings == {"model": "Qwen/Qwen3-30B-A3B", "quantization": "int4"}
    assert first.available
    assert made.available
    assert "of Qwen/Qwen3-30B-A3B" in made.change
