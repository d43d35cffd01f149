"""Inputs of products rounded to eight bits, as the formats that multiply in FP8 or INT8 define them.

    input ≈ code · scale       scale = largest of a row, or of a group of its columns, / 448 (fp8) or / 127 (int8);
                               the largest no larger than a bound, the scale a power of two, where the format says so

A scale that the checkpoint stores takes the place of that. On a CPU the codes are multiplied as float32: the same
answers as on a device that multiplies the codes themselves, but for the order of sums. Knows no matrices.
"""

from __future__ import annotations

import torch

from holdfast.footprint.scaled_layouts import ScaledLayout

LARGEST = {"fp8": 448.0, "int8": 127.0}
PIECE_ELEMENTS = 1 << 20
"""That are rounded at a time: bounds what lies beside the result."""
_LEAST_SCALE = 1e-12
"""Rows of zeros stay zeros."""


def rounded_inputs(x: torch.Tensor, layout: ScaledLayout, stored_scale: torch.Tensor | None) -> torch.Tensor:
    """x [rows, columns] in float32, every element one that eight bits can say."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    step = max(1, PIECE_ELEMENTS // x.shape[1])
    for first in range(0, len(x), step):
        _round(x[first : first + step], layout, stored_scale, out[first : first + step])
    return out


def _round(x: torch.Tensor, layout: ScaledLayout, stored_scale: torch.Tensor | None, out: torch.Tensor) -> None:
    largest = LARGEST[layout.inputs]
    shape = (len(x), -1, layout.input_group or x.shape[1])
    groups = x.float().reshape(shape)
    scales = input_scales(groups.abs().amax(-1, keepdim=True), layout) if stored_scale is None else stored_scale
    scaled = (groups / scales).clamp_(-largest if layout.inputs == "fp8" else -largest - 1, largest)
    codes = scaled.to(torch.float8_e4m3fn).float() if layout.inputs == "fp8" else scaled.round_()
    torch.mul(codes, scales, out=out.view(shape))


def input_scales(most: torch.Tensor, layout: ScaledLayout) -> torch.Tensor:
    """What inputs are divided by whose largest are these, in float32."""
    if layout.input_bound:
        # A row that is not finite stays so.
        most = torch.where(most.isfinite(), most.clamp(max=layout.input_bound), most)
    scales = (most / LARGEST[layout.inputs]).clamp_(min=_LEAST_SCALE)
    return power_of_two_above(scales) if layout.input_powers else scales


def power_of_two_above(scales: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below each, of positive float32: infinity stays, and so does what is none."""
    powers = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scales.isnan(), scales, powers)
