"""Ways out of traffic that is too much: what serves all of it first, published variants, GPUs that people find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.hardware import gpus
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.report.answer import answer
from holdfast.planner.report.text import lines

Ask = Callable[..., Question]
PARTIAL = "(only part of what was requested)"


def ways(question: Question) -> tuple[Remedy, ...]:
    return ways_out(fit(question))


@pytest.mark.parametrize(
    ("model", "gpu", "traffic", "variant"),
    [
        ("qwen3-30b-a3b", "l40s", (20, 6000, 500), "Qwen/Qwen3-30B-A3B-FP8"),
        ("qwen3-8b", "l4", (21, 5640, 500), "Qwen/Qwen3-8B-AWQ"),
    ],
)
def test_a_published_variant_with_fp8_kv_where_neither_is_enough(
    ask: Ask, model: str, gpu: str, traffic: tuple[int, int, int], variant: str
) -> None:
    found = ways(ask(model, gpu, traffic=traffic))
    assert not [way for way in found if way.kind == "kv_cache_dtype"]
    (way,) = [one for one in found if one.settings.get("model") == variant and one.kind == "quantization"]
    assert way.settings["kv_cache_dtype"] == "fp8"
    assert "--kv-cache-dtype fp8" in way.flags
    assert way.fit.concurrency(way.fit.usual_tokens) >= traffic[0]
    assert found[0].kind == "quantization"
    assert "model" in found[0].settings, "what is published stands before what has to be made"


def test_fp8_kv_is_not_added_where_the_gpu_has_none_or_where_it_is_not_needed(ask: Ask) -> None:
    for gpu in ("titan-rtx", "quadro-rtx6000"):
        assert all("kv_cache_dtype" not in way.settings for way in ways(ask("qwen3-8b", gpu, traffic=(30, 5640, 500))))
    enough = ways(ask("qwen3-8b", "l4", traffic=(8, 5640, 500)))
    assert [way for way in enough if way.kind == "kv_cache_dtype"]
    assert all("kv_cache_dtype" not in way.settings for way in enough if way.kind == "quantization")


@pytest.mark.parametrize("traffic", [(21, 5640, 500), (8, 5640, 500), (40, 2000, 500)])
def test_what_serves_all_of_the_traffic_stands_first(ask: Ask, traffic: tuple[int, int, int]) -> None:
    found = ways(ask("qwen3-8b", "l4", traffic=traffic))
    kinds = [way.kind for way in found]
    assert found[0].meets_request
    assert kinds[-1] == "smaller_model"
    whole = [way.meets_request for way in found[:-1]]
    assert whole == sorted(whole, reverse=True)
    assert kinds.index("sequences") > kinds.index("more_gpus")
    part = [way for way in found if not way.meets_request]
    assert part
    assert all(way.fit.required_sequences < traffic[0] for way in part)


def test_what_serves_a_part_is_marked_so(ask: Ask) -> None:
    found = answer(ask("qwen3-8b", "l4", traffic=(21, 5640, 500)))
    text = " ".join(" ".join(lines(found, 200)).split())
    assert text.count(PARTIAL) == sum(not way.meets_request for way in found.ways_out) == 1
    documents = found.to_json()["ways_out"]
    assert [one["meets_request"] for one in documents] == [way.meets_request for way in found.ways_out]


def test_a_shorter_context_than_was_asked_for_is_a_part_too(ask: Ask) -> None:
    found = ways(ask("llama-3.1-8b", "rtx4090", max_model_len=60000))
    assert {way.kind: way.meets_request for way in found}["context"] is False
    assert {way.kind: way.meets_request for way in found}["kv_cache_dtype"] is True


@pytest.mark.parametrize(
    ("model", "gpu", "count", "bigger"),
    [
        ("llama-3.1-70b", "rtx4090", 2, "h100-80x2"),
        ("qwen3-30b-a3b", "l40s", 1, "h100-80"),
        ("qwen3-8b", "l40s", 1, None),
    ],
)
def test_a_bigger_gpu_is_one_that_people_find(ask: Ask, model: str, gpu: str, count: int, bigger: str | None) -> None:
    traffic = (80, 6000, 500) if bigger is None else None
    found = [way for way in ways(ask(model, gpu, count=count, traffic=traffic)) if way.kind == "bigger_gpu"]
    assert found
    for way in found:
        device = way.fit.ranks[0].device
        assert device.gpu is not None
        assert device.gpu.common, device.name
    assert bigger is None or found[0].settings["gpu"] == bigger


def test_gpus_of_one_market_are_not_among_the_common_ones() -> None:
    assert {"h100-80", "h200", "a100-80"} <= {gpu.key for gpu in gpus.entries() if gpu.common}
    assert not any(gpus.find(name).common for name in ("h800", "a800-80", "h20"))


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "traffic"),
    [
        ("mixtral-8x7b", "rx7900gre", {"count": 2, "tensor_parallel": 2}, (1, 60000, 500)),
        ("solar-10.7b", "rtx3060", {}, (64, 8000, 500)),
    ],
)
def test_a_model_that_reads_them_is_looked_for_among_those_that_fit(
    ask: Ask, model: str, gpu: str, settings: dict[str, int], traffic: tuple[int, int, int]
) -> None:
    question = ask(model, gpu, traffic=traffic, **settings)
    way = ways(question)[-1]
    assert way.kind == "longer_model"
    assert way.meets_request
    other = way.fit.question.model.spec
    assert other.max_position >= traffic[1] + traffic[2]
    assert way.fit.required_sequences == traffic[0]


def test_no_ways_out_are_promised_where_there_are_none(ask: Ask) -> None:
    found = answer(ask("mixtral-8x7b", "rtx3060", traffic=(5000, 60000, 500)))
    assert found.ways_out == ()
    assert any(warning.code == "HFW34" for warning in found.warnings)
    assert "see the ways out" not in " ".join(" ".join(lines(found, 200)).split())
