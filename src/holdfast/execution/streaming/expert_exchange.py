"""What a GPU's layer has of the pinned memory through which the host computes some of its experts: tensors, and nothing
that is computed. `footprint.experts.ExchangeLayout` draws it."""

from __future__ import annotations

from typing import NamedTuple

import torch

SHARES = 256
"""In so many parts the experts that wait are divided between host and link."""


class Exchange(NamedTuple):
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
