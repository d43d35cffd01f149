# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Small integers between pinned host memory and the GPU, moved by a kernel: a copy engine may be busy with pages, one
after the other, and a step would wait for its few numbers behind them. Nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _move(target, source, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, tl.load(source + index, mask=inside, other=0), mask=inside)


def move_words(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source; both int32 and as long, either of them in pinned host memory. In stream order."""
    count = len(source)
    assert len(target) == count, f"{count} words do not fill {len(target)}"
    _move[((count + _BLOCK - 1) // _BLOCK,)](target, source, count, BLOCK=_BLOCK)
