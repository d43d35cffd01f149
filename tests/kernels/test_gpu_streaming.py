"""The GPU runner with layers that do not stay on the device: tokens are those of transformers. Without a GPU its
kernels run in the interpreter, and a simulated link brings layers late into poisoned slots."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from simulated_copies import SimulatedCopies, unpinned_memory
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.execution.gpu.decoder import arrange_layer
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_layers import DeviceLayers, pinned_sizes
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.streamed import streamed_layers
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.records import SamplingParams


class Streamed(Tiny):
    """All layers but the second come for every step, and rows of the embedding are gathered from the host."""

    def weights(self, device: torch.device) -> Weights:
        known = EngineWeights(self.spec, None, None)
        placed = streamed_layers(known.by_layer(dtype="float32"), len(self.spec.layers) - 1, 0)
        placed = replace(placed, embedding_bytes=known.gathered_bytes(dtype="float32"))
        sizes = pinned_sizes(placed)
        on_gpu = device.type == "cuda"
        self.copies = CudaCopies(device) if on_gpu else SimulatedCopies(seed=1)
        memory = PinnedMemory(sizes) if on_gpu else unpinned_memory(sizes)
        dtype = torch.float32
        return load_weights(
            self.spec,
            Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors"),
            dtype=dtype,
            device=device,
            expand=True,
            slots=DeviceLayers(placed, device, self.copies, memory),
            arrange=partial(arrange_layer, dtype=dtype, device=device),
        )


@pytest.mark.usefixtures("few_programs")
def test_tokens_are_those_of_transformers(tmp_path: Path, device: torch.device) -> None:
    model = Streamed(tmp_path, "Llama", num_hidden_layers=4, tie_word_embeddings=False)
    prompts, params = [prompt(1, 9), prompt(2, 3)], [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 2
    core = model.core(device, gpu=True)
    assert core.runner.layer_slots_bytes > 0
    for asked, outputs in zip(prompts, run(core, prompts, params), strict=True):
        model.assert_greedy(asked, tokens_of(outputs))
    assert model.copies.use().copied_bytes > 3 * core.runner.layer_slots_bytes
    core.close()
