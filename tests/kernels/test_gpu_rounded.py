"""Models whose products round their inputs, on the GPU runner: what they say on a CPU, chunks and single tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quantized_files as written
import torch
from quantized_files import Format, write_quantized
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.weights.load import Weights, load_weights
from holdfast.models import from_config
from holdfast.records import SamplingParams

CPU = torch.device("cpu")
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
FORMATS = {
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, written.fp8(), "fp8"),
    "fp8-static": Format({"quant_method": "fp8", "activation_scheme": "static"}, written.fp8(static=0.02), "fp8", 0.02),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        written.fp8("block", block=(128, 128), name="weight_scale_inv"),
        "fp8",
        input_group=128,
    ),
    "int8": Format(
        written.compressed(
            {**INTEGERS, "strategy": "channel"}, {**INTEGERS, "dynamic": True, "strategy": "token"}, "int-quantized"
        ),
        written.int8(),
        "int8",
    ),
}


class TinyRounded(Tiny):
    def __init__(self, folder: Path, made: Format) -> None:
        (folder / "plain").mkdir()
        super().__init__(folder / "plain", "Llama", hidden_size=128, intermediate_size=256, head_dim=32)
        write_quantized(self.folder, folder / "quantized", made)
        self.folder = folder / "quantized"
        self.spec = from_config(json.loads((self.folder / "config.json").read_text()))

    def weights(self, device: torch.device) -> Weights:
        checkpoint = Checkpoint(safetensors.read_headers((self.folder / "model.safetensors",)), "safetensors")
        found = load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=False)
        assert isinstance(found.layers[0].o, QuantizedLinear)
        return found


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "name", ["fp8", *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS if name != "fp8")]
)
def test_a_rounded_model_says_what_it_says_on_a_cpu(name: str, device: torch.device, tmp_path: Path) -> None:
    tiny = TinyRounded(tmp_path, FORMATS[name])
    prompts = [prompt(number, length) for number, length in enumerate((18, 2))]
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)] * 2
    here = run(tiny.core(device, gpu=True), prompts, params)
    there = run(tiny.core(CPU, gpu=False), prompts, params)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            # An input that lies between two codes may fall to either side.
            assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=0.03)
