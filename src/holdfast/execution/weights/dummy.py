"""Weights out of nothing: seeded per tensor name, different in every layer, scaled so that logits have spread."""

from __future__ import annotations

import hashlib

import torch

from holdfast.models import TensorSpec

_LOGIT_SPREAD = 3.0
"""Standard deviation of logits: a greedy choice is clear, a sampled one varied."""


def fill_dummy(target: torch.Tensor, tensor: TensorSpec, *, tied: bool) -> None:
    """In place and on the tensor's own device; the same name and shape give the same numbers."""
    seed = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(device=target.device).manual_seed(seed)
    kind = tensor.name.rpartition(".")[2]
    if kind.endswith("norm"):
        target.uniform_(0.8, 1.2, generator=generator)
        return
    if len(tensor.shape) == 1:
        target.uniform_(-0.1, 0.1, generator=generator)
        return
    # Norms feed unit-size vectors to every product; 1/sqrt(inputs) keeps its outputs of that size too, and the
    # embedding so small that what the layers add decides the logits.
    deviation = tensor.shape[-1] ** -0.5
    if kind == "head" or (kind == "embed" and tied):
        deviation *= _LOGIT_SPREAD
    reach = deviation * 3**0.5
    target.uniform_(-reach, reach, generator=generator)
