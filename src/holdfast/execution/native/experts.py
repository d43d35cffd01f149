"""The experts of a layer in one compiled call: routing, products of the experts that were chosen, and their sums.

Only what was chosen is read. Knows nothing of requests or models: matrices, logits and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS
from holdfast.execution.native.loading import kernels, threads
from holdfast.execution.native.products import CompiledMatrix

WEIGHTS = 0
"""Where a matrix's description (decoder.h) has their address."""


@dataclass(frozen=True, slots=True)
class NativeExpertBuffers:
    """For as many tokens as are given at a time; a line for every pair of a token and an expert it chose that is
    here."""

    lines: torch.Tensor
    """float32 [lines, hidden]"""
    gate_up: torch.Tensor
    """float32 [lines, 2·inner]"""
    inner: torch.Tensor
    """float32 [lines, inner]"""
    weights: torch.Tensor
    """float32 [pairs]"""
    chosen: torch.Tensor
    """int32 [pairs]: experts, those of a token side by side."""
    places: torch.Tensor
    """int32 [pairs]"""
    firsts: torch.Tensor
    """int32 [experts + 1]"""

    @classmethod
    def allocate(
        cls, tokens: int, per_token: int, experts: int, hidden: int, inner: int, most_here: int | None = None
    ) -> NativeExpertBuffers:
        """`most_here`: of a token's experts, those that can be here; None: all."""
        pairs, lines = tokens * per_token, tokens * (per_token if most_here is None else most_here)
        return cls(
            lines=torch.empty((lines, hidden)),
            gate_up=torch.empty((lines, 2 * inner)),
            inner=torch.empty((lines, inner)),
            weights=torch.empty(pairs),
            chosen=torch.empty(pairs, dtype=torch.int32),
            places=torch.empty(pairs, dtype=torch.int32),
            firsts=torch.empty(experts + 1, dtype=torch.int32),
        )


class ExpertLayer:
    """gate_up: for every expert its matrices, whose outputs stand side by side; down: one for every expert. All experts
    are alike. Each token gets its `per_token` likeliest; `normalized`: their weights add up to one.

    `numbers`: of the experts that these are, where others of `experts` are elsewhere: those are chosen like any, and
    add nothing here."""

    def __init__(
        self,
        *,
        gate_up: Sequence[Sequence[CompiledMatrix]],
        down: Sequence[CompiledMatrix],
        per_token: int,
        normalized: bool,
        activation: str,
        experts: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.experts, self.per_token = experts or len(down), per_token
        numbers = range(self.experts) if numbers is None else numbers
        self.most_here = min(per_token, len(down))
        self.hidden, self.inner = down[0].rows, down[0].columns
        if not 1 <= per_token <= self.experts or not len(gate_up) == len(down) == len(numbers):
            raise ValueError(f"{per_token} experts a token, {len(gate_up)} and {self.experts} matrices")
        if activation not in ACTIVATION_NUMBERS:
            raise ValueError(f"no compiled {activation}; there are {', '.join(ACTIVATION_NUMBERS)}")
        for matrix in down:
            self._check(matrix, self.hidden, self.inner)
        parts = [part.rows for part in gate_up[0]]
        if sum(parts) != 2 * self.inner:
            raise ValueError(f"gate and up must have {2 * self.inner} outputs, not {sum(parts)}")
        for expert in gate_up:
            for part, rows in zip(expert, parts, strict=True):
                self._check(part, rows, self.hidden)
        if any(matrix.layout != like.layout for one in gate_up for matrix, like in zip(one, gate_up[0], strict=True)):
            raise ValueError("gate and up of all experts must be stored alike")
        described = list[numpy.typing.NDArray[numpy.int64]]()
        for matrices in (gate_up, [[matrix] for matrix in down]):
            found = numpy.array([[part.description for part in one] for one in matrices], dtype=numpy.int64)
            every = numpy.repeat(found[:1], self.experts, axis=0)
            every[..., WEIGHTS] = 0  # Without weights: elsewhere.
            every[list(numbers)] = found
            described.append(every)
        self._kept = (gate_up, down, described)
        self.activation, self.parts = activation, len(parts)
        self.gate_up_address, self.down_address = (numbers.ctypes.data for numbers in described)
        self._kernels = kernels()
        self._numbers = (
            *(numbers.ctypes.data for numbers in described),
            self.experts,
            len(parts),
            per_token,
            int(normalized),
            ACTIVATION_NUMBERS[activation],
            self.hidden,
            self.inner,
        )

    @staticmethod
    def _check(matrix: CompiledMatrix, rows: int, columns: int) -> None:
        if (matrix.rows, matrix.columns) != (rows, columns) or matrix.bias is not None:
            raise ValueError(f"experts must be alike, [{rows}, {columns}] without bias")

    def add(self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor, buffers: NativeExpertBuffers) -> None:
        """out [tokens, hidden] += what the chosen experts make of x, like it; logits [tokens, experts] choose."""
        tokens, pairs, lines = len(x), len(x) * self.per_token, len(x) * self.most_here
        self._require(x, (tokens, self.hidden), "x")
        self._require(logits, (tokens, self.experts), "logits")
        if out.dtype is not torch.float32 or out.shape != (tokens, self.hidden) or out.stride(1) != 1:
            raise ValueError(f"out must be float32 [{tokens}, {self.hidden}] with contiguous rows")
        wanted = ((buffers.lines, self.hidden), (buffers.gate_up, 2 * self.inner), (buffers.inner, self.inner))
        for buffer, columns in wanted:
            self._require(buffer, (len(buffer), columns), "a buffer")
        ints = (buffers.chosen, buffers.places, buffers.firsts)
        if any(not one.is_contiguous() or one.dtype is not torch.int32 for one in ints):
            raise ValueError("chosen, places and firsts must be contiguous int32")
        self._require(buffers.weights, buffers.weights.shape, "weights")
        shortest, least = min(map(len, (buffers.weights, *ints[:2]))), min(len(buffer) for buffer, _ in wanted)
        if shortest < pairs or least < lines or len(buffers.firsts) != self.experts + 1:
            held, asked = f"{shortest} pairs and {least} lines", f"{pairs} and {lines}"
            raise ValueError(f"the buffers are for {held}, not {asked}, or for other experts")
        self._kernels.experts(
            *self._numbers,
            logits.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            tokens,
            buffers.lines.data_ptr(),
            buffers.gate_up.data_ptr(),
            buffers.inner.data_ptr(),
            buffers.weights.data_ptr(),
            buffers.chosen.data_ptr(),
            buffers.places.data_ptr(),
            buffers.firsts.data_ptr(),
            threads(),
        )

    @staticmethod
    def _require(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
        if tensor.dtype is not torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 {list(shape)}, not {tensor.dtype} {tensor.shape}")
