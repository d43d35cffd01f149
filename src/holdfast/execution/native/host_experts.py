"""Experts that the host computes for a GPU while it computes others, or an MLP that waits in RAM: requests and replies
pass through pinned memory that both see, laid out by `footprint.experts.ExchangeLayout`.

    GPU     x, pairs, request = step ──┐  computes its own        ┌── waits for reply = step, adds y
    host                 waits for it ─┘ ──► computes ──► y, reply = step

Knows nothing of GPUs: whoever writes requests is one.
"""

from __future__ import annotations

import torch

from holdfast.footprint.experts import ExchangeLayout


class HostExchange:
    """`memory`: contiguous uint8 that both sides see, at least the layout's bytes, at a cache line; it is zeroed, so
    that no step was asked for yet. Views of its parts are for whoever writes requests without kernels."""

    def __init__(self, layout: ExchangeLayout, memory: torch.Tensor, dtype: torch.dtype) -> None:
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes an element, the layout {layout.element_bytes}")
        if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or not memory.is_cpu:
            raise ValueError("an exchange needs contiguous uint8 memory of the host")
        if memory.nbytes < layout.nbytes or memory.data_ptr() % 64:
            raise ValueError(f"an exchange needs {layout.nbytes} bytes at a cache line, not {memory.nbytes}")
        self.layout, self.memory, self.dtype = layout, memory, dtype
        memory[: layout.nbytes].zero_()

    def request(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.request(layer), (1,), torch.int32)

    def reply(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.reply(layer), (1,), torch.int32)

    def chosen(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.chosen(layer), (self.layout.tokens, self.layout.per_token), torch.int32)

    def weights(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.weights(layer), (self.layout.tokens, self.layout.per_token), torch.float32)

    def x(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.x(layer), (self.layout.tokens, self.layout.hidden), self.dtype)

    def y(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.y(layer), (self.layout.tokens, self.layout.hidden), torch.float32)

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[first : first + nbytes].view(dtype).view(shape)
