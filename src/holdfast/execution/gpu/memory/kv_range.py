"""The KV pool on a GPU: pages at addresses that stay, with memory behind as many of them as were backed.

Knows nothing of who owns which page.
"""

from __future__ import annotations

import torch

from holdfast.execution.gpu.memory.virtual_memory import ReservedRange
from holdfast.kvcache.groups import KVLayout


class KVRange:
    """`most_blocks`: pages that addresses are reserved for. Without a GPU (kernels in the interpreter) all are there
    from the beginning."""

    def __init__(self, layout: KVLayout, most_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.blocks = layout, 0
        self._range: ReservedRange | None = None
        shape = (most_blocks, *layout.page_shape)
        if device.type == "cuda":
            self._range = ReservedRange(most_blocks * layout.page_bytes, device)
            self._range.back(1)  # torch takes no address that nothing lies behind.
            whole = self._range.bytes_view()[: most_blocks * layout.page_bytes]
            self.pages = whole.view(dtype).view(shape)
        else:
            self.pages = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Backed."""
        return self.pages.nbytes if self._range is None else self._range.mapped_bytes

    def back(self, blocks: int) -> None:
        if self._range is not None:
            self._range.back(blocks * self.layout.page_bytes)
        if self.blocks == 0:
            self.pages[0].zero_()
        self.blocks = max(self.blocks, blocks)

    def close(self) -> None:
        self.pages = torch.empty(0, device="cpu")
        if self._range is not None:
            self._range.close()
