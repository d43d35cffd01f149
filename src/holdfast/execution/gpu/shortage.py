"""Which errors mean that a GPU, or the pinned memory beside it, had too little left. Not what to do then."""

from __future__ import annotations

import torch

from holdfast.execution.gpu.virtual import RangeError

_PHRASES = (
    "out of memory",  # CUDA's own, as Triton, graphs and pinned memory raise it.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # What cuBLAS says when its handle found no memory.
    "cudaErrorMemoryAllocation",
)


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, RangeError):
        return error.out_of_memory
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
