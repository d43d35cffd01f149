"""Which experts a token goes to, where several ranks have a part of each, or some of them: what the first rank finds,
for all of them.

Every rank could compute the same product, but not to the same bits: its threads, of which ranks may have different
numbers, decide the order of its sums. Where two experts are all but equal, ranks would choose different ones and add up
halves of two of them, or an expert would be left out by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.layers.linear import Linear
from holdfast.execution.parallel.collectives import Collectives
from holdfast.execution.weights.decoder_weights import LayerWeights


@dataclass(slots=True)
class Crowding:
    """While it is on, all tokens go to the experts that this rank has, as far as there are enough: so that a profile
    run, whose numbers mean nothing, takes the memory that this rank may ever need."""

    on: bool = False


class FirstRanksRouter:
    """A Linear. `out` is contiguous. `here`: of a rank that has whole experts, which."""

    def __init__(
        self, router: Linear, collectives: Collectives, here: Sequence[int] = (), crowding: Crowding | None = None
    ) -> None:
        self._router, self._collectives = router, collectives
        self._here, self._crowding = list(here), crowding or Crowding()
        self.rows, self.columns = router.rows, router.columns

    @property
    def nbytes(self) -> int:
        return self._router.nbytes

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._collectives.rank == 0:
            self._router.write(x, out)
        self._collectives.broadcast(out)
        if self._crowding.on and self._here:
            out.zero_()[:, self._here] = 1.0

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("what a router says is added to nothing")


def routed_by_first(
    layers: Sequence[LayerWeights], collectives: Collectives, crowding: Crowding
) -> tuple[LayerWeights, ...]:
    """The same layers; those with experts ask the first rank."""

    def asked(experts: ExpertWeights) -> ExpertWeights:
        here = experts.spec.numbers if experts.spec.here else ()
        return replace(experts, router=FirstRanksRouter(experts.router, collectives, here, crowding))

    return tuple(
        replace(layer, mlp=asked(layer.mlp)) if isinstance(layer.mlp, ExpertWeights) else layer for layer in layers
    )
