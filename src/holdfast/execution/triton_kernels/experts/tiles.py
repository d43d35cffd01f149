"""How products with experts are cut: tiles by lines' length and number type, and how many there can be. No torch.

All fit the shared memory of every GPU from Ampere on (99 KiB for one program), but those that only GPUs with more get;
nothing is searched at run time. Measured on an H200 with 128 experts of 768, 8 for each token of 2,048.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.scaled_layouts import ScaledLayout


@dataclass(frozen=True, slots=True)
class ExpertTile:
    rows: int
    """Pairs of one expert's line a program takes."""
    outputs: int
    """Rows of its matrix; gated products take as many of gate and of up."""
    inputs: int
    """Columns it takes at a time: elements, or for quantized matrices blocks of 32."""
    warps: int
    stages: int


FEW, SOME, MANY = 16, 48, 256
"""Pairs an expert has on the average, up to which a tile has 16 rows, and 64; more have 128. From MANY on, codes with
scales are expanded before they are multiplied."""

_TILES = {
    # (bytes of an element, gated): few pairs, some, many
    (1, True): (ExpertTile(16, 32, 128, 4, 4), ExpertTile(64, 64, 128, 4, 3), ExpertTile(128, 64, 128, 8, 3)),
    (1, False): (ExpertTile(16, 64, 128, 4, 4), ExpertTile(64, 128, 128, 4, 3), ExpertTile(128, 128, 128, 8, 3)),
    (2, True): (ExpertTile(16, 32, 128, 4, 4), ExpertTile(64, 64, 64, 4, 4), ExpertTile(128, 64, 64, 8, 3)),
    (2, False): (ExpertTile(16, 64, 128, 4, 4), ExpertTile(64, 128, 64, 4, 3), ExpertTile(128, 128, 64, 8, 3)),
    # Exact float32 has no tensor cores: larger tiles than these spill registers.
    (4, True): (ExpertTile(16, 16, 64, 4, 2), ExpertTile(32, 32, 32, 4, 2), ExpertTile(32, 32, 32, 4, 2)),
    (4, False): (ExpertTile(16, 32, 64, 4, 2), ExpertTile(32, 32, 32, 4, 2), ExpertTile(32, 32, 32, 4, 2)),
}

LARGE_SHARED_BYTES = 227 * 1024
"""Hopper's and later GPUs' in data centres."""
_LARGE = {
    (2, True): ExpertTile(128, 128, 64, 8, 4),
    (2, False): ExpertTile(128, 256, 64, 8, 4),
    (1, True): ExpertTile(128, 128, 128, 8, 3),
    (1, False): ExpertTile(64, 128, 128, 4, 4),
}


def expert_tile(pairs: int, experts: int, element_bytes: int, shared_bytes: int, *, gated: bool) -> ExpertTile:
    """By the pairs that an expert has on the average, and the shared memory that a program may have."""
    few, some, many = _TILES[element_bytes, gated]
    average = pairs / experts
    if average > SOME and shared_bytes >= LARGE_SHARED_BYTES and element_bytes < 4:
        return _LARGE[element_bytes, gated]
    return few if average <= FEW else some if average <= SOME else many


def most_tiles(tokens: int, per_token: int, experts: int, rows: int) -> int:
    """No pairs can be spread over more: every line has a last tile that need not be full, and no more lines than pairs
    or experts are not empty."""
    pairs = tokens * per_token
    lines = min(pairs, experts)
    return lines + (pairs - lines) // rows


def expert_block_tile(pairs: int, experts: int, blocks: int, element_bytes: int) -> ExpertTile:
    """Codes are unpacked in registers, so that tiles are smaller than those of plain numbers."""
    inputs = min(8 if element_bytes == 2 else 4, 1 << (blocks - 1).bit_length())
    if pairs / experts <= FEW:
        return ExpertTile(16, 32, inputs, 4, 3)
    return ExpertTile(64 if element_bytes == 2 else 32, 64 if element_bytes == 2 else 32, min(4, inputs), 8, 2)


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """Of codes with scales, whose matrix is the left factor."""

    rows: int
    """Pairs of one expert's line a program takes."""
    lines: int
    """Rows of its matrix; of gated products half of them are gates and half their ups."""
    parts: int
    """Groups of columns that it takes at a time, each scaled by itself."""
    warps: int
    stages: int
    segments: int = 1
    """That columns are cut into."""


def scaled_tile(
    pairs: int, experts: int, layout: ScaledLayout, span: int, columns: int, element_bytes: int, shared_bytes: int
) -> ScaledTile:  # fmt: skip
    """`span`: columns of a group, or of the part of one that is multiplied at a time."""
    average, spans = pairs / experts, max(1, columns // span)
    if element_bytes == 4:
        return ScaledTile(16 if average <= FEW else 32, 32, 1, 4, 2)
    # Parts that make 128 columns.
    whole = max(1, 128 // span)
    if average <= 5:
        # Two warps: more would take Hopper's products of warp groups, which load codes in smaller pieces.
        most, whole_columns = 4 if pairs <= 16 else 2, max(layout.group, span)
        segments = next((number for number in (most, 2) if columns % (number * whole_columns) == 0), 1)
        lines = 64 if pairs <= 4 * FEW else 128
        return ScaledTile(16 // segments, lines // segments, min(spans // segments, whole), 2, 4, segments)
    large = shared_bytes >= LARGE_SHARED_BYTES
    if average <= 24:
        return ScaledTile(32, 128 if large else 64, min(spans, whole), 4, 3)
    return ScaledTile(64, 128 if large else 64, min(spans, whole), 4, 3)


def expanded_tile(
    pairs: int, experts: int, span: int, element_bytes: int, shared_bytes: int
) -> ScaledTile | None:  # fmt: skip
    """Where an expert has so many pairs that codes are better expanded for all warps than by each for itself; None
    where they are not, or where there is too little shared memory for it."""
    if pairs / experts < MANY or span != 128 or element_bytes != 2 or shared_bytes < LARGE_SHARED_BYTES:
        return None
    return ScaledTile(128, 256, 1, 8, 3)
