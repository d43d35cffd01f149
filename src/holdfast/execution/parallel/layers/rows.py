"""Products that need more of a row of inputs than the part of it that a rank has.

rounded with one scale for a row   the largest of all parts decides: every rank rounds as one rank alone would
columns in an order of their own   the whole row, of which a rank takes the inputs of its own groups (act-order)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.layers.linear import DividedLinear, GatheredLinear, Linear
from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.weights.decoder_weights import GatedWeights, LayerWeights, MlpWeights, PlainWeights
from holdfast.models.spec import ShardPiece


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


class WholeOfRows:
    """Of each row all of it, of which every rank has a part."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, x: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
        """[rows, all columns], the same on all ranks."""
        found, begin = x.new_zeros((len(x), piece.whole[-1])), 0
        for first, last in piece.ranges:
            found[:, first:last] = x[:, begin : begin + last - first]
            begin += last - first
        # As above, each number is one rank's alone.
        self._collectives.all_reduce(found)
        return found


def multiplied_together(layers: Sequence[LayerWeights], collectives: Collectives) -> tuple[LayerWeights, ...]:
    """The same layers; products that need more than a part of a row ask the other ranks."""
    largest, whole_rows = LargestOfRows(collectives), WholeOfRows(collectives)

    def asking(linear: Linear) -> Linear:
        if isinstance(linear, GatheredLinear):
            return linear.among(whole_rows)
        return linear.among(largest) if isinstance(linear, DividedLinear) else linear

    def mlp(part: MlpWeights) -> MlpWeights:
        if isinstance(part, GatedWeights | PlainWeights):
            return replace(part, down=asking(part.down))
        if isinstance(part, ExpertWeights) and part.shared is not None:
            return replace(part, shared=replace(part.shared, down=asking(part.shared.down)))
        return part

    return tuple(replace(layer, o=asking(layer.o), mlp=mlp(layer.mlp)) for layer in layers)
