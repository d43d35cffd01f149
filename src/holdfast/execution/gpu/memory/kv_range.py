"""The KV pool on a GPU: pages at addresses that stay, with memory behind as many of them as may be used now.

Knows nothing of who owns which page.
"""

from __future__ import annotations

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.memory.virtual_memory import ReservedRange
from holdfast.held_interrupts import interrupts_put_off
from holdfast.kvcache.groups import KVLayout


class KVRange:
    """`most_blocks`: pages that addresses are reserved for. `reserved`: a range for them; None: on a GPU one of its
    driver, elsewhere (kernels in the interpreter) memory for all pages from the beginning."""

    def __init__(
        self,
        layout: KVLayout,
        most_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        reserved: ReservedRange | None = None,
    ) -> None:
        self.layout, self.blocks = layout, 0
        shape, nbytes = (most_blocks, *layout.page_shape), most_blocks * layout.page_bytes
        self._range = ReservedRange(nbytes, device) if reserved is None and device.type == "cuda" else reserved
        if self._range is None:
            self.pages = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._range.back(1)  # torch takes no address that nothing lies behind.
            self.pages = self._range.bytes_view()[:nbytes].view(dtype).view(shape)

    @property
    def most_blocks(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        """Backed."""
        return self.blocks * self.layout.page_bytes if self._range is None else self._range.mapped_bytes

    def backed_bytes(self, blocks: int) -> int:
        """What `resize` to so many pages would leave backed: memory comes and goes in pieces."""
        nbytes = blocks * self.layout.page_bytes
        return nbytes if self._range is None else self._range.mapped_for(nbytes)

    def blocks_within(self, nbytes: int) -> int:
        """The most pages that `resize` backs with no more than `nbytes`."""
        within = nbytes if self._range is None else self._range.largest_within(nbytes)
        return min(self.most_blocks, within // self.layout.page_bytes)

    @interrupts_put_off()
    def resize(self, blocks: int) -> None:
        """So many pages, the null page included. What pages behind them held is lost, once all that was launched is
        done. Raises RangeError and changes nothing where memory for more is not there."""
        if not 2 <= blocks <= self.most_blocks:
            raise EngineError(
                "the KV pool cannot have so many pages", needed=f"2 to {self.most_blocks}", found=str(blocks)
            )
        if self._range is not None:
            nbytes = blocks * self.layout.page_bytes
            self._range.back(nbytes)
            self._range.cut(nbytes)
        if self.blocks == 0:
            self.pages[0].zero_()
        self.blocks = blocks

    def close(self) -> None:
        self.pages = torch.empty(0, device="cpu")
        if self._range is not None:
            self._range.close()
