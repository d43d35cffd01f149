"""The tensor behind the block books: one pool of pages, seen whole, as half pages, and as token rows.

    pages      [block, place, key|value, token, kv head, dim]   as kvcache.groups draws them
    half_pages [(block, place, key|value), token·head·dim]      what attention gathers
    token_rows [(block, place, key|value, token), head·dim]     what a step writes

Knows nothing of who owns which page. Page 0 is all zeros and never written.
"""

from __future__ import annotations

import torch

from holdfast.errors import EngineError
from holdfast.kvcache.groups import KVLayout


class KVStore:
    def __init__(self, layout: KVLayout, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        if dtype.itemsize != layout.element_bytes:
            raise EngineError(
                "the KV layout was made for another dtype",
                needed=f"{layout.element_bytes} bytes per element",
                found=f"{dtype} with {dtype.itemsize}",
            )
        if blocks < 2:
            raise EngineError(
                "a KV pool needs the null page and at least one more", needed="2 blocks", found=str(blocks)
            )
        self.layout, self.blocks = layout, blocks
        # Not zeroed as a whole: the system backs a page of memory when it is first touched.
        self.pages = torch.empty((blocks, *layout.page_shape), dtype=dtype, device=device)
        self.pages[0].zero_()
        tokens, width = layout.block_tokens, layout.kv_heads * layout.head_dim
        half_pages, token_rows = self.pages.view(-1, tokens * width), self.pages.view(-1, width)
        self._half_pages_at = [half_pages[2 * place :] for place in range(layout.layers_per_page)]
        self._token_rows_at = [
            (token_rows[2 * place * tokens :], token_rows[(2 * place + 1) * tokens :])
            for place in range(layout.layers_per_page)
        ]

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.dtype

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def clear(self, pages: torch.Tensor) -> None:
        """Zeroes pages that are about to receive their first tokens and will not be full at once.

        Readers gather whole pages and mask what lies beyond a sequence's end; a stale NaN there would survive
        the mask (NaN times zero is NaN), so no page in use may hold what an earlier owner left.
        """
        self.pages.index_fill_(0, pages, 0)

    def half_pages_at(self, place: int) -> torch.Tensor:
        """half_pages shifted so that row block·places·2 is the keys of this layer place, the next one its values."""
        return self._half_pages_at[place]

    def token_rows_at(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """token_rows shifted to this layer place: for keys, and for values."""
        return self._token_rows_at[place]
