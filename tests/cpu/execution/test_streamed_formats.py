"""Layers of quantized checkpoints that come to a device for every step, come to stay, and leave: bit for bit what they
are where they stay, and as many bytes saved on the way as a plan counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aliased_memory import AliasedMemory
from quantized_files import write_quantized
from quantized_formats import FORMATS
from simulated_copies import SimulatedCopies, unpinned_memory

from holdfast.checkpoints import Checkpoint, match
from holdfast.checkpoints.formats import safetensors
from holdfast.execution.gpu.memory.layer_ranges import LayerRanges
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.layer_pieces import LayerPieces
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.streamed import beside_gpu, streamed_layers
from holdfast.models import ModelSpec, from_config
from holdfast.planner.sizing.engine_weights import EngineWeights

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    "Qwen3Moe": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 3, "head_dim": 16,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
MIXTURES = ("awq", "gptq-asymmetric", "gptq-8-asymmetric-ordered", "w4a16-asymmetric", "nf4")
IN_FOUR_BITS = {"awq", "awq-modules", "gptq-asymmetric", "gptq-v2", "w4a16-asymmetric"}
"""With zero points."""


def tensors(held: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All that lie in it, however it is made."""
    if isinstance(held, torch.Tensor):
        yield name, held.contiguous().view(-1).view(torch.uint8).clone()
    elif isinstance(held, list | tuple):
        for at, one in enumerate(held):
            yield from tensors(one, f"{name}.{at}")
    elif type(held).__module__.startswith("holdfast."):
        own = [one.name for one in fields(held)] if is_dataclass(held) else list(vars(held))
        for one in own:
            yield from tensors(getattr(held, one), f"{name}.{one}")


def halves(held: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of a layer: what attention reads, and the MLP."""
    first, second = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, one in tensors(held, ""):
        (second if name.startswith((".mlp", ".post_mlp")) else first)[name] = one
    return first, second


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    assert len(found) >= 4
    for name, one in found.items():
        assert torch.equal(one, wanted[name]), name


def loaded(spec: ModelSpec, checkpoint: Checkpoint, slots: DeviceLayers | None = None) -> Weights:
    return load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=False, slots=slots)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("architecture", "name"),
    [*(("Llama", name) for name in FORMATS), *(("Qwen3Moe", name) for name in MIXTURES)],
)
def test_every_byte_of_a_layer_is_itself_wherever_it_comes_from(
    architecture: str, name: str, oracles: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(oracles(architecture, **SHAPES[architecture]).folder, tmp_path, FORMATS[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))
    packed, pack = list[int](), LayerPieces.pack
    monkeypatch.setattr(LayerPieces, "pack", lambda to, *which: (packed.append(which[1].nbytes), pack(to, *which)))
    plain, made = LayerPieces({}), LayerPieces.made  # As if nothing were packed.
    monkeypatch.setattr(LayerPieces, "made", lambda to, *which: (made(plain, *which), made(to, *which)))
    with Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors") as checkpoint:
        wanted = [halves(layer) for layer in loaded(spec, checkpoint).layers]
        known = EngineWeights(spec, match(spec, checkpoint))
        by_layer, saved = known.by_layer(dtype="float32"), known.saved_by_layer(dtype="float32")
        placed = replace(beside_gpu(streamed_layers(by_layer, 2, 0), by_layer), saved=saved)
        layers = DeviceLayers(
            placed, CPU, SimulatedCopies(seed=1), unpinned_memory(placed.pinned_sizes),
            ranges=LayerRanges(placed.all_sizes, CPU, AliasedMemory()), room=lambda: 1 << 40,
        )  # fmt: skip
        found = loaded(spec, checkpoint, layers)
    assert sum(packed) == 2 * sum(saved)
    assert (sum(saved) > 0) == (name in IN_FOUR_BITS)
    for layer in range(3):
        assert by_layer[layer] <= plain.nbytes([layer]) <= placed.all_sizes[layer]
        assert layers.moved_with([layer]) == plain.nbytes([layer]) - saved[layer]
    for streamed in (layers.streamed, (0, 1, 2), (), (0, 2), (1,)):
        layers.change(streamed)
        assert layers.moved_bytes == plain.nbytes(streamed) - sum(saved[layer] for layer in streamed)
        for _ in range(2):
            for layer in range(3):
                layers.begin(layer)
                compare(halves(found.layers[layer])[0], wanted[layer][0])
                layers.halfway(layer)
                compare(halves(found.layers[layer])[1], wanted[layer][1])
                layers.end(layer)
    layers.close()
