"""Where the scales of a KV cache in FP8 come from at start: the checkpoint, a calibration, or nowhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_divergence import hold_to_bounds, keys_have_bias
from named_model import why_not
from safetensors.torch import save_file

from holdfast import LLM, SamplingParams
from holdfast.checkpoints.files import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.startup.kv_scales import find_kv_scales
from holdfast.execution.kv_scales import KVScales
from holdfast.execution.runner import Runner as CpuRunner


class Runner:
    def __init__(self, kv_dtype: torch.dtype, tensors: tuple[str, ...] = ("layers.0.k",)) -> None:
        named = tuple(SimpleNamespace(name=name, optional=False) for name in tensors)
        layers = tuple(SimpleNamespace(index=index) for index in range(2))
        self.spec = SimpleNamespace(layers=layers, tensors=named)
        self.kv_dtype, self.kv_scales, self.calibrated = kv_dtype, KVScales.ones(2), False

    def use_kv_scales(self, scales: KVScales) -> None:
        self.kv_scales = scales

    def calibrate_kv(self) -> None:
        self.calibrated = True


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("calculated", [False, True])
def test_the_checkpoints_scales_come_first_unless_asked_otherwise(
    tmp_path: Path, scaled: bool, calculated: bool
) -> None:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    tensors = {name: torch.tensor([0.5 + index]) for index, name in enumerate(names if scaled else ())}
    save_file({"model.norm.weight": torch.ones(4), **tensors}, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors",)
    files = ModelFiles(name="one", kind="folder", path=tmp_path, format="safetensors", weights=weights)
    config = EngineConfig.from_arguments(kv_cache_dtype="fp8", calculate_kv_scales=calculated)
    runner: Any = Runner(torch.float8_e4m3fn)
    (decision,) = find_kv_scales(config, files, runner)
    assert runner.calibrated == (calculated or not scaled)
    if not runner.calibrated:
        assert runner.kv_scales == KVScales((0.5, 2.5), (1.5, 3.5))
        assert decision.line() == (
            "kv_cache_scales = keys 0.5 to 2.5, values 1.5 to 3.5 (model): the checkpoint has them"
        )
    plain: Any = Runner(torch.bfloat16)
    assert find_kv_scales(config, files, plain) == ()
    assert not plain.calibrated


def test_keys_with_a_bias_are_better_stored_without_their_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen2.5 has it; scales of a checkpoint leave no place for a mean."""
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors",)
    files = ModelFiles(name="one", kind="folder", path=tmp_path, format="safetensors", weights=weights)
    for calculated, tensors, warned in (
        (False, ("layers.0.k",), False),
        (True, ("layers.0.k", "layers.0.k_bias"), False),
        (False, ("layers.0.k", "layers.0.k_bias"), True),
    ):
        caplog.clear()
        config = EngineConfig.from_arguments(kv_cache_dtype="fp8", calculate_kv_scales=calculated)
        runner: Any = Runner(torch.float8_e4m3fn, tensors)
        find_kv_scales(config, files, runner)
        assert ("--calculate-kv-scales" in caplog.text) == warned


def test_the_built_in_model_answers_over_fp8_pages() -> None:
    """Through the whole engine, twice the same prompt: the second finds the codes of the first in the prefix cache."""
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory_bytes": "16MiB"}
    with LLM(kv_cache_dtype="fp8_e4m3", **settings) as llm:
        assert llm.info.kv_dtype == "fp8_e4m3"
        assert any(line.startswith("kv_cache_scales = keys") for line in llm.info.decisions)
        params = SamplingParams(temperature=0, max_tokens=6)
        text = "Once upon a time there was a king. The capital of France is"
        first, second = (llm.generate(text, params)[0] for _ in range(2))
        assert first.outputs[0].text.startswith(" Paris")
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        with LLM(**settings) as other:
            # With what the allocator may round away: four bytes an element there, one here.
            assert llm.info.blocks >= 3.9 * other.info.blocks


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2"])
def test_log_probabilities_stay_close_to_those_over_bfloat16(name: str) -> None:
    """As tests/gpu/test_kv_float8.py holds a GPU."""
    if (problem := why_not(name)) is not None:
        pytest.skip(problem)
    settings: dict[str, Any] = {"model": name, "device": "cpu", "kv_cache_memory_bytes": "256MiB"}
    assert keys_have_bias(name) == name.startswith("qwen")
    hold_to_bounds(settings, tokens=440, asked=20, runner=CpuRunner if keys_have_bias(name) else None)
