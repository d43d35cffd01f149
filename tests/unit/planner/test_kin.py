"""GPUs of different makers, and cards beside a machine's unified memory, never hold one model together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.errors import ConfigurationError
from holdfast.observability.codes import explain
from holdfast.planner.fit.search import Plan, Question, describe_devices, fit
from holdfast.planner.inputs.machine import Asked, machine_of
from holdfast.planner.report.answer import answer
from holdfast.planner.report.compare import compare_lines
from holdfast.planner.report.text import lines

Ask = Callable[..., Question]


def on(ask: Ask, model: str, gpus: str, **settings: object) -> Question:
    return replace(ask(model, "l4", **settings), machine=machine_of(Asked(gpu=gpus)).machine)


def said(found: Plan) -> str:
    return next(decision.reason for decision in found.decisions if "cannot hold one model together" in decision.reason)


@pytest.mark.parametrize(
    ("model", "gpus", "taken", "left_out"),
    [
        ("llama-3.1-8b", "rtx4090,m3-max-36", ["m3-max-36"], "rtx4090 (NVIDIA), where KV would hold"),
        ("llama-3.1-8b", "m3-max-36,rtx4090x2", ["rtx4090", "rtx4090"], "m3-max-36 (Apple, unified memory)"),
        ("llama-3.1-70b", "h100-80,mi300x", ["mi300x"], "h100-80 (NVIDIA), where"),
        ("llama-3.1-70b", "h100-80x4,mi300x", ["h100-80"] * 4, "mi300x (AMD), where KV would hold"),
        ("llama-3.1-8b", "gb10,rtx4090", ["gb10"], "rtx4090 (NVIDIA), where"),
    ],
)
def test_the_best_of_one_kind_is_taken(ask: Ask, model: str, gpus: str, taken: list[str], left_out: str) -> None:
    found = fit(on(ask, model, gpus))
    assert found.fits
    assert [rank.device.name for rank in found.ranks] == taken
    assert left_out in said(found)
    alone = fit(on(ask, model, ",".join(taken)))
    assert (found.kv_tokens, found.limits) == (alone.kv_tokens, alone.limits)


@pytest.mark.parametrize("gpus", ["h100-80,mi300x", "mi300x,h100-80"])
def test_where_none_hold_it_those_that_lack_least_are_taken(ask: Ask, gpus: str) -> None:
    found = fit(on(ask, "llama-3.1-405b", gpus))
    assert not found.fits
    assert [rank.device.name for rank in found.ranks] == ["mi300x"]
    assert found.short_bytes < fit(on(ask, "llama-3.1-405b", "h100-80")).short_bytes


def test_the_rest_is_there_and_not_used(ask: Ask) -> None:
    found = answer(on(ask, "llama-3.1-70b", "h100-80,mi300x"))
    rows = found.to_json()["devices"]
    assert [(row["name"], row["used"], row["index"]) for row in rows] == [("mi300x", True, 1), ("h100-80", False, 0)]
    assert "1 more device not used" in lines(found)
    assert "h100-80" in repr(found)
    assert "h100-80" in compare_lines([found, answer(on(ask, "llama-3.1-70b", "mi300x"))], 160)[1]
    assert found.replicas == 1


@pytest.mark.parametrize(
    ("gpus", "split", "fix"),
    [
        ("mi300x,h100-80", {"tensor_parallel": 2}, "-tp 1, on mi300x; or --gpu mi300xx2"),
        ("mi300x,h100-80", {"pipeline_parallel": 2}, "-tp 1 -pp 1, on mi300x; or --gpu mi300xx2"),
        ("mi300x,h100-80x3,m3-max-36", {"tensor_parallel": 4}, "-tp 2, on 2 x h100-80; or --gpu h100-80x4"),
        # Of the first card one is too small; of the second one is enough.
        ("h100-80,mi300x", {"tensor_parallel": 2}, "-tp 1, on mi300x; or --gpu h100-80x2"),
        ("rtx4090,m3-max-36", {"tensor_parallel": 2}, "leave -tp and -pp out: the plan then shows what is missing"),
    ],
)
def test_more_ranks_than_there_are_of_one_kind_are_refused(
    ask: Ask, gpus: str, split: dict[str, int], fix: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit(on(ask, "llama-3.1-70b", gpus, **split))
    assert caught.value.code == "HF134"
    assert all(name.partition("x3")[0] in str(caught.value.found) for name in gpus.split(","))
    assert str(caught.value.fix).startswith(fix)
    if fix.startswith("-tp"):
        flags, _, more = fix.partition("; or --gpu ")
        smaller = fit(on(ask, "llama-3.1-70b", gpus, tensor_parallel=int(flags.split()[1].rstrip(","))))
        assert smaller.fits
        assert describe_devices([rank.device for rank in smaller.ranks]) == flags.partition("on ")[2]
        assert fit(on(ask, "llama-3.1-70b", more, **split)).fits
    assert explain("HF134").helps


def test_more_ranks_than_there_are_at_all(ask: Ask) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit(on(ask, "llama-3.1-70b", "mi300x,h100-80", tensor_parallel=4))
    assert caught.value.code == "HF133"


def test_those_that_are_enough_are_taken_where_a_split_is_asked_for(ask: Ask) -> None:
    found = fit(on(ask, "llama-3.1-70b", "mi300x,h100-80x2", tensor_parallel=2))
    assert [rank.device.name for rank in found.ranks] == ["h100-80"] * 2
    assert "mi300x (AMD), fewer than requested" in said(found)


def test_what_is_planned_on_stays_of_one_kind(ask: Ask) -> None:
    """Ways out, configurations and commands too; numbers are those that the maker's runtime gives."""
    found = answer(on(ask, "llama-3.1-405b", "mi300x,h100-80x2"))
    assert not found.fits
    for way in found.ways_out:
        assert len({rank.device.gpu.vendor for rank in way.fit.ranks if rank.device.gpu}) == 1
    fits = answer(on(ask, "llama-3.1-70b", "mi300x,h100-80x2", tensor_parallel=2))
    assert [rank.device.selector for rank in fits.fit.ranks] == ["0", "1"]
    assert fits.safe is not None
    assert {rank.device.name for rank in fits.safe.fit.ranks} == {"h100-80"}


def test_a_machine_of_one_kind_is_not_divided(ask: Ask) -> None:
    for gpus in ("rtx4090,rtx3090", "mi300ax2", "t4,h100-80"):
        found = fit(on(ask, "llama-3.1-8b", gpus))
        assert not found.question.machine.aside
        assert not any("makers" in decision.reason for decision in found.decisions)
