"""The tensor behind the block books: one pool of pages, seen whole, as half pages, and as token rows.

    pages      [block, place, key|value, token, kv head, dim]   as kvcache.groups draws them
    half_pages [(block, place, key|value), token·head·dim]      what attention gathers
    token_rows [(block, place, key|value, token), head·dim]     what a step writes

Pages in float8 hold what they are given, the largest finite number where that is exceeded; scales are the decoder's.
Knows nothing of who owns which page. Page 0 is all zeros and never written.
"""

from __future__ import annotations

import torch

from holdfast.errors import EngineError
from holdfast.kvcache.groups import KVLayout

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite number of each type that needs scales; what is beyond it is kept as it."""


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
        # torch knows few operations on float8: as bytes, all zeros are the same.
        self._whole = self.pages.view(torch.uint8) if dtype in LARGEST else self.pages
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
        self._whole.index_fill_(0, pages, 0)

    def write(self, numbers: torch.Tensor, place_rows: torch.Tensor, rows: torch.Tensor) -> None:
        """Keys or values [tokens, head·dim] to these rows of `token_rows_at`. Where float8 rounds them they are changed
        too: whoever reads them beside the pages then sees the same."""
        largest = LARGEST.get(self.dtype)
        if largest is None:
            place_rows.index_copy_(0, rows, numbers.to(self.dtype))
            return
        codes = numbers.clamp(-largest, largest).to(self.dtype)
        place_rows.view(torch.uint8).index_copy_(0, rows, codes.view(torch.uint8))
        numbers.copy_(codes)

    def half_pages_at(self, place: int) -> torch.Tensor:
        """half_pages shifted so that row block·places·2 is the keys of this layer place, the next one its values."""
        return self._half_pages_at[place]

    def token_rows_at(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """token_rows shifted to this layer place: for keys, and for values."""
        return self._token_rows_at[place]
