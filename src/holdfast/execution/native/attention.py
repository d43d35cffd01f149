"""Attention over KV pages without gathering them: rows of one token or many, grouped heads, windows.

Knows nothing of who owns which page: page numbers are taken as they come, and the caller has checked them
against the pool (batch.py does, with the whole plan).
"""

from __future__ import annotations

import numpy
import numpy.typing
import torch

from holdfast.execution.native.loading import kernels, threads
from holdfast.execution.native.products import LAYOUT_NUMBERS

Int32s = numpy.typing.NDArray[numpy.int32]

STORED_TYPES = {
    torch.float32: LAYOUT_NUMBERS["F32"],
    torch.float16: LAYOUT_NUMBERS["F16"],
    torch.bfloat16: LAYOUT_NUMBERS["BF16"],
    torch.float8_e4m3fn: 100,
    torch.float8_e5m2: 101,
}
"""How a pool may keep keys and values."""


class AttentionRows:
    """The rows of a step, made once and used by every layer that shares a block table. Keeps the arrays it is given,
    which must not change while it is used.

    tables  [slots, blocks] pages of each sequence; entries no token of a row sees may hold anything
    ends    [rows] position after a row's last token: its context length; 0 for a row whose output shall be zero
    counts  [rows] query tokens, the last before `ends`; by default one a row
    firsts  [rows] where they begin in the batch; by default row i has token i
    slots   [rows] each row's line of `tables`; by default row i has line i
    window  a token sees itself and window-1 before it; None: everything before it
    """

    def __init__(
        self,
        tables: Int32s,
        ends: Int32s,
        *,
        block_tokens: int,
        counts: Int32s | None = None,
        firsts: Int32s | None = None,
        slots: Int32s | None = None,
        window: int | None = None,
    ) -> None:
        if tables.dtype != numpy.int32 or tables.ndim != 2 or (tables.size and tables.strides[1] != 4):
            raise ValueError(f"tables must be int32 [slots, blocks] with contiguous lines, not {tables.dtype}")
        rows = len(ends)
        for name, part in (("ends", ends), ("counts", counts), ("firsts", firsts), ("slots", slots)):
            if part is not None and (part.dtype != numpy.int32 or part.shape != (rows,) or not part.flags.c_contiguous):
                raise ValueError(f"{name} must be contiguous int32 [{rows}], not {part.dtype} {list(part.shape)}")
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens sees nothing")
        self.rows, self.block_tokens = rows, block_tokens
        self.tokens = _tokens_needed(ends, counts, firsts)
        _check_reach(tables, ends, slots, block_tokens)
        self._kept = (tables, ends, counts, firsts, slots)
        self.addresses = (
            tables.ctypes.data,
            tables.strides[0] // 4,
            0 if slots is None else slots.ctypes.data,
            ends.ctypes.data,
            0 if counts is None else counts.ctypes.data,
            0 if firsts is None else firsts.ctypes.data,
            rows,
            window or 0,
        )
        """As the kernels take them."""


class PoolPlace:
    """One layer's part of the pages [pages, places, 2, block tokens, kv heads, dim] of a KV pool."""

    def __init__(self, pages: torch.Tensor, place: int) -> None:
        if pages.dtype not in STORED_TYPES or pages.dim() != 6 or not pages.is_contiguous() or not pages.is_cpu:
            raise ValueError(f"pages must be contiguous float32, float16, bfloat16 or float8, not {pages.dtype}")
        _, places, _, self.block_tokens, self.kv_heads, self.dim = pages.shape
        if not 0 <= place < places or self.dim % 4:
            raise ValueError(f"pages {list(pages.shape)} have no place {place}, or a dim that is not a multiple of 4")
        self.pages = pages
        half = self.block_tokens * self.kv_heads * self.dim * pages.element_size()
        keys = pages.data_ptr() + 2 * place * half
        self.addresses = (keys, keys + half, 2 * places * half, STORED_TYPES[pages.dtype], self.block_tokens)
        """As the kernels take them."""


def _tokens_needed(ends: Int32s, counts: Int32s | None, firsts: Int32s | None) -> int:
    """Tokens a batch must have for these rows."""
    if not len(ends):
        return 0
    if counts is not None and (counts.min() < 1 or bool((counts > 1).any() and (counts > ends)[counts > 1].any())):
        raise ValueError("a row must have at least one query token, and no more than its context")
    if firsts is None:
        if counts is not None and counts.max() > 1:
            raise ValueError("rows of several tokens need `firsts`")
        return len(ends)
    if firsts.min() < 0:
        raise ValueError("`firsts` must not be negative")
    return int((firsts + (1 if counts is None else counts)).max())


def _check_reach(tables: Int32s, ends: Int32s, slots: Int32s | None, block_tokens: int) -> None:
    if not len(ends):
        return
    if ends.min() < 0 or int(ends.max()) > tables.shape[1] * block_tokens:
        raise ValueError(f"a context lies outside tables of {tables.shape[1]} blocks of {block_tokens} tokens")
    lowest, highest = (0, len(ends) - 1) if slots is None else (int(slots.min()), int(slots.max()))
    if lowest < 0 or highest >= len(tables):
        raise ValueError(f"a row's slot lies outside tables of {len(tables)} lines")


def paged_attention(
    query: torch.Tensor,
    pool: PoolPlace,
    rows: AttentionRows,
    scale: float,
    out: torch.Tensor,
    *,
    softcap: float = 0.0,
) -> None:
    """query [tokens, heads, dim] over the keys and values of one layer into out, which is like query. A token sees its
    own position and those before it; keys of the batch's own tokens must be in the pages already.
    `softcap`: scores s become softcap · tanh(s / softcap), where it is not 0."""
    tokens, heads, dim = query.shape
    if pool.block_tokens != rows.block_tokens or pool.dim != dim or heads % pool.kv_heads:
        raise ValueError(f"pages {list(pool.pages.shape)} do not fit queries {list(query.shape)} or the rows' blocks")
    query_stride, out_stride = token_stride(query, dim, "query"), token_stride(out, dim, "out")
    if out.shape != (tokens, heads, dim) or tokens < rows.tokens:
        raise ValueError(f"out must be like query, {list(query.shape)}, with {rows.tokens} tokens")
    kernels().attend(
        query.data_ptr(),
        query_stride,
        out.data_ptr(),
        out_stride,
        *pool.addresses,
        heads,
        pool.kv_heads,
        dim,
        *rows.addresses,
        scale,
        softcap,
        threads(),
    )


def token_stride(tensor: torch.Tensor, dim: int, name: str) -> int:
    """Floats from a token of [tokens, heads, dim] to the next; a token's own floats must lie together."""
    strides = tensor.stride()
    if tensor.dtype is not torch.float32 or strides[2] != 1 or strides[1] != dim:
        raise ValueError(f"{name} must be float32 [tokens, heads, {dim}] with contiguous tokens")
    return strides[0]
