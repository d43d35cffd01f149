# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""GGUF's quantized blocks expanded to rows: for products with many rows, and for embeddings.

The kernel here is for blocks of 32 elements in 4 or 8 bits; that of the denser kinds is in kquant_blocks.py.

Planes lie as `execution.weights.gguf_blocks` keeps them: quants [rows, blocks, bytes], scales and minimums [rows,
blocks, 1].
A packed byte holds two quants: element i of a block in the low half, element i + 16 in the high one. An element is
(quant - offset) · scale + minimum in float32, which is exact but for the last sum. Safe in a CUDA graph. Knows nothing
of files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.layer import token_of
from holdfast.execution.triton_kernels.quantized.kquant_blocks import KQUANTS, Planes, expand

OFFSETS = {"Q8_0": 0, "Q4_0": 8, "Q4_1": 0}
EXPANDED_BLOCKS = 32
"""Blocks of a row that a program expands at a time."""


class BlockPlanes(NamedTuple):
    """A matrix of rows of blocks, or some neighbouring rows of one: `rows` cuts without a copy."""

    layout: str
    quants: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    high: torch.Tensor | None = None
    small: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> BlockPlanes:
        minimums, high, small = (
            None if plane is None else plane[first:last] for plane in (self.minimums, self.high, self.small)
        )
        return BlockPlanes(self.layout, self.quants[first:last], self.scales[first:last], minimums, high, small)

    @property
    def denser(self) -> Planes:
        """As kquant_blocks.py takes them."""
        return self.quants, self.high, self.scales, self.minimums, self.small


@triton.jit
def _load_blocks(
    quants, scales, minimums, row, block, lane, blocks, inside,
    LANES: tl.constexpr, MINIMUM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """(quant bytes of row, block and lane, scales and minimums of row and block as float16).

    A thread takes TOGETHER neighbouring quants at once."""
    place = row * blocks + block
    byte = tl.max_contiguous(place * LANES + lane, (1, 1, TOGETHER))
    found = tl.load(quants + byte, mask=inside, other=0, eviction_policy="evict_first")
    scale = tl.load(scales + place, mask=inside, other=0.0)
    minimum = scale
    if MINIMUM:
        minimum = tl.load(minimums + place, mask=inside, other=0.0)
    return found, scale, minimum


@triton.jit
def _expand(half, scale, minimum, OFFSET: tl.constexpr, MINIMUM: tl.constexpr):
    """Quants of one half as elements in float32."""
    wide = half.to(tl.float32)
    if OFFSET:
        wide -= OFFSET
    wide *= scale.to(tl.float32)
    if MINIMUM:
        wide += minimum.to(tl.float32)
    return wide


def _kind(matrix: BlockPlanes) -> tuple[bool, int, bool]:
    """(two quants a byte, what is subtracted from one, whether there are minimums)."""
    return matrix.layout != "Q8_0", OFFSETS[matrix.layout], matrix.minimums is not None


@triton.jit
def _expand_rows(
    ids, slots, positions, quants, scales, minimums, out, ids_stride, out_stride, known_rows,
    BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr, MINIMUM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row of out is row i of the matrix, or the one of a slot's token."""
    LANES: tl.constexpr = 16 if PACKED else 32
    target = tl.program_id(0).to(tl.int64)
    row = target
    if CHOSEN:
        row = token_of(ids, slots, positions, ids_stride, target)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    inside = block < BLOCKS
    known = inside & (row >= 0) & (row < known_rows)
    # Rows beyond the mask read nothing: quants, scales and minimums of 0. Q4_0's offset times 0 is 0 as well.
    found, scale, minimum = _load_blocks(
        quants, scales, minimums, row, block, lane, BLOCKS, known, LANES, MINIMUM, 8
    )  # fmt: skip
    place = out + target * out_stride + block * 32 + lane
    low = found
    if PACKED:
        low = found & 15
        high = _expand(found >> 4, scale, minimum, OFFSET, MINIMUM)
        tl.store(place + 16, high.to(out.dtype.element_ty), mask=inside)
    tl.store(place, _expand(low, scale, minimum, OFFSET, MINIMUM).to(out.dtype.element_ty), mask=inside)


def dequantize_tile(matrix: BlockPlanes, first: int, last: int, out: torch.Tensor) -> None:
    """Rows first..last-1 into out [last - first, inputs], as out's type: what a cuBLAS product is then made with."""
    if last > first:
        part = matrix.rows(first, last)
        _launch_expand(part, out, (part.scales, part.scales, part.scales), chosen=False)


def embed_blocks(
    tokens_of_slots: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, matrix: BlockPlanes, out: torch.Tensor
) -> None:
    """`layer.embed` for a quantized embedding."""
    _launch_expand(matrix, out, (tokens_of_slots, slots, positions), chosen=True)


def _launch_expand(
    matrix: BlockPlanes,
    out: torch.Tensor,
    choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    chosen: bool,
) -> None:
    if len(out) == 0:
        return
    if matrix.layout in KQUANTS:
        expand(matrix.layout, matrix.denser, out, choice, chosen=chosen)
        return
    blocks = matrix.quants.shape[1]
    packed, offset, minimum = _kind(matrix)
    _expand_rows[(len(out), triton.cdiv(blocks, EXPANDED_BLOCKS))](
        *choice, matrix.quants, matrix.scales, matrix.minimums if minimum else matrix.scales, out,
        choice[0].stride(0), out.stride(0), len(matrix.quants), BLOCKS=blocks, CHOSEN=chosen, PACKED=packed,
        OFFSET=offset, MINIMUM=minimum, TILE=EXPANDED_BLOCKS, num_warps=4,
    )  # fmt: skip
