"""The tensor behind the block books: one pool of pages, seen whole, as half pages, and as token rows.

    pages      [block, place, key|value, token, kv head, dim]   as kvcache.groups draws them
    half_pages [(block, place, key|value), token·head·dim]      what attention gathers
    token_rows [(block, place, key|value, token), head·dim]     what a step writes

Pages in float8 hold what they are given, the largest finite number where that is exceeded; scales are the decoder's.
Addresses are reserved for the largest pool there may ever be; the system gives memory to a page when it is first
touched, and takes it back when the pool becomes smaller. Knows nothing of who owns which page. Page 0 is all zeros and
never written.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from holdfast.errors import EngineError
from holdfast.execution.memory import own_memory, reserved_memory
from holdfast.kvcache.groups import KVLayout
from holdfast.records import BlockCopy

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite number of each type that needs scales; what is beyond it is kept as it."""


def move_pages(pages: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """`pages` [block, ...], on a CPU. None of them is both read and written. One by one: a pool that becomes smaller
    because RAM is short has none to spare, and torch's `index_copy_` takes four times as long."""
    whole = pages.view(torch.uint8).view(len(pages), -1).numpy()
    for copy in copies:
        whole[copy.target] = whole[copy.source]


class KVPool:
    """`blocks`: pages that may be used. `most_blocks`: those that addresses are reserved for, on a CPU."""

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        most_blocks: int | None = None,
    ) -> None:
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
        self.layout, self.blocks, self.most_blocks = layout, blocks, max(blocks, most_blocks or 0)
        self._memory: mmap.mmap | None = None
        if most_blocks is not None:
            self._memory = reserved_memory(self.most_blocks * layout.page_bytes)
            if self._memory is None:  # It cannot grow, but what becomes free of it can be given back all the same.
                self.most_blocks = blocks
                self._memory = own_memory(blocks * layout.page_bytes)
        shape = (self.most_blocks, *layout.page_shape)
        # Not zeroed as a whole: the system backs a page of memory when it is first touched.
        if self._memory is None:
            self.pages = torch.empty(shape, dtype=dtype, device=device)
        else:
            self.pages = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).view(shape)
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
        """Of pages that may be used."""
        return self.blocks * self.layout.page_bytes

    def resize(self, blocks: int) -> None:
        """What pages beyond hold is lost, and its memory given back."""
        if not 2 <= blocks <= self.most_blocks:
            raise EngineError(
                "the KV pool cannot have so many pages", needed=f"2 to {self.most_blocks}", found=str(blocks)
            )
        self.blocks = blocks
        if self._memory is not None:
            first = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < len(self._memory):
                self._memory.madvise(mmap.MADV_DONTNEED, first, len(self._memory) - first)

    def page_view(self, page: int) -> memoryview:
        """Its bytes; nothing may be computed meanwhile."""
        size = self.layout.page_bytes
        whole = memoryview(self.pages.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        return whole[page * size : (page + 1) * size]

    def drop_page(self, page: int) -> None:
        """What it holds is lost, and its memory given back as far as it is whole pages of the system."""
        size, whole = self.layout.page_bytes, mmap.PAGESIZE
        first, end = -(-page * size // whole) * whole, (page + 1) * size // whole * whole
        if self._memory is not None and first < end:
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def move(self, copies: Sequence[BlockCopy]) -> None:
        move_pages(self.pages, copies)

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
