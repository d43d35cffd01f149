"""Ways out of a model larger than its GPU whose layers RAM does not hold either: KV and weights in fewer bits, and a
shorter context."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.planner import api
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.fit.placement import place
from holdfast.planner.fit.search import Question, fit
from holdfast.units import GIB

Ask = Callable[..., Question]


def pinned(question: Question, pinned_bytes: int) -> Question:
    return replace(question, machine=replace(question.machine, ram_bytes=pinned_bytes, pinned_bytes=pinned_bytes))


def in_ram(question: Question) -> list[Remedy]:
    return [way for way in ways_out(fit(question)) if way.kind == "tiers"]


def test_kv_in_fewer_bits_and_the_longest_context_come_before_more_gpus(ask: Ask) -> None:
    """Of a checkpoint that is quantized already."""
    question = pinned(ask("llama-3.1-70b-awq", "rtx4090", max_model_len=40000), 28 * GIB)
    alone = place(question)
    assert alone is not None
    assert alone.ram_short_bytes > 0
    ways = ways_out(fit(question))
    assert [way.kind for way in ways][:3] == ["tiers", "tiers", "more_gpus"]
    smaller, shorter = ways[:2]
    assert smaller.flags == "--kv-cache-dtype fp8"
    assert "a little precision" in (smaller.price or "")
    assert smaller.meets_request
    length = shorter.settings["max_model_len"]
    assert isinstance(length, int)
    assert not shorter.meets_request
    for more, runs in ((0, True), (256, False)):
        longer = replace(question, settings=replace(question.settings, max_model_len=length + more))
        placed = place(longer)
        assert placed is not None
        assert placed.fits is runs


@pytest.mark.parametrize(("ram_gib", "offered"), [(8, ["int4"]), (12, ["int4", "fp8"])])
def test_weights_in_eight_and_four_bits_are_tried_the_fastest_first(
    ask: Ask, ram_gib: int, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    question = pinned(ask("llama-2-13b", "rtx4060"), ram_gib * GIB)
    ways = in_ram(question)
    assert [way.settings.get("quantization") for way in ways] == offered
    speeds = [way.tiers.one.tokens_per_s for way in ways if way.tiers is not None and way.tiers.one is not None]
    assert len(speeds) == len(ways)
    assert speeds == sorted(speeds, reverse=True)
    assert "without calibration" in (ways[0].note or "")
    assert "without calibration" in (ways[0].price or "")


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"offload": False}, "--offload", "--no-offload left out: "),
        ({"gpu_layers": "all"}, "--gpu-layers auto", "--gpu-layers all left out: "),
        ({"offload": False, "gpu_layers": "all"}, "--offload --gpu-layers auto",
         "--no-offload and --gpu-layers all left out: "),
    ],
)  # fmt: skip
def test_what_alone_forbids_layers_in_ram_is_left_out(settings: dict[str, object], flags: str, said: str) -> None:
    machine = {"gpu": "rtx4090", "ram": "64GiB"}
    found, left = (api.plan("llama-3.1-70b-awq", **machine, **one) for one in (settings, {}))
    assert left.offload is not None
    best = found.ways_out[0]
    assert (best.kind, best.flags) == ("tiers", flags)
    assert best.change.startswith(f"{said}{left.offload.placement.resident} of 80 layers on the GPU")
    assert best.available
    assert [way for way in found.ways_out if way.tiers is not None] == [best]
    # Both are compared by it.
    assert re.search(r"2 x rtx4090 instead of 1 [^-]* tokens/s for one --gpu", " ".join(str(found).split()))
