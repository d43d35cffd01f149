"""Products whose inputs are rounded with one scale for a row, where several ranks have parts of that row: the largest
of all parts decides, so that every rank rounds its part as one rank alone would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.layers.linear import DividedLinear, Linear
from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.weights.decoder_weights import GatedWeights, LayerWeights, MlpWeights, PlainWeights


class LargestOfRows:
    """Of each row, the largest size of a number that any rank has in its part of it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, 1], the same on all ranks."""
        least, most = torch.aminmax(x, dim=1)
        # A sum in which each number has one rank's alone: those of all ranks, and not a bit of them changed.
        found = torch.zeros((self._collectives.size, len(x)), dtype=torch.float32, device=x.device)
        found[self._collectives.rank] = torch.maximum(-least, most)
        self._collectives.all_reduce(found)
        return found.amax(0).unsqueeze(1)


def rounded_together(layers: Sequence[LayerWeights], collectives: Collectives) -> tuple[LayerWeights, ...]:
    """The same layers; products that round a part of a row ask the other ranks."""
    largest = LargestOfRows(collectives)

    def asking(linear: Linear) -> Linear:
        return linear.among(largest) if isinstance(linear, DividedLinear) else linear

    def mlp(part: MlpWeights) -> MlpWeights:
        if isinstance(part, GatedWeights | PlainWeights):
            return replace(part, down=asking(part.down))
        if isinstance(part, ExpertWeights) and part.shared is not None:
            return replace(part, shared=replace(part.shared, down=asking(part.shared.down)))
        return part

    return tuple(replace(layer, o=asking(layer.o), mlp=mlp(layer.mlp)) for layer in layers)
