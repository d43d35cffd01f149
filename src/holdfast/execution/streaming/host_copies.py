"""Copies of experts and MLPs that the host's cores compute with for a GPU, loaded beside what the GPU has.

In the layout that compiled products read; what the GPU multiplies is loaded by `weights.load`. Knows nothing of steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from holdfast.checkpoints import Checkpoint
from holdfast.errors import EngineError
from holdfast.execution.native import ExpertLayer
from holdfast.execution.streaming.host_mlps import HostMlps
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.experts import host_mlp, load_host_layer
from holdfast.execution.weights.load import Loader
from holdfast.footprint.layouts import Quantize
from holdfast.models import ModelSpec

HOST_READERS = 8  # Each loads a layer's experts for the host: most of the time the system makes pages for them.


def load_host_experts(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    layers: Sequence[int],
    quantize: Quantize | None = None,
    given_up: threading.Event | None = None,
) -> list[ExpertLayer]:
    """All experts of these layers once more, as the host computes with them for a GPU; several layers at a time. An
    EngineError once it is `given_up`."""

    def load(layer: int) -> ExpertLayer:
        if given_up is not None and given_up.is_set():
            raise EngineError("loading was given up")
        one = Loader(spec, checkpoint, torch.float32, torch.device("cpu"), False, True, False, None, quantize)
        with torch.inference_mode(), one.ahead.readers:
            return load_host_layer(one, spec.layers[layer], spec.activation)

    with ThreadPoolExecutor(HOST_READERS, "host-experts") as threads:
        return list(threads.map(load, layers))


def load_host_mlp(
    spec: ModelSpec, checkpoint: Checkpoint | None, layer: int, dtype: torch.dtype, quantize: Quantize | None = None
) -> ExpertLayer | None:
    """The MLP of a layer once more, as the host computes with it for a GPU; None: its kernels do not read it. Several
    may be loaded at a time, each by a thread."""
    loader = Loader(spec, checkpoint, dtype, torch.device("cpu"), False, True, False, None, quantize)
    with torch.inference_mode(), loader.ahead.readers:
        return host_mlp(loader.mlp(spec.layers[layer]), spec.activation)


def with_host_mlps(weights: Weights, spec: ModelSpec, checkpoint: Checkpoint | None, hosts: HostMlps) -> Weights:
    """The norms of their halves, which are not copied to the GPU for steps of few tokens, stay there from now on."""
    device, layers = weights.final_norm.weight.device, list(weights.layers)
    loader = Loader(spec, checkpoint, weights.dtype, device, False, False, False, None, None)
    with torch.inference_mode(), loader.ahead.readers:
        for index, kept in [(index, layers[index]) for index in hosts.candidates]:
            norms = {name: f"layers.{index}.{name}" for name in ("mlp_norm", "post_mlp_norm")}
            own: dict[str, Any] = {name: loader.norm(norms[name]) for name in norms if getattr(kept, name)}
            layers[index] = replace(kept, **own)
    return replace(weights, layers=tuple(layers), host_mlps=hosts)
