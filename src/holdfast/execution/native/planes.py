"""Weight matrices of quantized checkpoints, and products with them: planes of codes and scales as they were loaded.
Knows nothing of files, nor of what a matrix is for."""

from __future__ import annotations

import numpy
import torch

from holdfast.execution.native.loading import available, kernels
from holdfast.execution.native.products import CompiledMatrix, spread_over_nodes
from holdfast.footprint.scaled_layouts import PIECE, ScaledLayout

CODE_NUMBERS = {"int4": 0, "int8": 1, "mxfp4": 2, "fp8": 3, "nf4": 4}
SCALE_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "uint8": 3}
INPUT_NUMBERS = {"plain": 0, "int8": 1, "fp8": 2}
"""As scaled.h numbers them."""


class ScaledBlockMatrix(CompiledMatrix):
    """[rows, columns] in planes as `footprint.scaled_layouts` draws them, contiguous and on the CPU. It takes them
    over: where the machine's products read several rows at a time, it weaves them together where they lie."""

    def __init__(
        self,
        layout: ScaledLayout,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        rows, columns = len(codes), codes[0].numel() * (2 if layout.four_bits else 1)
        if not layout.compiles(columns):
            raise ValueError(f"no compiled product for {layout} with rows of {columns} elements")
        made = {"codes": codes, "scales": scales, "zeros": zeros, "order": order, "inputs": inputs}
        wanted = {plane.name: plane for plane in layout.planes(rows, columns)}
        for name, tensor in made.items():
            if (tensor is None) == (name in wanted):
                raise ValueError(f"{layout} has {'' if name in wanted else 'no '}{name}")
            if tensor is not None and (
                tensor.shape != wanted[name].shape  # type: ignore[index]
                or tensor.dtype is not getattr(torch, wanted[name].dtype)  # type: ignore[index]
                or not tensor.is_contiguous()
                or not tensor.is_cpu
            ):
                raise ValueError(f"{name} must be contiguous {wanted[name].dtype} {wanted[name].shape} on the CPU")  # type: ignore[index]
        if order is not None and not torch.equal(order.sort().values, torch.arange(columns, dtype=torch.int32)):
            raise ValueError("order must name every input once")
        super().__init__(rows, columns, bias)
        self.layout = layout
        self._planes = [tensor for tensor in made.values() if tensor is not None]
        self._described = numpy.array(
            [
                *(0 if tensor is None else tensor.data_ptr() for tensor in made.values()),
                CODE_NUMBERS[layout.codes],
                SCALE_NUMBERS[layout.scales],
                INPUT_NUMBERS[layout.inputs],
                rows,
                columns,
                layout.group or columns,
                layout.group_rows,
                layout.input_group or columns,
                0,
                int(numpy.float32(layout.input_bound).view(numpy.uint32)),
                int(layout.input_powers),
            ],
            dtype=numpy.int64,
        )
        self._address = self._described.ctypes.data
        for plane in self._planes:
            spread_over_nodes(plane)
        self._number = self._kernels.weave_planes(self._address)

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return sum(plane.nbytes for plane in self._planes) + bias


def turns_awq(stored: torch.Tensor) -> bool:
    """Whether `turn_awq` takes these words."""
    return available() and stored.is_cpu and stored.shape[0] % PIECE == 0 and stored.shape[1] % 2 == 0


def turn_awq(stored: torch.Tensor, codes: torch.Tensor) -> None:
    """AWQ's words [inputs, outputs / 8] as codes [outputs, ...] in pieces, in the calling thread: torch takes several
    times as long, with a byte for each code meanwhile, and with a team of threads for each thread that loads."""
    inputs, words = stored.shape
    if not turns_awq(stored) or stored.dtype is not torch.int32 or not stored.is_contiguous():
        raise ValueError(f"no words of AWQ: {stored.dtype} {list(stored.shape)}")
    if codes.dtype is not torch.uint8 or not codes.is_contiguous() or not codes.is_cpu or len(codes) != 8 * words:
        raise ValueError(f"no codes for {8 * words} outputs: {codes.dtype} {list(codes.shape)}")
    if codes.numel() != 4 * stored.numel():
        raise ValueError(f"{codes.numel()} bytes for {stored.numel()} words")
    kernels().turn_awq(stored.data_ptr(), inputs, words, codes.data_ptr())
