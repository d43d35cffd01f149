"""From hidden states to vectors: of length 1, which can be compared, or a classifier's scores. Knows nothing of who
asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing
import torch

LEAST_LENGTH = 1e-12
"""A state of nothing but zeros stays what it is."""


def vectors(
    hidden: torch.Tensor, wanted: numpy.typing.NDArray[numpy.bool_], classifier: torch.Tensor | None = None
) -> list[bytes]:
    """Of normed hidden states [rows, hidden]: bytes of float32 for the rows that are wanted, none for the others.
    `classifier` [labels, hidden]: its products in place of the states themselves."""
    places = numpy.flatnonzero(wanted)
    chosen = hidden.index_select(0, torch.from_numpy(places).to(hidden.device)).float()
    if classifier is None:
        told = chosen / chosen.norm(dim=1, keepdim=True).clamp_min(LEAST_LENGTH)
    else:
        told = chosen @ classifier.T
    numbers = told.cpu().numpy().astype("<f4", copy=False)
    found = [b""] * len(wanted)
    for place, vector in zip(places.tolist(), numbers, strict=True):
        found[place] = vector.tobytes()
    return found


def as_tensor(numbers: Sequence[float]) -> torch.Tensor:
    """For callers who compute on with them."""
    return torch.tensor(numbers, dtype=torch.float32)
