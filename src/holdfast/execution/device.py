"""Devices, number types and threads as torch knows them. What to choose was decided by the planner."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from holdfast.errors import ConfigurationError
from holdfast.execution import native
from holdfast.hardware import processor

Device = torch.device
CPU = Device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By the planner's names."""
HARDLY_BY_TORCH = 0.02
"""Of the weights, that torch may multiply with one thread: the routers of experts are less."""
GPU_TILES = 8
"""Times as much of a matrix is unpacked at once on a GPU, where launching takes longer than computing: with tiles of a
million codes a 70B model is a million launches."""


def tile_elements(on_cpu: int, device: torch.device) -> int:
    """Of a matrix, unpacked at once while loading; on a CPU as much as its caches hold."""
    return on_cpu if device.type == "cpu" else GPU_TILES * on_cpu


def packs_weights(dtype: torch.dtype, device: torch.device, features: Collection[str] | None = None) -> bool:
    """Whether oneDNN's packed products are worth their reordering: where bfloat16 has instructions of its own."""
    hardware = not {"amx_bf16", "avx512_bf16"}.isdisjoint(processor().features if features is None else features)
    if device.type != "cpu" or dtype != torch.bfloat16 or not hardware:
        return False
    return bool(torch.backends.mkldnn.is_available())


@contextmanager
def lean_products(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Products within multiply from where a matrix lies.

    On Arm torch hands float32 products to oneDNN, which copies the whole matrix first and holds on to one or two such
    copies; its BLAS copies nothing and was 5 to 25% faster from 16 rows on (Neoverse-N1, torch 2.13).
    """
    backend = torch.backends.mkldnn
    concerned = device.type == "cpu" and dtype == torch.float32 and platform.machine() in ("aarch64", "arm64")
    before = concerned and bool(backend.enabled)  # Asked last: it is for every step.
    if not before:
        yield
        return
    backend.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        backend.enabled = before  # type: ignore[assignment]


def has_gpu_context() -> bool:
    """Whether this process has a context on a GPU already."""
    return bool(torch.cuda.is_initialized())


def compute_threads(count: int, torch_share: float = 1.0) -> native.ComputeThreads:
    """`torch_share`: the part of the weights that torch multiplies. Where that is next to nothing, the compiled kernels
    have threads of their own and torch has one; else both compute with torch's."""
    if count < 1:
        raise ConfigurationError(
            f"the number of threads is {count}", needed="at least 1", found=str(count), field="threads"
        )
    return native.ComputeThreads(count, own=native.available() and torch_share <= HARDLY_BY_TORCH)


def warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """One small product, so that what torch's libraries set up once is there before anything is measured."""
    with lean_products(dtype, device):
        one = torch.ones((64, 64), dtype=dtype, device=device)
        torch.mm(one, one)
