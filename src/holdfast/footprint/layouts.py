"""How each tensor lies in memory: declared here once, counted by the planner, allocated by execution."""

from __future__ import annotations

from holdfast.checkpoints import LAYOUTS
from holdfast.models import TensorSpec

BLOCK_COLUMNS = 32
"""Compiled products read rows in pieces of this many elements."""


def is_quantized(layout: str) -> bool:
    return LAYOUTS[layout].block_elements > 1


def memory_layout(tensor: TensorSpec, stored: str | None, *, dtype: str, expand: bool, compiled: bool) -> str:
    """`dtype`, or the layout of the checkpoint when the matrix is kept as it is stored.

    Quantized matrices are kept unless they are to be expanded. With compiled products half-precision ones are kept
    too: those compute in float32 from either, and half the bytes are read. Vectors are small and always expanded.
    """
    if tensor.wide:
        return "float32"
    matrix = len(tensor.shape) == 2 or tensor.experts > 0
    if stored is None or expand or not matrix:
        return dtype
    if is_quantized(stored):
        return stored
    # An expert's rows are another of its matrices' columns: a layer's experts are all read in pieces, or none is.
    if compiled and stored in ("F16", "BF16") and all(extent % BLOCK_COLUMNS == 0 for extent in tensor.shape[1:]):
        return stored
    return dtype
