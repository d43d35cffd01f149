"""The peak of loading: named in table, JSON, decisions and refusals, so that what is short can be added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoints import StoredTensor
from holdfast.footprint.cpu import STAGING_BYTES
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.machine import Asked, machine_of
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.report.text import lines, sizes
from holdfast.units import GIB, MIB, format_bytes

Ask = Callable[..., Question]
LARGEST = 128_256 * 2048 * 2
"""The embedding of Llama 3.2 1B, as it is stored."""


def with_ram(ask: Ask, size: str) -> Question:
    machine = replace(machine_of(Asked(ram=size, device="cpu")).machine, cpu_features=frozenset({"asimd", "asimddp"}))
    return replace(ask("llama-3.2-1b", "l4"), machine=replace(machine, compiled_kernels=True))


def said(found: PlanAnswer, field: str) -> str:
    return next(decision.line() for decision in found.decisions if decision.field == field)


def test_what_loading_lacks_can_be_added_up(ask: Ask) -> None:
    """After loading it would fit: it was said to be short with memory free."""
    found = answer(with_ram(ask, "3.2GiB"))
    assert not found.fits
    (device,) = found.to_json()["devices"]
    loading = device["loading"]
    assert set(loading["terms"]) == {"front", "framework", "libraries", "weights", "staging"}
    assert loading["terms"]["staging"] == LARGEST + STAGING_BYTES
    assert sum(loading["terms"].values()) == loading["peak_bytes"]
    short = loading["peak_bytes"] - device["budget_bytes"]
    assert short == loading["short_bytes"] == device["short_bytes"] == found.fit.short_bytes > 0

    parts = sizes(found, found.fit.ranks[0])
    assert parts["free"] == parts["KV"] == 0
    assert parts["weights"] + parts["overhead"] - device["budget_bytes"] == parts["short"] == short
    text = " ".join(" ".join(lines(found, width=300)).split())
    assert f"does not fit: {format_bytes(short)} short while loading" in text
    assert f"staging {format_bytes(LARGEST + STAGING_BYTES)}" in text
    assert f"{format_bytes(short)} more than the budget of 3.20 GiB" in said(found, "loading")
    (warning,) = [warning for warning in found.warnings if warning.code == "HFW28"]
    assert "cannot even be loaded" in warning.message
    assert "staging" in warning.message


def test_one_that_fits_says_its_peak_too(ask: Ask) -> None:
    found = answer(with_ram(ask, "5GiB"))
    (device,) = found.to_json()["devices"]
    assert device["loading"]["short_bytes"] == 0
    peak = format_bytes(device["loading"]["peak_bytes"])
    assert any(line.startswith(f"  loading: {peak} at its peak") for line in lines(found))
    assert not any(decision.field == "loading" for decision in found.decisions)


def test_where_serving_lacks_more_the_bar_shows_that(ask: Ask) -> None:
    question = with_ram(ask, "3.2GiB")
    found = answer(replace(question, settings=replace(question.settings, max_model_len=131_072)))
    rank = found.fit.ranks[0]
    assert rank.loading_short_bytes > 0
    assert not found.fit.lacks_for_loading(rank)
    assert sizes(found, rank)["short"] == found.fit.short_bytes > rank.loading_short_bytes


def quantized(model: PlannedModel, largest: int) -> PlannedModel:
    """Kept in blocks: its head is the largest of its tensors."""
    stored = {
        tensor.name: StoredTensor(
            tensor.name, tensor.shape, "Q4_0", Path("model.gguf"), 0, largest if tensor.name == "head" else MIB
        )
        for tensor in model.spec.tensors
    }
    return replace(model, stored=stored, canonical=stored, format="gguf")


def test_on_a_gpu_a_tensor_in_blocks_is_there_twice(ask: Ask) -> None:
    question = ask("llama-3.1-8b", "l4")
    question = replace(
        question, model=quantized(question.model, 8 * GIB), machine=machine_of(Asked(vram="14GiB")).machine
    )
    found = fit(question)
    (rank,) = found.ranks
    assert {term.name: term.nbytes for term in rank.loading}["staging"] == 8 * GIB + STAGING_BYTES
    assert rank.left_bytes > found.needed_bytes(rank), "once it is loaded there is room"
    assert not found.fits
    assert found.short_bytes == rank.loading_bytes - 14 * GIB
    assert (found.longest_tokens, found.kv_tokens) == (0, 0)
    enough = machine_of(Asked(vram=rank.loading_bytes)).machine
    assert fit(replace(question, machine=enough)).fits


def test_of_what_another_engine_loads_nothing_is_claimed(ask: Ask) -> None:
    found = answer(ask("deepseek-v2-lite", "h100-80"))
    assert found.to_json()["devices"][0]["loading"] is None
