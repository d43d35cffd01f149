"""The compiled module as module.c defines it, for the type checker. Addresses are those of tensors (data_ptr), 0 for
none; strides count elements. The compiled functions check nothing: their typed wrappers do."""

from __future__ import annotations

from typing import Protocol


class Kernels(Protocol):
    BUILT_FOR: str
    """Names of CPU features the code was compiled to use, as /proc/cpuinfo spells them, with spaces between."""

    def bind(self, parallel: int, /) -> None: ...

    def matmul(
        self,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        weights: int,
        bias: int,
        rows: int,
        columns: int,
        outputs: int,
        layout: int,
        add: int,
        threads: int,
        /,
    ) -> None: ...

    def expand(
        self,
        weights: int,
        chosen: int,
        rows: int,
        columns: int,
        layout: int,
        out: int,
        out_stride: int,
        threads: int,
        /,
    ) -> None: ...
