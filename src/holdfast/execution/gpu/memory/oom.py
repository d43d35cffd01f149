"""Which errors mean that a GPU, or pinned memory, had too little left, and what torch may give back then."""

from __future__ import annotations

from contextlib import suppress

import torch

from holdfast.execution.gpu.memory.virtual_memory import RangeError
from holdfast.units import MIB

_PHRASES = (
    "out of memory",  # CUDA's own, as Triton, graphs and pinned memory raise it.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # What cuBLAS says when its handle found no memory.
    "cudaErrorMemoryAllocation",
)

_VAGUE_PHRASES = ("CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR")
"""What cuBLAS says when the code of a kernel finds no memory; and otherwise."""
LITTLE_BYTES = 64 * MIB


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, RangeError):
        return error.out_of_memory
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if any(phrase in said for phrase in _PHRASES):
        return True
    return any(phrase in said for phrase in _VAGUE_PHRASES) and torch.cuda.mem_get_info()[0] < LITTLE_BYTES


def finish(device: torch.device) -> None:
    """All that was launched is computed when this returns, or the device has failed and computes nothing any more."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


def give_back_cached(device: torch.device) -> None:
    """What torch keeps for itself and no tensor uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
