"""Models with experts on the GPU runner, against transformers and against the CPU runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_gguf import write_expert_gguf
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.execution.gpu.layers.experts import ExpertGpuMaker
from holdfast.execution.gpu.layers.linear import Scratch
from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.weights.load import Weights, load_weights
from holdfast.footprint import experts as expert_sizes
from holdfast.records import SamplingParams

pytestmark = pytest.mark.usefixtures("no_kernel_for_few_rows")

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"architecture": "Mixtral", "num_local_experts": 3},
    "qwen3": {"architecture": "Qwen3Moe", **EXPERTS, "norm_topk_prob": False},
    "qwen2": {"architecture": "Qwen2Moe", **EXPERTS, "shared_expert_intermediate_size": 40},
}


class TinyFile(Tiny):
    """Its experts lie in stacks and stay quantized."""

    def __init__(self, folder: Path, kinds: tuple[str, str, str]) -> None:
        super().__init__(folder, "Mixtral", num_local_experts=3)
        checkpoint = Checkpoint(safetensors.read_headers([folder / "model.safetensors"]), "safetensors")
        parts = dict(zip(("gate", "up", "down"), kinds, strict=True))
        path = folder / "model.gguf"
        write_expert_gguf(self.spec, checkpoint, path, "llama", lambda name: parts.get(name.rpartition(".")[2], "F32"))
        self._files = locate(str(path), revision=None)
        self.spec = spec_of(self._files)

    def weights(self, device: torch.device) -> Weights:
        return load_weights(
            self.spec, open_checkpoint(self._files), dtype=torch.float32, device=device, expand=False
        )  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_transformers(model: str, device: torch.device, tmp_path: Path) -> None:
    """Chunks, mixed steps and single tokens; a graph of them where there is a GPU."""
    tiny = Tiny(tmp_path, **MODELS[model])
    lengths = (21, 1, 5) if device.type == "cuda" else (18, 5)
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    params = [SamplingParams(temperature=0.0, max_tokens=2 + number, ignore_eos=True) for number in range(len(lengths))]
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0", "Q4_0"), ("Q4_1", "F32", "Q5_0")], ids="-".join)
def test_quantized_experts_say_what_they_say_on_a_cpu(
    kinds: tuple[str, str, str], device: torch.device, tmp_path: Path
) -> None:
    tiny = TinyFile(tmp_path, kinds)
    prompts = [prompt(number, length) for number, length in enumerate((14, 2))]
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)] * 2
    here = run(tiny.core(device, gpu=True), prompts, params)
    there = run(tiny.core(CPU, gpu=False), prompts, params)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [8, 5000])
def test_buffers_are_those_that_are_planned(model: str, tokens: int, tmp_path: Path) -> None:
    """To the byte, however experts are kept."""
    tiny = Tiny(tmp_path, **MODELS[model])
    experts = tiny.weights(CPU).layers[-1].mlp
    assert isinstance(experts, ExpertWeights)
    scratch = Scratch(torch.float32, CPU)
    made = ExpertGpuMaker(tiny.spec.hidden_size, "silu", torch.empty(tokens, 0), scratch).make(experts)
    buffers = made._buffers
    kept = [*buffers.lines, buffers.logits, buffers.inner, buffers.rows, buffers.shared]
    assert sum(tensor.nbytes for tensor in kept) == expert_sizes.gpu_bytes(tiny.spec, tokens, 4)


def test_more_tokens_than_buffers_hold_are_taken_in_turns(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.execution.gpu.layers.experts.GPU_TOKENS", 5)
    tiny = Tiny(tmp_path, **MODELS["mixtral"])
    asked, params = prompt(0, 13), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [outputs] = run(tiny.core(device, gpu=True), [asked], [params])
    tiny.assert_greedy(asked, tokens_of(outputs))
