"""What a report says of counts and lengths: no more than there is, and nothing of what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from holdfast.planner.fit.search import Question, fit
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.report.compare import compare_lines
from holdfast.planner.report.text import lines
from holdfast.planner.report.wrapping import rounded_down

Ask = Callable[..., Question]


def text(found: PlanAnswer) -> str:
    return " ".join(" ".join(lines(found, 200)).split())


@pytest.mark.parametrize(
    ("count", "shown"), [(3.97, 3.9), (3.9999, 3.9), (4.0, 4.0), (4.06, 4.0), (0.04, 0.0), (-1, 0.0)]
)
def test_a_count_is_rounded_down(count: float, shown: float) -> None:
    assert rounded_down(count) == shown


def test_what_is_a_little_short_is_not_said_to_be_held(ask: Ask) -> None:
    """Traffic that lacks some MiB: 3.98 of 4."""
    close = (ask("qwen3-8b", "l4", traffic=(4, prompt, 500)) for prompt in range(5000, 9000, 32))
    question = next(one for one in close if not fit(one).fits)
    found = answer(question)
    held = found.concurrency_at_traffic
    assert held is not None
    assert 3.95 < held < 4
    assert "memory holds 3.9" in text(found)
    assert found.to_json()["concurrency_at_traffic"] < 4


def test_of_what_does_not_fit_no_context_is_said_to_be_held(ask: Ask) -> None:
    for traffic in ((21, 5640, 500), None):
        question = ask("qwen3-8b", "l4", traffic=traffic) if traffic else ask("llama-3.1-70b", "l4")
        (said,) = [one for one in fit(question).decisions if one.field == "max_model_len"]
        assert "does not fit" in said.reason
        assert "memory holds" not in said.reason
    (said,) = [one for one in fit(ask("qwen3-8b", "l4")).decisions if one.field == "max_model_len"]
    assert "memory holds" in said.reason


def test_side_by_side_where_nothing_fits_no_length_is_named(ask: Ask) -> None:
    found = compare_lines([answer(ask("llama-3.1-70b", gpu)) for gpu in ("l4", "rtx3060")], 100)
    assert not any("1 token" in line or "at once:" in line for line in found)


def test_side_by_side_with_itself_a_plan_is_named_by_both(ask: Ask) -> None:
    found = compare_lines([answer(ask("qwen3-8b", "l4")) for _ in range(2)], 120)
    assert found[1].startswith("Qwen/Qwen3-8B on ")
    assert found[1] == found[2]


@pytest.mark.parametrize(
    ("model", "gpu"), [("llama-3.1-8b", "rtx4090"), ("qwen3-8b", "l4"), ("llama-3.1-8b", "h100-80")]
)
def test_max_is_as_long_as_it_says_and_holds_for_every_engine(ask: Ask, model: str, gpu: str) -> None:
    found = answer(ask(model, gpu))
    assert found.max is not None
    length = found.max.fit.limits.max_model_len
    longest = fit(ask(model, gpu, utilization=0.95)).longest_tokens
    most = re.search(r"\((\S+) with the smallest steps", found.max.reason)
    assert (most is None) == (length == longest)
    if most is not None:
        named = int(most[1].replace(",", ""))
        assert named > length
        at_most = ask(model, gpu, utilization=0.95, max_model_len=named)
        assert fit(at_most).fits
        steps = found.max.fit.limits.max_num_batched_tokens
        assert f"with steps of {steps:,} tokens" in found.max.reason
    for name in ("safe", "max"):
        document = found.to_json()[name]
        assert document["command_notes"]["vllm"]["available"], document["command_notes"]["vllm"]["notes"]


def test_where_vllm_holds_less_of_a_configuration_the_text_says_so(ask: Ask) -> None:
    found = answer(ask("llama-3.1-8b", "rtx4090"), engine="vllm==0.26")
    assert found.max is not None
    told = found.max.commands(found.vllm)["vllm"].max_model_len
    assert told is not None
    less = told < found.max.fit.limits.max_model_len
    assert (f"as {found.vllm.name} sizes it: --max-model-len {told}" in text(found)) == less
