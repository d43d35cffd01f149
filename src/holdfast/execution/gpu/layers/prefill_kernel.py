"""Which kernels prompts have on this GPU, and why: those for Hopper where they can, else those that always work.

Owns the choice, not the kernels: none is imported here.
"""

from __future__ import annotations

import importlib.util

import torch

from holdfast.execution.triton_kernels.tiles import GATED_COLUMNS, GATED_INPUTS, HOPPER_ROWS, prefill_tile
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision

HOPPER, TRITON, CUBLAS = "hopper", "triton", "cublas"
CAPABILITY = (9, 0)
WIDTHS = (64, 128)
GATED_ROWS = 4096
"""From so many rows on the kernel for Hopper multiplies and gates faster than cuBLAS and a kernel of its own do."""
GATED_LEAST_INPUTS = 1024
"""With fewer, as many rows take so little time that launching the kernel shows (H200: slower with 576)."""
COMPILED = ((3, 6), (3, 9))
"""Releases of Triton, the last one excluded: Gluon may change from one to the next."""


def choose_prefill_kernel(spec: ModelSpec, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> Decision:
    """`dtype`: of queries."""
    against = _against_hopper(spec, layout, device, dtype)
    if against is None and layout.element_bytes == dtype.itemsize:
        return Decision("prefill_attention", HOPPER, "1.3 to 1.5 times as fast as the Triton kernel", "measured")
    if against is None:
        reason = "float8 pages are expanded for it, where a step has no more of them than a spare buffer holds"
        return Decision("prefill_attention", HOPPER, reason, "planner")
    return Decision("prefill_attention", TRITON, f"the kernel for Hopper {against}", "planner")


def _against_hopper(spec: ModelSpec, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why not; None: nothing is against it."""
    if (against := _against_device(device)) is not None:
        return against
    if spec.head_dim not in WIDTHS:
        return f"needs heads of 64 or 128 dimensions; these have {spec.head_dim}"
    if spec.decoder.attention_softcap:
        return "knows no softcap"
    if dtype.itemsize != 2:
        return f"multiplies numbers of 2 bytes; these have {dtype.itemsize}"
    if layout.block_tokens not in (8, 16, 32, 64, 128):
        return f"needs a block size that is a power of two from 8 to 128; this is {layout.block_tokens}"
    if prefill_tile(spec.heads // spec.kv_heads, spec.head_dim, dtype.itemsize).rows != HOPPER_ROWS:
        return f"takes {HOPPER_ROWS} query heads for each KV head at most"
    return _against_triton()


def choose_gated_product(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, bias: torch.Tensor | None
) -> Decision:
    """`shape`: of gate above up. `dtype`: of both as they are multiplied, and of inputs."""
    against = _against_gated(shape, dtype, device, bias)
    if against is None:
        reason = f"from {GATED_ROWS:,} rows on the gate is taken where it is multiplied: 2 to 3% of a prompt"
        return Decision("gated_product", HOPPER, reason, "measured")
    return Decision("gated_product", CUBLAS, f"the kernel for Hopper {against}", "planner")


def _against_gated(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, bias: torch.Tensor | None
) -> str | None:
    if (against := _against_device(device)) is not None:
        return against
    if dtype.itemsize != 2:
        return f"multiplies numbers of 2 bytes; these have {dtype.itemsize}"
    if bias is not None:
        return "knows no bias"
    inner, inputs = shape[0] // 2, shape[1]
    if inner % GATED_COLUMNS or inputs % GATED_INPUTS:
        return f"takes columns by {GATED_COLUMNS} and inputs by {GATED_INPUTS}; these are {inner:,} and {inputs:,}"
    if inputs < GATED_LEAST_INPUTS:
        return f"is faster from {GATED_LEAST_INPUTS:,} inputs on; these are {inputs:,}"
    return _against_triton()


def expands_whole(device: torch.device) -> bool:
    """Whether prompts have quantized matrices expanded whole, where there is room: as measured on Hopper. On other GPUs
    tiles that stay in the cache are kept to, for want of a measurement."""
    return _against_device(device) is None


def _against_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"needs compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
    return None


def _against_triton() -> str | None:
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not COMPILED[0] <= release < COMPILED[1] or importlib.util.find_spec("triton.experimental.gluon") is None:
        return f"was compiled with Triton 3.6 to 3.8; this is {triton.__version__}"
    return None
