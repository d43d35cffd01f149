"""From hidden states to vectors that can be compared: float32, of length 1. Knows nothing of who asked."""

from __future__ import annotations

import numpy
import numpy.typing
import torch

LEAST_LENGTH = 1e-12
"""A state of nothing but zeros stays what it is."""


def vectors(hidden: torch.Tensor, wanted: numpy.typing.NDArray[numpy.bool_]) -> list[bytes]:
    """Of normed hidden states [rows, hidden]: bytes for the rows that are wanted, none for the others."""
    places = numpy.flatnonzero(wanted)
    chosen = hidden.index_select(0, torch.from_numpy(places).to(hidden.device)).float()
    lengths = chosen.norm(dim=1, keepdim=True).clamp_min(LEAST_LENGTH)
    normed = (chosen / lengths).cpu().numpy().astype("<f4", copy=False)
    found = [b""] * len(wanted)
    for place, vector in zip(places.tolist(), normed, strict=True):
        found[place] = vector.tobytes()
    return found
