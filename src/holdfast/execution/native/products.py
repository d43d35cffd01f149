"""Weight matrices that stay as a file stores them, and products with them. Knows nothing of what a matrix is for."""

from __future__ import annotations

import logging
import os

import torch

from holdfast.execution.native.loading import kernels, threads
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.hardware.numa import numa_nodes, spread_pages

log = logging.getLogger("holdfast")

LAYOUT_NUMBERS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5} | {
    "Q5_0": 9,
    "Q5_1": 10,
    "IQ4_NL": 11,
    "Q2_K": 12,
    "Q3_K": 13,
    "Q4_K": 14,
    "Q5_K": 15,
    "Q6_K": 16,
    "IQ4_XS": 17,
}
"""As blocks.h numbers them; the numbers between and beyond are its own, of blocks that were woven together."""
LAYOUT_BYTES = {"F32": 128, "F16": 64, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20} | {
    "Q5_0": 22,
    "Q5_1": 24,
    "IQ4_NL": 18,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_XS": 136,
}
"""Of a block."""


def block_elements(layout: str) -> int:
    """Plain numbers count as blocks of 32: compiled products read rows in such pieces."""
    return 256 if layout.endswith("_K") or layout == "IQ4_XS" else 32


class CompiledMatrix:
    """[rows, columns] weights that compiled products read. Activations are float32 with contiguous rows; the rows
    themselves may lie apart (slices)."""

    layout: str | ScaledLayout
    _address: int
    _number: int
    """Where the weights lie, and how: as blocks.h has it."""

    def __init__(self, rows: int, columns: int, bias: torch.Tensor | None) -> None:
        self.rows, self.columns, self.bias = rows, columns, bias
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (rows,) or bias.stride(0) != 1):
            raise ValueError(f"the bias must be contiguous float32 [{rows}], not {_describe(bias)}")
        self._kernels = kernels()
        self._bias_address = 0 if bias is None else bias.data_ptr()

    @property
    def description(self) -> tuple[int, int, int, int, int]:
        """As decoder.h describes a matrix."""
        return (self._address, self._bias_address, self.rows, self.columns, self._number)

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x·Wᵀ + bias; out must not overlap x."""
        self._multiply(x, out, 0)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x·Wᵀ + bias; out must not overlap x."""
        self._multiply(x, out, 1)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor, add: int) -> None:
        # Asking a tensor anything takes a good part of a microsecond: each is asked once.
        count, x_stride = self._check(x, self.columns, "x")
        out_count, out_stride = self._check(out, self.rows, "out")
        if out_count != count:
            raise ValueError(f"out must have as many rows as x, {count}, not {out_count}")
        self._kernels.matmul(
            x.data_ptr(),
            x_stride,
            out.data_ptr(),
            out_stride,
            self._address,
            self._bias_address,
            count,
            self.columns,
            self.rows,
            self._number,
            add,
            threads(),
        )

    def _check(self, tensor: torch.Tensor, columns: int, name: str) -> tuple[int, int]:
        """Its rows, and the floats from one to the next."""
        shape, strides = tensor.shape, tensor.stride()
        if tensor.dtype is not torch.float32 or len(shape) != 2 or shape[1] != columns or strides[1] != 1:
            raise ValueError(
                f"{name} must be float32 [tokens, {columns}] with contiguous rows, not {_describe(tensor)}"
            )
        return shape[0], strides[0]


class BlockMatrix(CompiledMatrix):
    """Weights in `blocks`, a contiguous uint8 [rows, bytes of a row] as a file stores them. It takes them over: where
    the machine's products read several rows at a time, it weaves them together where they lie."""

    def __init__(self, blocks: torch.Tensor, layout: str, bias: torch.Tensor | None = None) -> None:
        if layout not in LAYOUT_NUMBERS:
            raise ValueError(f"no compiled product for {layout}; there are {', '.join(LAYOUT_NUMBERS)}")
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.is_contiguous() or not blocks.is_cpu:
            raise ValueError(f"weights must be contiguous uint8 [rows, bytes] on the CPU, not {_describe(blocks)}")
        if blocks.shape[1] == 0 or blocks.shape[1] % LAYOUT_BYTES[layout]:
            raise ValueError(f"{blocks.shape[1]} bytes per row are not a whole number of {layout} blocks")
        super().__init__(blocks.shape[0], blocks.shape[1] // LAYOUT_BYTES[layout] * block_elements(layout), bias)
        self.layout, self.blocks = layout, blocks
        self._address = blocks.data_ptr()
        spread_over_nodes(blocks)
        self._number = self._kernels.weave(self._address, self.rows, self.columns, LAYOUT_NUMBERS[layout])

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantize(self, out: torch.Tensor) -> None:
        """All rows as float32 into out [rows, columns]."""
        self._check(out, self.columns, "out")
        if len(out) != self.rows:
            raise ValueError(f"out must have {self.rows} rows, not {len(out)}")
        self._expand(0, out)

    def select(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The rows of these indices, int64, as float32 into out [len(rows), columns]."""
        self._check(out, self.columns, "out")
        if rows.dtype != torch.int64 or rows.shape != out.shape[:1] or not rows.is_contiguous():
            raise ValueError(f"indices must be contiguous int64 [{len(out)}], not {_describe(rows)}")
        if rows.shape[0] and not (int(rows.min()) >= 0 and int(rows.max()) < self.rows):
            raise ValueError(f"an index lies outside the matrix of {self.rows} rows")
        self._expand(rows.data_ptr(), out)

    def _expand(self, chosen: int, out: torch.Tensor) -> None:
        self._kernels.expand(
            self._address,
            chosen,
            out.shape[0],
            self.rows,
            self.columns,
            self._number,
            out.data_ptr(),
            out.stride(0),
            threads(),
        )


def spread_over_nodes(weights: torch.Tensor) -> None:
    """Their pages take turns among the NUMA nodes that this process computes on, where there are several and the system
    lets it (`numa_nodes` says)."""
    nodes = numa_nodes()
    if nodes.spread and (failed := spread_pages(weights.data_ptr(), weights.nbytes, nodes.numbers)):
        log.warning("%d bytes of weights stay on one NUMA node: mbind: %s", weights.nbytes, os.strerror(failed))


def matmul_blocks(
    x: torch.Tensor, blocks: torch.Tensor, layout: str, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """out [M, N] = x [M, K] · Wᵀ + bias, with W [N, K] stored in `blocks`, which stay as they are."""
    BlockMatrix(blocks.clone(), layout, bias).write(x, out)


def dequantize(blocks: torch.Tensor, layout: str, out: torch.Tensor) -> None:
    """The matrix stored in `blocks` as float32 into out [N, K]; the blocks stay as they are."""
    BlockMatrix(blocks.clone(), layout).dequantize(out)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
