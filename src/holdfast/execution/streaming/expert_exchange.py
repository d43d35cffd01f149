"""What a GPU's layer has of the pinned memory through which the host computes some of its experts: tensors, and nothing
that is computed. `footprint.experts.ExchangeLayout` draws it. And how it fetches others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

SHARES = 256
"""In so many parts the experts that wait are divided between host and link."""


FETCHED_BYTES = 32 << 10
"""Of an expert, that one program copies: all of it is on its way at once."""


class FetchedPieces(NamedTuple):
    """Of a waiting expert's bytes, how a GPU copies them over the link into the layer's slot."""

    table: torch.Tensor
    """int64 [pieces, 4] on the device: addresses of the first expert's where it waits and in the slot, bytes between
    one expert's and the next one's, and words."""
    word_bytes: int
    waiting: int
    """Experts of the layer that wait."""

    @classmethod
    def of(cls, planes: Sequence[torch.Tensor], over_link: Sequence[torch.Tensor], waiting: int) -> FetchedPieces:
        """`planes`: in the slot, with all rows of an expert side by side; `over_link`: the same where they wait."""
        each = [plane.nbytes // waiting for plane in planes]
        word = 8 if all(nbytes % 16 == 0 for nbytes in each) else 1
        rows = [
            (there.data_ptr() + first, here.data_ptr() + first, nbytes, min(FETCHED_BYTES, nbytes - first) // word)
            for here, there, nbytes in zip(planes, over_link, each, strict=True)
            for first in range(0, nbytes, FETCHED_BYTES)
        ]
        return cls(torch.tensor(rows, dtype=torch.int64, device=planes[0].device), word, waiting)


class LayerExchange(NamedTuple):
    """Of one layer, as the GPU sees it, and of all its steps."""

    request: torch.Tensor
    """int32 [1]"""
    reply: torch.Tensor
    """int32 [1]"""
    chosen: torch.Tensor
    """int32 [tokens, per_token]"""
    weights: torch.Tensor
    """float32 [tokens, per_token]"""
    x: torch.Tensor
    """[tokens, hidden]"""
    y: torch.Tensor
    """float32 [tokens, hidden]"""
    experts: torch.Tensor
    """int32 [tokens, per_token] on the device: what each token chose."""
    over_link: int
    """Of SHARES: what the GPU keeps of the experts that wait, and reads over the link."""
    step: torch.Tensor
    """int32 [1] on the device: the number of the step that is computed."""
    arrived: torch.Tensor
    """int32 [1] on the device: programs that are done. 0 between launches."""
    failed: torch.Tensor
    """int32 [1] on the device: not 0 once a reply did not come."""
    lost: torch.Tensor | None = None
    """int32 [1] that both see: the same, for the host to look at."""


class Apart(NamedTuple):
    """Where a layer's products find its experts."""

    places: torch.Tensor
    """int32 [experts]"""
    uses: torch.Tensor
    """int32 [experts]: tokens that chose each, in steps with few, so far."""
    fetched: FetchedPieces | None = None
    """Those that wait are to be fetched; None: they are in their slot."""
    exchange: LayerExchange | None = None
    """With the host, which computes with those that wait, or some of them."""
    slots: torch.Tensor | None = None
    """int32 [rows]: of the rows that are tokens. Others pad the step: nothing comes or is computed for what they would
    choose, nor is it counted. None: it makes no difference."""


def bytes_of(plane: torch.Tensor, experts: int) -> torch.Tensor:
    """[expert, bytes], the same memory."""
    return plane.view(torch.uint8).view(experts, -1)
