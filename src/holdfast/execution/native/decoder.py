"""A decoder layer in one call: pre-norm attention and a gated MLP on a residual stream, all of it compiled.

The parts are those of the other files here; joined, a step of few tokens no longer waits for Python between them.
Knows nothing of requests or models: addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from holdfast.execution.native.attention import AttentionRows, PoolPlace
from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS, center_address
from holdfast.execution.native.loading import kernels, threads
from holdfast.execution.native.products import CompiledMatrix


class DecoderStep:
    """The buffers and angles of one step, for all layers; keeps the tensors it is given. All are contiguous float32
    with a line a token, `places` excepted:

    stream [tokens, hidden] is what layers add to; normed is like it; qkv [tokens, (heads + 2·kv heads)·dim];
    attended [tokens, heads·dim]; gate_up [some, 2·inner] and inner [some, inner]: the MLP takes `some` tokens at a
    time; cos and sin [tokens, half] or [tokens, 1, half].
    """

    def __init__(
        self,
        *,
        stream: torch.Tensor,
        normed: torch.Tensor,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        gate_up: torch.Tensor,
        inner: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        kept = (stream, normed, qkv, attended, gate_up, inner, cos, sin)
        lengths = [buffer.shape[0] for buffer in kept]  # `len` of a tensor is slow, and this is for every step.
        self.tokens, mlp_tokens = lengths[0], min(lengths[4:6])
        for buffer in kept:
            if buffer.dtype is not torch.float32 or not buffer.is_contiguous() or not buffer.is_cpu:
                raise ValueError(f"a buffer must be contiguous float32 on the CPU, not {buffer.dtype}")
        if min(*lengths[1:4], *lengths[6:]) < self.tokens or mlp_tokens < 1:
            raise ValueError(f"a buffer is too short for {self.tokens} tokens")
        if cos.shape != sin.shape:
            raise ValueError("cos and sin must be alike")
        self.widths = (stream.shape[1], normed.shape[1], qkv.shape[1], attended.shape[1], gate_up.shape[1] // 2)
        self.inner_columns, self.half = inner.shape[1], cos.shape[-1]
        self._kept = kept
        self.addresses = (
            *(buffer.data_ptr() for buffer in kept[:6]),
            self.tokens,
            mlp_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            self.half,
        )
        """As the kernels take them."""


class DecoderLayer:
    """The weights of a layer, checked once. qkv and gate_up may be in parts whose outputs stand side by side."""

    def __init__(
        self,
        *,
        attention_norm: torch.Tensor,
        qkv: Sequence[CompiledMatrix],
        o: CompiledMatrix,
        mlp_norm: torch.Tensor,
        gate_up: Sequence[CompiledMatrix],
        down: CompiledMatrix,
        heads: int,
        kv_heads: int,
        dim: int,
        epsilon: float,
        scale: float,
        activation: str = "silu",
    ) -> None:
        hidden, inner = o.rows, down.columns
        wanted = [(part, hidden) for part in (*qkv, *gate_up)] + [(o, heads * dim), (down, inner)]
        if any(matrix.columns != columns for matrix, columns in wanted) or down.rows != hidden:
            raise ValueError("the matrices of a layer do not fit one another")
        qkv_width = (heads + 2 * kv_heads) * dim
        if sum(part.rows for part in qkv) != qkv_width or sum(part.rows for part in gate_up) != 2 * inner:
            raise ValueError(f"qkv must have {qkv_width} outputs and gate_up {2 * inner}")
        for norm in (attention_norm, mlp_norm):
            if norm.dtype is not torch.float32 or norm.shape != (hidden,) or not norm.is_contiguous():
                raise ValueError(f"a norm must be contiguous float32 [{hidden}]")
        if activation not in ACTIVATION_NUMBERS or heads % kv_heads or dim % 4:
            raise ValueError(f"no compiled layer with {activation}, {heads} heads over {kv_heads}, {dim} dimensions")
        matrices = (*qkv, o, *gate_up, down)
        described = numpy.array([matrix.description for matrix in matrices], dtype=numpy.int64)
        self._kept = (attention_norm, mlp_norm, matrices, described)
        self._widths = (hidden, hidden, qkv_width, heads * dim, inner)
        self._shape = (kv_heads, dim)
        self._kernels = kernels()
        self._addresses = (
            described.ctypes.data,
            len(qkv),
            len(gate_up),
            attention_norm.data_ptr(),
            mlp_norm.data_ptr(),
            epsilon,
            ACTIVATION_NUMBERS[activation],
            hidden,
            inner,
            heads,
            kv_heads,
            dim,
            scale,
        )

    def run(
        self,
        step: DecoderStep,
        places: torch.Tensor,
        pool: PoolPlace,
        rows: AttentionRows,
        scales: tuple[float, float] = (1.0, 1.0),
        center: torch.Tensor | None = None,
    ) -> None:
        """Adds the layer to `step.stream`, and writes the step's keys and values to the pool: token i goes to row
        places[i] (int64) of the pool seen as [rows, kv heads · dim] from its first key on; the caller has checked
        them. Other buffers of the step are overwritten. `scales`: what the pool keeps keys and values divided by.
        `center` [kv heads · dim], float32: what it keeps keys without, once they are divided."""
        if step.widths != self._widths or step.inner_columns != self._widths[4] or 2 * step.half > pool.dim:
            raise ValueError(f"the step's buffers {step.widths} do not fit the layer's {self._widths}")
        if (pool.kv_heads, pool.dim) != self._shape or pool.block_tokens != rows.block_tokens:
            raise ValueError(f"pages {list(pool.pages.shape)} do not fit the layer or the rows' blocks")
        if places.dtype is not torch.int64 or places.numel() != step.tokens or not places.is_contiguous():
            raise ValueError(f"places must be contiguous int64 [{step.tokens}]")
        if rows.tokens > step.tokens:
            raise ValueError(f"the rows need {rows.tokens} tokens, the step has {step.tokens}")
        self._kernels.layer(
            *self._addresses,
            *step.addresses,
            places.data_ptr(),
            *pool.addresses,
            *rows.addresses,
            0 if center is None else center_address(center, pool.kv_heads * pool.dim),
            *scales,
            threads(),
        )
