"""A tiny model whose layers do not stay on the device: over a GPU's link, or a simulated one that is always late."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from aliased_memory import AliasedMemory
from simulated_copies import SimulatedCopies, unpinned_memory
from tiny_gpu import Tiny

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.execution.gpu.decoder import arrange_layer
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.streamed import beside_gpu, streamed_layers
from holdfast.planner.sizing.engine_weights import EngineWeights


class Streamed(Tiny):
    """All layers but the second come for every step, and rows of the embedding are gathered from the host. All of them
    may come to stay, and leave."""

    expand = True
    on_disk = 0
    """Layers; with any, the embedding is there too."""

    def saved(self, known: EngineWeights) -> tuple[int, ...]:
        """By layer, of what it has less where it waits."""
        return known.saved_by_layer(dtype="float32")

    def weights(self, device: torch.device) -> Weights:
        device = torch.empty(0, device=device).device  # With its number.
        known = EngineWeights(self.spec, None, None)
        by_layer = known.by_layer(dtype="float32")
        placed = beside_gpu(streamed_layers(by_layer, len(self.spec.layers) - 1, self.on_disk), by_layer)
        placed = replace(placed, saved=self.saved(known))
        gathered = known.gathered_bytes(dtype="float32")
        placed = replace(placed, embedding_bytes=gathered, embedding_on_disk=self.on_disk > 0)
        file = None
        if placed.file_bytes:
            behind = placed.file_bytes - placed.embedding_offset
            file = LayerFile(self.folder, self.on_disk, placed.waiting_bytes, behind_bytes=behind)
        sizes = placed.pinned_sizes
        on_gpu = device.type == "cuda"
        self.copies = CudaCopies(device) if on_gpu else SimulatedCopies(seed=1)
        memory = PinnedMemory(sizes, device) if on_gpu else unpinned_memory(sizes)
        self.driver = None if on_gpu else AliasedMemory()
        ranges = LayerRanges(placed.all_sizes, device, self.driver)
        self.layers = DeviceLayers(placed, device, self.copies, memory, file, ranges, lambda: 1 << 40)
        dtype = torch.float32
        return load_weights(
            self.spec,
            Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors"),
            dtype=dtype,
            device=device,
            expand=self.expand,
            slots=self.layers,
            arrange=partial(arrange_layer, dtype=dtype, device=device),
        )
