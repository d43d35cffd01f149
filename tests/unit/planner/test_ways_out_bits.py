"""Below four bits: the same model on the same GPUs, after what can be had, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.errors import ConfigurationError
from holdfast.models import catalogue
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device, PlannedModel
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.variants import LOW_GGUF_TYPES, planned, unquantized
from holdfast.units import GIB

Ask = Callable[..., Question]


def quantized(question: Question) -> list[Remedy]:
    return [way for way in ways_out(fit(question)) if way.kind == "quantization"]


def known(name: str) -> PlannedModel:
    found = planned(catalogue.find(name))
    assert found is not None
    return found


def test_two_bits_stand_behind_what_can_be_had_and_say_what_they_cost(ask: Ask) -> None:
    """A file that nobody has yet, and that Holdfast does not read; llama.cpp does."""
    question = ask("llama-3.1-70b", "rtx4090")
    *before, two_bits, smaller = ways_out(fit(question))
    assert two_bits.settings == {"quantization": "IQ2_XXS"}
    assert not two_bits.available
    assert "two bits noticeably reduce quality" in (two_bits.note or "")
    assert {way.kind for way in before} == {"more_gpus", "tiers", "bigger_gpu"}
    assert smaller.kind == "smaller_model"
    again = fit(replace(question, model=quantized_as(question.model, "IQ2_XXS")))
    assert again.fits
    assert again.limits.max_model_len == two_bits.fit.limits.max_model_len
    assert ways_out(fit(replace(question, engine="llama.cpp")))[0].settings == {"quantization": "IQ2_XXS"}


@pytest.mark.parametrize(("gpu", "kind"), [("a100-40", "Q3_K_M"), ("rtx5090", "IQ3_XXS"), ("rtx4090", "IQ2_XXS")])
def test_the_most_bits_that_fit(ask: Ask, gpu: str, kind: str) -> None:
    question = ask("llama-3.1-70b", gpu)
    (way,) = quantized(question)
    assert way.settings["quantization"] == kind
    for more in LOW_GGUF_TYPES[: LOW_GGUF_TYPES.index(kind)]:
        assert not fit(replace(question, model=quantized_as(question.model, more))).fits


def test_four_bits_that_fit_leave_no_place_for_fewer(ask: Ask) -> None:
    for question in (ask("llama-3.1-8b", "rtx3060"), ask("qwen3-32b-awq", "rtx4090", utilization=0.83)):
        assert not {way.settings.get("quantization") for way in quantized(question)} & set(LOW_GGUF_TYPES)


def test_of_a_quantized_model_what_it_was_made_of(ask: Ask) -> None:
    question = ask("llama-3-70b-awq", "a100-40", utilization=0.88, max_model_len=8192, max_num_seqs=16)
    (way,) = quantized(question)
    assert way.settings["model"] == "meta-llama/Meta-Llama-3-70B-Instruct"
    assert way.settings["quantization"] == "Q3_K_M"
    assert "--model meta-llama/Meta-Llama-3-70B-Instruct --quantization Q3_K_M" in way.flags
    assert way.meets_request
    assert "quality" not in (way.note or "")


def test_of_one_that_is_planned_as_quantized_the_same_with_fewer_bits(ask: Ask) -> None:
    question = ask("llama-3.1-70b", "rtx4090")
    for made_as in ("awq", "Q4_K_M"):
        (way,) = quantized(replace(question, model=quantized_as(question.model, made_as)))
        assert way.settings == {"quantization": "IQ2_XXS"}
    least = replace(question, model=quantized_as(question.model, "IQ2_XXS"))
    assert not quantized(replace(least, settings=replace(least.settings, max_model_len=65536)))


def test_holdfast_on_a_cpu_is_not_given_what_it_does_not_compute_with(ask: Ask, cpu: Callable[..., Device]) -> None:
    question = ask("llama-3.1-70b", device=cpu(30, 32))
    assert quantized(question) == []
    (way,) = quantized(replace(question, engine="llama.cpp"))
    assert way.settings["quantization"] in LOW_GGUF_TYPES


def test_fp8_of_the_maker_becomes_a_gguf(ask: Ask) -> None:
    """As published: 404 GB in Q4_K_M of DeepSeek V3."""
    model = quantized_as(known("deepseek-v3"), "Q4_K_M")
    found = fit(replace(ask("deepseek-v3", "h100-80", count=8), model=model))
    assert found.weights_bytes / 1e9 == pytest.approx(404.4, rel=0.01)
    (way,) = quantized(ask("deepseek-v3", "h100-80", count=4))
    assert way.settings == {"quantization": "IQ3_XXS"}
    assert way.fit.weights_bytes < 4 * 72 * GIB
    with pytest.raises(ConfigurationError):
        quantized_as(known("deepseek-v3"), "awq")


def test_what_was_made_of_an_unknown_model_stays_as_it_is() -> None:
    assert unquantized(known("gpt-oss-20b")) is None
    assert unquantized(replace(known("llama-3-70b-awq"), name="./some/folder", origin="folder")) is None
    base = unquantized(known("llama-3-70b-awq"))
    assert base is not None
    assert base.spec.quantization is None
