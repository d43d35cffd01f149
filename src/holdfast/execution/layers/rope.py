"""Rotary angles from a RopeSpec: inverse frequencies once, cos and sin for the positions of a step.

Computed for the step instead of kept for every position of the context: as cheap, and it holds no table.
"""

from __future__ import annotations

import math

import torch

from holdfast.execution.weights.decoder_weights import Weights
from holdfast.models import ModelSpec, RopeSpec


def inverse_frequencies(
    rope: RopeSpec, factors: torch.Tensor | None = None, context: int | None = None
) -> torch.Tensor:
    """[dim / 2] in float32. `factors`, where a checkpoint brings them, divide the frequencies. `context`: the longest
    that a sequence may get, where the rotation goes by it."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if factors is not None:
        return frequencies / factors.to("cpu", torch.float32)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies)
    if rope.scaling == "longrope":
        return frequencies / torch.tensor(rope.long_factors if _is_long(rope, context) else rope.short_factors)
    return frequencies


def _is_long(rope: RopeSpec, context: int | None) -> bool:
    """By the longest that a sequence may get, not by what it is: keys that were rotated stay as they are."""
    return context is None or context > rope.original_max_position


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = frequencies / rope.factor
    blended = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelengths > longest, stretched, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, result)


def _yarn(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn seldom stretched."""

    def dimension(rotations: float) -> float:
        return (rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = max(float(high - low), 0.001)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


class Rotary:
    """`rope` None: nothing is turned, and there are no angles."""

    def __init__(
        self,
        rope: RopeSpec | None,
        device: torch.device,
        factors: torch.Tensor | None = None,
        context: int | None = None,
    ) -> None:
        none = torch.empty(0, dtype=torch.float32)
        self.frequencies = (none if rope is None else inverse_frequencies(rope, factors, context)).to(device)
        self.magnitude = 1.0 if rope is None else rope.attention_factor

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, 1, dim / 2] in float32."""
        angles = (positions.to(torch.float32)[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos *= self.magnitude
            sin *= self.magnitude
        return cos, sin


def rotaries(
    spec: ModelSpec, device: torch.device, weights: Weights, context: int
) -> tuple[tuple[Rotary, ...], tuple[int, ...]]:
    """Every rotation that layers have, once, and which of them each layer has."""
    kinds = list(dict.fromkeys(spec.rope_of(layer) for layer in spec.layers))
    factors = weights.rope_factors(context, spec.rope.original_max_position)
    made = tuple(Rotary(rope, device, factors if rope == spec.rope else None, context) for rope in kinds)
    return made, tuple(kinds.index(spec.rope_of(layer)) for layer in spec.layers)
