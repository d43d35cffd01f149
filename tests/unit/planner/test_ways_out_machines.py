"""Ways out name machines that exist: a chip that has its machine's RAM is alone there, and is had with more of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast import plan
from holdfast.hardware import gpus
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.models.quantize import quantized_as

Ask = Callable[..., Question]


def ways(question: Question, kind: str) -> list[Remedy]:
    return [way for way in ways_out(fit(question)) if way.kind == kind]


def gguf(question: Question, kind: str) -> Question:
    return replace(question, model=quantized_as(question.model, kind))


@pytest.mark.parametrize(
    ("here", "bigger"),
    [
        ("m3-max-36", "m3-max-64"),
        ("m4-pro-24", "m4-pro-64"),
        ("m2-24", "m1-ultra-64"),
        ("jetson-orin-32", "jetson-orin-64"),
    ],
)
def test_a_chip_with_the_machines_ram_is_had_with_more_of_it(ask: Ask, here: str, bigger: str) -> None:
    question = gguf(ask("llama-3.1-70b", here), "Q4_K_M")
    assert ways(question, "more_gpus") == []
    (way,) = ways(question, "bigger_gpu")
    assert way.settings["gpu"] == bigger
    assert way.fit.fits


def test_two_macs_that_were_asked_for_become_one(ask: Ask) -> None:
    (way,) = ways(gguf(ask("llama-3.1-70b", "m3-max-36", count=2, utilization=0.5), "Q8_0"), "bigger_gpu")
    found = gpus.find_group(str(way.settings["gpu"]))
    assert (found.count, found.gpu.vendor, found.gpu.unified) == (1, "apple", True)


def test_where_only_llama_runs_a_bigger_one_is_offered_for_its_files_too(ask: Ask) -> None:
    plain, quantized = ways(ask("llama-3.1-70b", "m3-max-36"), "bigger_gpu")
    assert plain.settings == {"gpu": "m3-ultra-256"}
    assert quantized.settings == {"gpu": "m3-max-64", "quantization": "Q4_K_M"}


def test_chips_with_a_link_stand_side_by_side(ask: Ask) -> None:
    """MI300A has the machine's RAM too, and four of them are in one."""
    question = ask("llama-3.1-70b", "mi300a")
    assert ways(question, "more_gpus")[0].settings["gpu"] == "mi300ax2"
    (way,) = ways(question, "bigger_gpu")
    assert way.settings["gpu"] == "mi300x"


def test_cards_do_not_become_chips(ask: Ask) -> None:
    for here in ("rtx4090", "mi210"):
        for way in ways(ask("llama-3.1-70b", here), "bigger_gpu"):
            assert not gpus.find_group(str(way.settings["gpu"])).gpu.unified


def test_a_card_of_the_same_size_is_not_a_bigger_one(ask: Ask) -> None:
    """A 3090 reports 51 MiB more than a 4090: room for a few hundred tokens."""
    longest = fit(ask("llama-3.1-8b", "rtx4090")).longest_tokens
    (way,) = ways(ask("llama-3.1-8b", "rtx4090", max_model_len=longest + 64), "bigger_gpu")
    assert way.settings["gpu"] == "rtx5090"


def test_fewer_bits_that_fit_need_no_bigger_card(ask: Ask) -> None:
    (way,) = ways(ask("qwen3-32b", "rtx4090"), "bigger_gpu")
    assert "model" not in way.settings


@pytest.mark.parametrize(("gpu", "more"), [("rtx4090-laptop", False), ("rtx4090", True)])
def test_no_second_card_goes_into_a_laptop(gpu: str, more: bool) -> None:
    found = plan("qwen3-32b", gpu=gpu, engine="vllm", max_model_len=8192)
    assert not found.fits
    assert any(way.kind == "more_gpus" for way in found.ways_out) is more


def test_of_gpus_that_do_not_hold_it_together_the_largest_runs_it_with_layers_in_ram() -> None:
    """A second, smaller card is no reason for worse: a server takes the larger one by itself."""
    found = plan("llama-3.1-70b", gpu="rtx4090,rtx3060", quantization="int4", ram="64GiB")
    alone = plan("llama-3.1-70b", gpu="rtx4090", quantization="int4", ram="64GiB")
    assert not found.fits
    assert alone.offload is not None
    way = found.ways_out[0]
    assert way.change.startswith("the rtx4090 alone, with layers in RAM: 35 of 80 layers on the GPU")
    assert way.flags == "--gpu rtx4090"
    assert way.fit.limits == alone.offload.placement.plan.limits
    assert found.commands["holdfast"].text.endswith(alone.offload.command.text)
    assert found.commands["holdfast"].text.startswith("CUDA_VISIBLE_DEVICES=0 "), "the other one is not shown to it"
    more = next(way for way in found.ways_out if way.kind == "more_gpus")
    assert more.change.startswith("4 x rtx3060 instead of rtx4090 and rtx3060")
    alike = plan("llama-3.1-70b", gpu="rtx3060x2", quantization="int4", ram="64GiB")
    assert alike.ways_out[0].change.startswith("one rtx3060 alone, ")
    as_set = plan("llama-3.1-70b", gpu="rtx4090,rtx3060", quantization="int4", ram="64GiB", tensor_parallel_size=2)
    assert not any("alone" in way.change for way in as_set.ways_out)
