"""Which experts a token goes to, where several ranks have a part of each: what the first rank finds, for all of them.

Every rank could compute the same product, but not to the same bits: its threads, of which ranks may have different
numbers, decide the order of its sums. Where two experts are all but equal, ranks would choose different ones and add up
halves of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.layers.linear import Linear
from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.weights.decoder_weights import LayerWeights


class FirstRanksRouter:
    """A Linear. `out` is contiguous."""

    def __init__(self, router: Linear, collectives: Collectives) -> None:
        self._router, self._collectives = router, collectives
        self.rows, self.columns = router.rows, router.columns

    @property
    def nbytes(self) -> int:
        return self._router.nbytes

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._collectives.rank == 0:
            self._router.write(x, out)
        self._collectives.broadcast(out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("what a router says is added to nothing")


def routed_by_first(layers: Sequence[LayerWeights], collectives: Collectives) -> tuple[LayerWeights, ...]:
    """The same layers; those with experts ask the first rank."""
    return tuple(
        replace(layer, mlp=replace(layer.mlp, router=FirstRanksRouter(layer.mlp.router, collectives)))
        if isinstance(layer.mlp, ExpertWeights)
        else layer
        for layer in layers
    )
