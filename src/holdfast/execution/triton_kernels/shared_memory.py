"""How much one program may keep in a multiprocessor's shared memory on the GPU that kernels are launched on.

Knows no kernel: those that need much choose smaller tiles where there is less.
"""

from __future__ import annotations

from functools import cache

import torch

HOPPER_BYTES = 227 * 1024


def shared_memory_bytes() -> int:
    """Of torch's current device, which Triton launches on too; Hopper's where there is no GPU (the interpreter)."""
    return _of_device(torch.cuda.current_device()) if _has_gpu() else HOPPER_BYTES


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


@cache
def _of_device(index: int) -> int:
    # torch's own description of the class leaves it out.
    return int(torch.cuda.get_device_properties(index).shared_memory_per_block_optin)  # type: ignore[attr-defined]
