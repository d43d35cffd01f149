"""Loads the embedding: to memory of its own, to where its rows are gathered from the host's, or to a file that they are
read from. Knows no layers."""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.execution.layers.linear import DenseLinear, Linear
from holdfast.execution.memory import MakeTensor, exact_tensor
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk.embedding_rows import EmbeddingRows
from holdfast.execution.streaming.disk.layer_slots import LayerSlots


class EmbeddingLoader(Protocol):
    """What is asked of whoever loads the layers."""

    make: MakeTensor
    slots: LayerSlots | DeviceLayers | None
    device: torch.device

    def linear(self, *names: str) -> Linear: ...


def load_embedding(loader: EmbeddingLoader) -> Linear:
    slots = loader.slots if isinstance(loader.slots, DeviceLayers) else None
    if slots is not None and slots.embedding_rows is not None:
        return _into_file(loader, slots.embedding_rows)
    arena = None if slots is None else slots.embedding
    if arena is None:
        return loader.linear("embed")
    loader.make = arena.tensor
    try:
        return loader.linear("embed")
    finally:
        loader.make = exact_tensor


def _into_file(loader: EmbeddingLoader, rows: EmbeddingRows) -> Linear:
    """Made once, before anything else is, and given back: what is left has no rows."""
    made = loader.linear("embed")
    assert isinstance(made, DenseLinear), "plans put no other into a file"
    rows.keep(made.weight)
    none = DenseLinear(made.weight.new_empty((0, made.columns)))
    del made
    if loader.device.type == "cuda":
        torch.cuda.empty_cache()  # Layers that stay are not made of torch's memory.
    return none
