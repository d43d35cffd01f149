"""What does not depend on the machine is worked out once, however many GPUs a plan or a comparison has."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import plan
from holdfast.planner.engines import fp8_loading
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.resolve import resolve_model
from holdfast.planner.sizing.sharded_weights import weights_of


def test_a_model_of_the_catalogue_is_described_once() -> None:
    model = resolve_model("llama-3.1-405b").model
    assert resolve_model("llama-3.1-405b").model is model
    for kind in ("Q4_K_M", "fp8"):
        assert quantized_as(model, kind) is quantized_as(model, kind)
        assert quantized_as(model, kind) is not model


def test_weights_that_are_loaded_whole_are_counted_once_for_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counting(*of: Any, **more: Any) -> Any:
        asked.append(of[0].name)
        return weights_of(*of, **more)

    monkeypatch.setattr(fp8_loading, "weights_of", counting)
    found = plan("qwen2.5-32b", quantization="fp8", gpu="l4x8")
    assert any("full unquantized weights" in note for note in found.commands["sglang"].notes)
    assert len(asked) <= 2, "once for each engine that does so"
