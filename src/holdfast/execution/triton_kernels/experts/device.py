"""What the GPU that kernels are launched on can do, as far as products with experts ask. Knows no kernel."""

from __future__ import annotations

from functools import cache

import torch
import triton

_DESCRIPTORS = (9, 0)
_FP8_PRODUCTS = (8, 9)


def interpreted() -> bool:
    """Kernels run in Triton's interpreter: there is no GPU, and no assembly."""
    return bool(triton.knobs.runtime.interpret)


def copies_by_descriptor() -> bool:
    """Tiles come from memory by descriptor (TMA), without an address for each element."""
    return not interpreted() and _capability(torch.cuda.current_device()) >= _DESCRIPTORS


def multiplies_fp8() -> bool:
    """Tensor cores take e4m3 as it is."""
    return interpreted() or _capability(torch.cuda.current_device()) >= _FP8_PRODUCTS


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
