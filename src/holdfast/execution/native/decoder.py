"""Decoder layers in one call: pre-norm attention and a gated MLP on a residual stream, all of it compiled.

The parts are those of the other files here; joined, a step of few tokens does not wait for Python between them.
Knows nothing of requests or models: addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch

from holdfast.execution.native.attention import AttentionRows, PoolPlace
from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS, center_address
from holdfast.execution.native.loading import kernels, threads
from holdfast.execution.native.products import CompiledMatrix

ENTRY_NUMBERS = 10
"""Of 64 bits, in a layer's entry (decoder.h)."""


@dataclass(frozen=True, slots=True)
class CompiledSums:
    """How compiled layers add up what each of several ranks has of them. `group`: address of its description
    (rank_sums.h). `watch`: called with the seconds while others are awaited, and at an alarm; what it raises, a layer
    raises."""

    group: int
    watch: Callable[[float], None]


class DecoderStep:
    """The buffers and angles of one step, for all layers; keeps the tensors it is given. All are contiguous float32
    with a line a token, `places` excepted:

    stream [tokens, hidden] is what layers add to; normed is like it; qkv [tokens, (heads + 2·kv heads)·dim];
    attended [tokens, heads·dim]; gate_up [some, 2·inner] and inner [some, inner]: the MLP takes `some` tokens at a
    time; cos and sin [tokens, half] or [tokens, 1, half]. `branch` [some, hidden]: where several ranks share layers.
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
        branch: torch.Tensor | None = None,
    ) -> None:
        kept = (stream, normed, qkv, attended, gate_up, inner, cos, sin)
        lengths = [buffer.shape[0] for buffer in kept]  # `len` of a tensor is slow, and this is for every step.
        self.tokens, mlp_tokens = lengths[0], min(lengths[4:6])
        for buffer in (*kept, *([] if branch is None else [branch])):
            if buffer.dtype is not torch.float32 or not buffer.is_contiguous() or not buffer.is_cpu:
                raise ValueError(f"a buffer must be contiguous float32 on the CPU, not {buffer.dtype}")
        if min(*lengths[1:4], *lengths[6:]) < self.tokens or mlp_tokens < 1:
            raise ValueError(f"a buffer is too short for {self.tokens} tokens")
        if branch is not None and (branch.shape[0] < mlp_tokens or branch.shape[1] != stream.shape[1]):
            raise ValueError(f"a branch must be [{mlp_tokens}, {stream.shape[1]}], not {list(branch.shape)}")
        if cos.shape != sin.shape:
            raise ValueError("cos and sin must be alike")
        self.widths = (stream.shape[1], normed.shape[1], qkv.shape[1], attended.shape[1], gate_up.shape[1] // 2)
        self.inner_columns, self.half = inner.shape[1], cos.shape[-1]
        self._kept, self._branch = kept, branch
        self.branch_address = 0 if branch is None else branch.data_ptr()
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
        self.nbytes = sum(matrix.nbytes for matrix in matrices)
        self.widths = (hidden, hidden, qkv_width, heads * dim, inner)
        self.shape = (kv_heads, dim)
        self.addresses = (
            described.ctypes.data,
            len(qkv),
            len(gate_up),
            attention_norm.data_ptr(),
            mlp_norm.data_ptr(),
        )
        """What the layer has to itself, as the kernels take it."""
        self.sizes = (epsilon, ACTIVATION_NUMBERS[activation], hidden, inner, heads, kv_heads, dim, scale)
        """What it shares with others, likewise."""


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer and where its keys and values are kept. `scales`: what the pool keeps keys and values divided by.
    `center` [kv heads · dim], float32: what it keeps keys without, once they are divided."""

    layer: DecoderLayer
    pool: PoolPlace
    scales: tuple[float, float] = (1.0, 1.0)
    center: torch.Tensor | None = None


class DecoderStack:
    """Layers of equal sizes over one pool, checked once; any that follow each other run in one call. `sums`: with other
    ranks, of what each half of a layer adds to the stream."""

    def __init__(self, placed: Sequence[PlacedLayer], sums: CompiledSums | None = None) -> None:
        self._sums = (0, None) if sums is None else (sums.group, sums.watch)
        first = placed[0]
        if any(one.layer.sizes != first.layer.sizes for one in placed):
            raise ValueError("the layers of a stack must have equal sizes")
        if any(one.pool.pages is not first.pool.pages for one in placed):
            raise ValueError("the layers of a stack must share one pool")
        pool = first.pool
        if (pool.kv_heads, pool.dim) != first.layer.shape:
            raise ValueError(f"pages {list(pool.pages.shape)} do not fit the layers")
        self._kept, self._pool, self._widths = tuple(placed), pool, first.layer.widths
        self._sizes, self._pages = first.layer.sizes, pool.addresses[2:]
        self._kernels = kernels()
        self._entries = numpy.empty((len(placed), ENTRY_NUMBERS), dtype=numpy.int64)
        for entry, one in zip(self._entries, placed, strict=True):
            center = 0 if one.center is None else center_address(one.center, pool.kv_heads * pool.dim)
            entry[:-2] = (*one.layer.addresses, *one.pool.addresses[:2], center)
            entry[-2:].view(numpy.float64)[:] = one.scales
        self._begin, self._step = self._entries.ctypes.data, self._entries.strides[0]

    def run(self, step: DecoderStep, places: torch.Tensor, rows: AttentionRows, first: int, last: int) -> None:
        """Adds layers first..last-1 to `step.stream`, and writes the step's keys and values to the pool: token i goes
        to row places[i] (int64) of the pool seen as [rows, kv heads · dim] from a layer's first key on; the caller has
        checked them. Other buffers of the step are overwritten."""
        if step.widths != self._widths or step.inner_columns != self._widths[4] or 2 * step.half > self._pool.dim:
            raise ValueError(f"the step's buffers {step.widths} do not fit the layers' {self._widths}")
        if self._pool.block_tokens != rows.block_tokens:
            raise ValueError(f"pages {list(self._pool.pages.shape)} do not fit the rows' blocks")
        if places.dtype is not torch.int64 or places.numel() != step.tokens or not places.is_contiguous():
            raise ValueError(f"places must be contiguous int64 [{step.tokens}]")
        if rows.tokens > step.tokens:
            raise ValueError(f"the rows need {rows.tokens} tokens, the step has {step.tokens}")
        if self._sums[0] and not step.branch_address:
            raise ValueError("layers of several ranks need a branch")
        if not 0 <= first <= last <= len(self._kept):
            raise ValueError(f"there are no layers {first} to {last - 1} of {len(self._kept)}")
        self._kernels.layers(
            self._begin + first * self._step,
            last - first,
            *self._sums,
            step.branch_address,
            *self._sizes,
            *step.addresses,
            places.data_ptr(),
            *self._pages,
            *rows.addresses,
            threads(),
        )
