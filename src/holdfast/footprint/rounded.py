"""Products whose inputs are rounded to one byte: on which GPUs, and what their workspaces take. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.scaled_layouts import PIECE, Inputs, ScaledLayout

FP8_CAPABILITY = (8, 9)
"""Ada and later multiply float8_e4m3fn, and convert to it."""
MOST_PARTS = 528
"""Programs that may leave sums for another to add up: four for each multiprocessor of an H200."""
PART_BYTES = 64 * 64 * 4
"""Of the sums of one: 64 outputs by 64 rows."""
GROUP = 128
"""Inputs that share a scale where the matrix has scales for blocks, which are as wide."""


@dataclass(frozen=True, slots=True)
class Rounding:
    inputs: Inputs
    """What inputs are rounded to; plain: not at all, the matrix is decoded instead."""
    reason: str


def rounding_of(layout: ScaledLayout, capability: tuple[int, int]) -> Rounding:
    """For products with a matrix in this layout on a GPU of this compute capability."""
    if layout.inputs == "plain":
        return Rounding("plain", "the checkpoint does not ask for rounded inputs")
    if layout.inputs == "fp8" and capability < FP8_CAPABILITY:
        named, least = (".".join(map(str, one)) for one in (capability, FP8_CAPABILITY))
        return Rounding(
            "plain",
            f"compute capability {named} has no FP8 arithmetic ({least} has): weights stay FP8 and are decoded in the "
            "kernel, inputs are not rounded",
        )
    return Rounding(layout.inputs, f"the checkpoint asks for inputs in {layout.inputs}, and the GPU multiplies them")


def gpu_lacks(layout: ScaledLayout, capability: tuple[int, int], *, experts: bool) -> str | None:
    """What of this layout no kernel for a GPU of this compute capability takes; None: it is multiplied there."""
    rounded = rounding_of(layout, capability).inputs != "plain"
    if layout.ordered and rounded:
        return "columns in an order of their own"
    if not rounded:
        return f"groups of {layout.group} columns, which 32 does not divide" if layout.group % PIECE else None
    if layout.codes != layout.inputs:
        return f"weights in {layout.codes} with inputs in {layout.inputs}"
    if layout.zeros:
        return "zero points beside rounded inputs"
    if (layout.group_rows, layout.group) != (1, 0) and not (layout.inputs == "fp8" and _in_blocks(layout, experts)):
        return f"scales for {layout.group_rows} x {layout.group} beside rounded inputs"
    if layout.input_group != layout.group:
        return f"inputs scaled by {layout.input_group or 'row'}, and a matrix by {layout.group or 'row'}"
    return None


def _in_blocks(layout: ScaledLayout, experts: bool) -> bool:
    """Blocks of 128 x 128; experts whose rows do not divide by 128 have them for every row."""
    return layout.group == GROUP and layout.group_rows in ((GROUP, 1) if experts else (GROUP,))


def workspace_bytes(tokens: int, widest: int, hidden: int, element_bytes: int) -> int:
    """`widest`: most inputs of a product; `hidden`: outputs of those that are added to the residual stream."""
    codes, scales, sums = tokens * widest, tokens * -(-widest // GROUP) * 4, tokens * hidden * element_bytes
    return codes + scales + sums + MOST_PARTS * (PART_BYTES + 4) + 4
