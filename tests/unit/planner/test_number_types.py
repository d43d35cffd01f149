"""What is computed in where nobody says: one rule, whoever asks, and a reason that is true of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.planner.answer import answer
from holdfast.planner.fit import Fit, Question, fit
from holdfast.planner.machine import Asked, machine_of
from holdfast.planner.question import Device

Ask = Callable[..., Question]
BF16_CPU, PLAIN_CPU = frozenset({"avx512_bf16"}), frozenset({"avx2"})


def said(found: Fit) -> str:
    (decision,) = [decision for decision in found.decisions if decision.field == "dtype"]
    assert decision.value == found.dtype
    return decision.reason


@pytest.mark.parametrize("model", ["smollm2-135m", "deepseek-v2-lite"], ids=["runs here", "does not"])
@pytest.mark.parametrize(
    ("features", "dtype", "reason"),
    [
        (BF16_CPU, "bfloat16", "this CPU multiplies bfloat16 in hardware"),
        (PLAIN_CPU, "float32", "this CPU has no bfloat16 products; emulated ones are many times slower"),
    ],
)
def test_on_a_cpu(
    ask: Ask, cpu: Callable[..., Device], model: str, features: frozenset[str], dtype: str, reason: str
) -> None:
    """A model that this engine runs and one that it does not are counted in two ways, and computed in one."""
    question = ask(model, device=cpu(256))
    found = fit(replace(question, machine=replace(question.machine, cpu_features=features)))
    assert found.dtype == dtype
    assert said(found) == reason


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "reason"),
    [
        ("llama-3.1-8b", "l4", "bfloat16", "as the model says"),
        ("llama-3.1-8b", "t4", "float16", "does not compute in bfloat16"),
        ("llama-2-7b", "l4", "float16", "as the model says"),
        ("llama-2-7b", "t4", "float16", "as the model says"),
    ],
)
def test_on_a_gpu(ask: Ask, model: str, gpu: str, dtype: str, reason: str) -> None:
    found = fit(ask(model, gpu))
    assert found.dtype == dtype
    assert reason in said(found)


def test_short_names_are_the_same_types(ask: Ask, cpu: Callable[..., Device]) -> None:
    assert fit(ask("llama-3.1-8b", "l4", dtype="half")).dtype == "float16"
    assert fit(ask("smollm2-135m", device=cpu(8), dtype="float")).dtype == "float32"


def test_the_default_share_of_a_version_is_named(ask: Ask) -> None:
    question = replace(ask("llama-3.1-8b", "l4"), machine=machine_of(Asked(vram="40GiB")).machine)
    (note,) = [note for note in answer(question, engine="vllm==0.26").commands["vllm"].notes if "--vram" in note]
    assert "default share, 0.92, free" in note
