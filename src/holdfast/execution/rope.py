"""Rotary angles from a RopeSpec: inverse frequencies once, cos and sin for the positions of a step.

Computed for the step instead of kept for every position of the context: as cheap, and it holds no table.
"""

from __future__ import annotations

import math

import torch

from holdfast.models import RopeSpec


def inverse_frequencies(rope: RopeSpec, factors: torch.Tensor | None = None) -> torch.Tensor:
    """[dim / 2] in float32. `factors`, where a checkpoint brings them, divide the frequencies."""
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
    return frequencies


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

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), rope.dim - 1)
    width = max(float(high - low), 0.001)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


class Rotary:
    def __init__(self, rope: RopeSpec, device: torch.device, factors: torch.Tensor | None = None) -> None:
        self.frequencies = inverse_frequencies(rope, factors).to(device)
        self.magnitude = rope.attention_factor

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, 1, dim / 2] in float32."""
        angles = (positions.to(torch.float32)[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos *= self.magnitude
            sin *= self.magnitude
        return cos, sin
