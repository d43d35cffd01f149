# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""The small kernels of a decoder layer: norms, rotary with the write of keys and values, gates, embedding rows.

Every one fills tensors it is given, reads nothing back to the host and rounds where the plain forms round. Knows no
products and no attention. `overlap` lets a kernel start while the one before it still runs: it reads weights at once
and waits before it touches anything else. So the kernel before must not write weights, and the GPU must be of compute
capability 9.0 or later.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROTATED_HEADS = 8
"""Heads a program of `rotate_and_store` takes."""
GATE_COLUMNS = 1024
EMBED_COLUMNS = 1024
WARPS = 4

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def norm_warps(columns: int) -> int:
    """A row is one program: about 16 elements a thread."""
    return min(16, 1 << max(0, (columns // 512).bit_length() - 1))


@triton.jit
def after_the_one_before(OVERLAP: tl.constexpr):
    """What the kernel before has written may be read from here on, and the kernel after may be set up."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _add_rms_norm(
    stream, delta, weight, out, stream_stride, delta_stride, out_stride, epsilon,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    scaled_by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    after_the_one_before(OVERLAP)
    x = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(stream + row * stream_stride + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * scaled_by
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    stream: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    delta: torch.Tensor | None = None,
    *,
    overlap: bool = False,
) -> None:
    """stream += delta where there is one; out = stream over its root mean square, times weight.

    stream, delta, out [rows, columns]; columns lie side by side, rows may be apart.
    """
    rows, columns = stream.shape
    if rows == 0:
        return
    added = stream if delta is None else delta
    _add_rms_norm[(rows,)](
        stream, added, weight, out, stream.stride(0), added.stride(0), out.stride(0), epsilon,
        COLUMNS=columns, BLOCK=triton.next_power_of_2(columns), ADD=delta is not None, OVERLAP=overlap,
        num_warps=norm_warps(columns), launch_pdl=overlap,
    )  # fmt: skip


@triton.jit
def _fill_cos_sin(positions, frequencies, out, magnitude, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + index, mask=inside, other=0.0)
    line = out + token * (2 * HALF) + index
    tl.store(line, tl.cos(angle) * magnitude, mask=inside)
    tl.store(line + HALF, tl.sin(angle) * magnitude, mask=inside)


def fill_cos_sin(positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float, out: torch.Tensor) -> None:
    """out [tokens, 2·half] float32: cosines, then sines, of position · frequency, times magnitude.

    For the positions of one step, or for 0, 1, 2, ... once: `rotate_and_store` reads either.
    """
    half = frequencies.shape[0]
    if len(positions):
        _fill_cos_sin[(len(positions),)](
            positions, frequencies, out, magnitude, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
        )


@triton.jit
def _head_norm(x, scale, weight_query, weight_key, is_query, column, inside, like):
    """One part of each head: x over the head's root mean square, times the weight of its kind."""
    query = tl.load(weight_query + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(weight_key + column, mask=inside, other=0.0).to(tl.float32)
    kind = like.dtype.element_ty
    return ((x * scale).to(kind).to(tl.float32) * tl.where(is_query, query, key)).to(kind).to(tl.float32)


@triton.jit
def _rotate_and_store(
    qkv, angles, positions, slots, pages, tables, query_norm, key_norm, qkv_stride, table_stride, place, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    PLACES: tl.constexpr, TURN: tl.constexpr, BY_POSITION: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """REST: what of a head is beyond the turned part, 0 where all of it is turned."""
    after_the_one_before(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = head < HEADS + 2 * KV_HEADS
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    used = (slot >= 0) & (position >= 0)

    index = tl.arange(0, BLOCK_HALF)[None, :]
    real = index < HALF
    source = qkv + token * qkv_stride + head * DIM
    first = tl.load(source + index, mask=inside & real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + index, mask=inside & real, other=0.0).to(tl.float32)
    beyond = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    real_rest = beyond < DIM
    rest = tl.zeros((BLOCK_HEADS, BLOCK_REST), tl.float32)
    if REST:
        rest = tl.load(source + beyond, mask=inside & real_rest, other=0.0).to(tl.float32)

    new_first, new_second, new_rest = first, second, rest
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + epsilon)[:, None]
        new_first = _head_norm(first, scale, query_norm, key_norm, is_query, index, real, qkv)
        new_second = _head_norm(second, scale, query_norm, key_norm, is_query, HALF + index, real, qkv)
        if REST:
            new_rest = _head_norm(rest, scale, query_norm, key_norm, is_query, beyond, real_rest, qkv)
    if TURN:
        line = angles + 2 * HALF * (tl.maximum(position, 0) if BY_POSITION else token) + index
        cos, sin = tl.load(line, mask=real, other=0.0), tl.load(line + HALF, mask=real, other=0.0)
        turned = new_first * cos - new_second * sin
        new_second = new_second * cos + new_first * sin
        new_first = turned
    first = tl.where(is_value, first, new_first)
    second = tl.where(is_value, second, new_second)
    rest = tl.where(is_value, rest, new_rest)

    kind = qkv.dtype.element_ty
    changed = inside & (head < HEADS + KV_HEADS)
    if NORM or TURN:
        tl.store(source + index, first.to(kind), mask=changed & real)
        tl.store(source + HALF + index, second.to(kind), mask=changed & real)
    if NORM and REST:
        tl.store(source + beyond, rest.to(kind), mask=changed & real_rest)

    page = tl.load(tables + slot * table_stride + position // TOKENS, mask=used, other=-1).to(tl.int64)
    row = ((page * PLACES + place) * 2 + tl.where(is_value, 1, 0)) * TOKENS + position % TOKENS
    kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    target = pages + (row * KV_HEADS + kv_head) * DIM
    kept = inside & (head >= HEADS) & (page >= 0)
    # Rounded to the product's type first: pages of the same type then hold what the buffer holds.
    cache = pages.dtype.element_ty
    tl.store(target + index, first.to(kind).to(cache), mask=kept & real)
    tl.store(target + HALF + index, second.to(kind).to(cache), mask=kept & real)
    if REST:
        tl.store(target + beyond, rest.to(kind).to(cache), mask=kept & real_rest)


def rotate_and_store(
    qkv: torch.Tensor,
    angles: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    *,
    place: int,
    by_position: bool = True,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    overlap: bool = False,
) -> None:
    """Queries and keys of qkv [tokens, (heads + 2·kv heads)·dim] are normed (where weights are given) and turned in
    place; keys and values go to pages [blocks, places, 2, tokens, kv heads, dim] at `place`.

    angles: float32 [.., turned dims] of `fill_cos_sin`, one line a position, or with by_position=False one a token of
    the batch; None turns nothing. A token with slot < 0, position < 0 or a page < 0 in tables [slots, blocks] leaves
    no keys. Heads are turned as two halves of the turned part; what is beyond it stays as it is.
    """
    if len(qkv) == 0:
        return
    _, places, _, tokens, kv_heads, dim = pages.shape
    total = qkv.shape[1] // dim
    half = dim // 2 if angles is None else angles.shape[-1] // 2
    rest = dim - 2 * half
    turn, norm = angles is not None, query_norm is not None
    _rotate_and_store[(len(qkv), triton.cdiv(total, ROTATED_HEADS))](
        qkv, angles if turn else qkv, positions, slots, pages, tables, query_norm if norm else qkv,
        key_norm if norm else qkv, qkv.stride(0), tables.stride(0), place, epsilon,
        HEADS=total - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, TOKENS=tokens, PLACES=places, TURN=turn,
        BY_POSITION=by_position, NORM=norm, BLOCK_HEADS=ROTATED_HEADS, BLOCK_HALF=triton.next_power_of_2(half),
        REST=rest, BLOCK_REST=triton.next_power_of_2(max(1, rest)), OVERLAP=overlap, num_warps=WARPS,
        launch_pdl=overlap,
    )  # fmt: skip


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu's tanh form of float32 numbers."""
    if ACTIVATION == 0:
        result = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5·(1 + tanh(y)) is sigmoid(2·y).
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return result


@triton.jit
def _gate(
    gate_up, out, columns, in_stride, out_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_the_one_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = gate_up + row * in_stride + column
    gated = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    activated = activate(gated.to(tl.float32), ACTIVATION).to(gated.dtype).to(tl.float32)
    tl.store(out + row * out_stride + column, (activated * up).to(out.dtype.element_ty), mask=inside)


def activation_code(activation: Literal["silu", "gelu", "gelu_tanh"]) -> int:
    """What the kernels call it."""
    return _ACTIVATIONS[activation]


def gate(
    gate_up: torch.Tensor,
    activation: Literal["silu", "gelu", "gelu_tanh"],
    out: torch.Tensor,
    *,
    overlap: bool = False,
) -> None:
    """out [tokens, inner] = activation(gate) · up, of gate beside up [tokens, 2·inner]."""
    rows, columns = out.shape
    if rows:
        _gate[(rows, triton.cdiv(columns, GATE_COLUMNS))](
            gate_up, out, columns, gate_up.stride(0), out.stride(0), ACTIVATION=_ACTIVATIONS[activation],
            BLOCK=GATE_COLUMNS, OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
        )  # fmt: skip


@triton.jit
def token_of(ids, slots, positions, ids_stride, row, BY_SLOT: tl.constexpr):
    """The token id of one row of the batch; -1 where the row has none."""
    if BY_SLOT:
        slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int64)
        used = (slot >= 0) & (position >= 0)
        token = tl.load(ids + slot * ids_stride + position, mask=used, other=-1).to(tl.int64)
    else:
        token = tl.load(ids + row).to(tl.int64)
    return token


@triton.jit
def _embed(
    ids, slots, positions, embedding, out, ids_stride, embedding_stride, out_stride, vocabulary, columns,
    BY_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = token_of(ids, slots, positions, ids_stride, row, BY_SLOT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    known = inside & (token >= 0) & (token < vocabulary)
    found = tl.load(embedding + token * embedding_stride + column, mask=known, other=0.0)
    tl.store(out + row * out_stride + column, found.to(out.dtype.element_ty), mask=inside)


def embed(
    tokens_of_slots: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out[i] = embedding[tokens_of_slots[slots[i], positions[i]]], as out's type.

    Zeros for a row with slot < 0 or position < 0, and for an id that is no row of the embedding.
    """
    _launch_embed(tokens_of_slots, slots, positions, embedding, out, by_slot=True)


def embed_ids(ids: torch.Tensor, embedding: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = embedding[ids[i]], as out's type; zeros for an id that is no row of the embedding."""
    _launch_embed(ids, ids, ids, embedding, out, by_slot=False)


def _launch_embed(
    ids: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
    *,
    by_slot: bool,
) -> None:
    rows, columns = out.shape
    if rows:
        _embed[(rows, triton.cdiv(columns, EMBED_COLUMNS))](
            ids, slots, positions, embedding, out, ids.stride(0), embedding.stride(0), out.stride(0),
            len(embedding), columns, BY_SLOT=by_slot, BLOCK=EMBED_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
