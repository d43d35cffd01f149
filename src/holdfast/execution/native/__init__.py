"""Compiled CPU kernels of our own: products straight from stored blocks, paged attention, small fused operations.

They compute in float32, on threads of their own or on torch's (`ComputeThreads`).
`available()` says whether this machine has them; where it has not, the torch forms in `holdfast.execution.ops` do the
same work. Nothing here decides which of the two is used.
"""

from __future__ import annotations

from holdfast.execution.native.attention import AttentionRows, PoolPlace, paged_attention
from holdfast.execution.native.decoder import CompiledSums, DecoderLayer, DecoderStack, DecoderStep, PlacedLayer
from holdfast.execution.native.elementwise import activate_and_multiply, rms_norm, rotate_and_store
from holdfast.execution.native.experts import ExpertLayer, NativeExpertBuffers
from holdfast.execution.native.host_experts import HostExchange, HostExperts, Served, measure_layers
from holdfast.execution.native.loading import (
    ComputeThreads,
    available,
    share_torch_threads,
    threads,
    torch_threads,
    use_own_threads,
    why_not,
)
from holdfast.execution.native.planes import ScaledBlockMatrix, turn_awq, turns_awq
from holdfast.execution.native.products import BlockMatrix, CompiledMatrix, dequantize, matmul_blocks

__all__ = [
    "AttentionRows",
    "BlockMatrix",
    "CompiledMatrix",
    "CompiledSums",
    "ComputeThreads",
    "DecoderLayer",
    "DecoderStack",
    "DecoderStep",
    "ExpertLayer",
    "HostExchange",
    "HostExperts",
    "NativeExpertBuffers",
    "PlacedLayer",
    "PoolPlace",
    "ScaledBlockMatrix",
    "Served",
    "activate_and_multiply",
    "available",
    "dequantize",
    "matmul_blocks",
    "measure_layers",
    "paged_attention",
    "rms_norm",
    "rotate_and_store",
    "share_torch_threads",
    "threads",
    "torch_threads",
    "turn_awq",
    "turns_awq",
    "use_own_threads",
    "why_not",
]
