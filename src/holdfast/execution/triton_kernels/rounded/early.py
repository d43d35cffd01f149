# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Kernels that are launched before the one they depend on is done (programmatic dependent launch, Hopper and later).

Such a kernel may read what no kernel writes, the weights, before it waits; everything else it reads and writes after
`wait_for_others`, which returns when all kernels before it are done. So every kernel that is launched early waits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = 9
FEW_ROWS = 16
"""Norms, rotary and attention of more take longer than a launch."""


def starts_early() -> bool:
    """Whether the current device has such launches."""
    return torch.cuda.is_available() and _of_device(torch.cuda.current_device())


def few_start_early(rows: int) -> bool:
    """Whether small kernels of a step with so many rows are launched so there."""
    return rows <= FEW_ROWS and starts_early()


@cache
def _of_device(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= LEAST_CAPABILITY


@triton.jit
def let_others_start(EARLY: tl.constexpr):
    """The next kernel may be launched once every program has come here, or ended."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def fetch_to_cache(pointers, BYTES: tl.constexpr, EARLY: tl.constexpr):
    """So many bytes from each pointer on their way to the second level cache; whole 16, and aligned to as many."""
    if EARLY:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [pointers.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
