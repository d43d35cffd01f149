# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""The small kernels of a decoder: norms, rotary with the write of keys and values, gates, embedding
rows, caps of logits.

Every one fills tensors it is given, reads nothing back to the host and rounds where the plain forms round. Knows no
products and no attention.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import PLAIN, as_codes, encode
from holdfast.execution.triton_kernels.rounded.early import few_start_early, let_others_start, wait_for_others

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
def _rms_norm(
    stream, weight, out, stream_stride, out_stride, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    let_others_start(EARLY)
    scaled_by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    x = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)
    normed = (wide * scale).to(weight.dtype.element_ty).to(tl.float32) * scaled_by
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(stream: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """out = stream over its root mean square, times weight; both [rows, columns], columns side by side, rows apart.

    Multiplied in the weight's type, as the plain form is: one of float32 has it rounded once, at the end.
    """
    rows, columns = stream.shape
    early = few_start_early(rows)
    if rows:
        _rms_norm[(rows,)](
            stream, weight, out, stream.stride(0), out.stride(0), epsilon, COLUMNS=columns,
            BLOCK=triton.next_power_of_2(columns), EARLY=early, num_warps=norm_warps(columns), launch_pdl=early,
        )  # fmt: skip


@triton.jit
def _row_squares(x, found, x_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(found + row, tl.sum(wide * wide, 0))


def row_squares(x: torch.Tensor, found: torch.Tensor) -> None:
    """found [rows], float32: of each row of x [rows, columns] the sum of its squares; of no columns zero."""
    rows, columns = x.shape
    if rows:
        _row_squares[(rows,)](
            x, found, x.stride(0), COLUMNS=columns, BLOCK=triton.next_power_of_2(max(1, columns)),
            num_warps=norm_warps(columns),
        )  # fmt: skip


@triton.jit
def _norm_by_squares(x, squares, weight, x_stride, whole, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled_by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.load(squares + row) / whole + epsilon)
    normed = (wide * scale).to(weight.dtype.element_ty).to(tl.float32) * scaled_by
    tl.store(x + row * x_stride + column, normed.to(x.dtype.element_ty), mask=inside)


def norm_by_squares(x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, columns: int, epsilon: float) -> None:
    """x [rows, own columns] in place, of rows of so many `columns` whose squares these are; `weight`: of the own."""
    rows, own = x.shape
    if rows:
        _norm_by_squares[(rows,)](
            x, squares, weight, x.stride(0), columns, epsilon, COLUMNS=own, BLOCK=triton.next_power_of_2(own),
            num_warps=norm_warps(own),
        )  # fmt: skip


@triton.jit
def _layer_norm(
    stream, weight, bias, out, stream_stride, out_stride, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wide = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, wide - tl.sum(wide, 0) / COLUMNS, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / COLUMNS + epsilon)
    normed = centered * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, out: torch.Tensor
) -> None:
    """out = stream without its mean, over its deviation, times weight, plus bias; rows as of `rms_norm`."""
    rows, columns = stream.shape
    if rows:
        _layer_norm[(rows,)](
            stream, weight, weight if bias is None else bias, out, stream.stride(0), out.stride(0), epsilon,
            COLUMNS=columns, BLOCK=triton.next_power_of_2(columns), BIAS=bias is not None,
            num_warps=norm_warps(columns),
        )  # fmt: skip


@triton.jit
def _add_branch(
    branch, weight, stream, branch_stride, stream_stride, epsilon, factor, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0)
    added = x.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(added * added, 0) / COLUMNS + epsilon)
        by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        added = ((added * scale).to(weight.dtype.element_ty).to(tl.float32) * by).to(x.dtype).to(tl.float32)
    line = stream + row * stream_stride + column
    before = tl.load(line, mask=inside, other=0.0)
    tl.store(line, (before.to(tl.float32) + factor * added).to(before.dtype), mask=inside)


def add_branch(
    branch: torch.Tensor, weight: torch.Tensor | None, epsilon: float, factor: float, stream: torch.Tensor
) -> None:
    """stream += factor · rms_norm(branch), or branch as it is without a weight; rows as of `rms_norm`."""
    rows, columns = stream.shape
    if rows:
        _add_branch[(rows,)](
            branch, branch if weight is None else weight, stream, branch.stride(0), stream.stride(0), epsilon, factor,
            COLUMNS=columns, BLOCK=triton.next_power_of_2(columns), NORM=weight is not None,
            num_warps=norm_warps(columns),
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
    """out [tokens, 2·half] float32: cosines, then sines, of position · frequency, times magnitude."""
    half = frequencies.shape[0]
    if len(positions):
        _fill_cos_sin[(len(positions),)](
            positions, frequencies, out, magnitude, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
        )


@triton.jit
def _normed_part(part, scale, query_norm, key_norm, index, real, is_key, is_value, kind: tl.constexpr):
    """Some dimensions of all heads of a program, times what their norm gives them; values stay as they are."""
    by_query = tl.load(query_norm + index, mask=real, other=0.0).to(tl.float32)
    by_key = tl.load(key_norm + index, mask=real, other=0.0).to(tl.float32)
    normed = (part * scale).to(query_norm.dtype.element_ty).to(tl.float32) * tl.where(is_key, by_key, by_query)
    return tl.where(is_value, part, normed.to(kind).to(tl.float32))


@triton.jit
def _cached(
    part, factor, center, centered, KIND: tl.constexpr, pages, FORMAT: tl.constexpr, CENTERED: tl.constexpr
):  # fmt: skip
    """As pages keep it. Rounded to the product's type first: pages of the same type then hold what the buffer holds."""
    rounded = part.to(KIND)
    if FORMAT == PLAIN:
        kept = rounded.to(pages.dtype.element_ty)
    else:
        scaled = rounded.to(tl.float32) * factor
        if CENTERED:
            scaled -= tl.load(center, mask=centered, other=0.0)
        kept = encode(scaled, FORMAT)
    return kept


@triton.jit
def _rotate_and_store(
    qkv, angles, positions, slots, pages, tables, query_norm, key_norm, qkv_stride, table_stride, place, epsilon,
    by_key_scale, by_value_scale, center,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    CENTERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """REST: what of a head is beyond the turned part, 0 where all of it is turned. NORM: queries and keys are normed
    first, every head by itself."""
    let_others_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = head < HEADS + 2 * KV_HEADS
    is_value = head >= HEADS + KV_HEADS
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    used = (slot >= 0) & (position >= 0)
    page = tl.load(tables + slot * table_stride + position // TOKENS, mask=used, other=-1).to(tl.int64)

    index = tl.arange(0, BLOCK_HALF)[None, :]
    real = index < HALF
    # No kernel of a layer writes what was read so far.
    wait_for_others(EARLY)
    source = qkv + token * qkv_stride + head * DIM
    first = tl.load(source + index, mask=inside & real, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + index, mask=inside & real, other=0.0).to(tl.float32)
    beyond = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    real_rest = beyond < DIM
    rest = tl.zeros((BLOCK_HEADS, BLOCK_REST), tl.float32)
    if REST:
        rest = tl.load(source + beyond, mask=inside & real_rest, other=0.0).to(tl.float32)
    kind = qkv.dtype.element_ty
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / DIM + epsilon)[:, None])
        is_key = head >= HEADS
        first = _normed_part(first, scale, query_norm, key_norm, index, real, is_key, is_value, kind)
        second = _normed_part(second, scale, query_norm, key_norm, HALF + index, real, is_key, is_value, kind)
        if REST:
            rest = _normed_part(rest, scale, query_norm, key_norm, beyond, real_rest, is_key, is_value, kind)

    line = angles + 2 * HALF * token + index
    cos, sin = tl.load(line, mask=real, other=0.0), tl.load(line + HALF, mask=real, other=0.0)
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    first = tl.where(is_value, first, turned_first)
    second = tl.where(is_value, second, turned_second)

    changed = inside & (head < HEADS + KV_HEADS)
    tl.store(source + index, first.to(kind), mask=changed & real)
    tl.store(source + HALF + index, second.to(kind), mask=changed & real)
    if NORM and REST:
        tl.store(source + beyond, rest.to(kind), mask=changed & real_rest)

    row = ((page * PLACES + place) * 2 + tl.where(is_value, 1, 0)) * TOKENS + position % TOKENS
    kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
    target = pages + (row * KV_HEADS + kv_head) * DIM
    kept = inside & (head >= HEADS) & (page >= 0)
    factor = tl.where(is_value, by_value_scale, by_key_scale)
    taken_off = center + kv_head * DIM
    is_centered = kept & (head < HEADS + KV_HEADS)
    kept_first = _cached(first, factor, taken_off + index, is_centered & real, kind, pages, FORMAT, CENTERED)
    tl.store(target + index, kept_first, mask=kept & real)
    taken_second = taken_off + HALF + index
    kept_second = _cached(second, factor, taken_second, is_centered & real, kind, pages, FORMAT, CENTERED)
    tl.store(target + HALF + index, kept_second, mask=kept & real)
    if REST:
        taken_rest = taken_off + beyond
        kept_rest = _cached(rest, factor, taken_rest, is_centered & real_rest, kind, pages, FORMAT, CENTERED)
        tl.store(target + beyond, kept_rest, mask=kept & real_rest)


def rotate_and_store(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    *,
    place: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    center: torch.Tensor | None = None,
) -> None:
    """Queries and keys of qkv [tokens, (heads + 2·kv heads)·dim] are turned in place; keys and values go to pages
    [blocks, places, 2, tokens, kv heads, dim] at `place`.

    angles: float32 [tokens, turned dims] of `fill_cos_sin`. A token with slot < 0, position < 0 or a page < 0 in tables
    [slots, blocks] leaves no keys. Heads are turned as two halves of the turned part; what is beyond it stays as it is.
    query_norm and key_norm [dim]: heads are divided by their root mean square and multiplied with these before.
    float8 pages hold keys and values divided by their scales, keys without `center` then (float32 [kv heads · dim]),
    and the largest finite number where that is exceeded.
    """
    if len(qkv) == 0:
        return
    pages, kept = as_codes(pages)
    _, places, _, tokens, kv_heads, dim = pages.shape
    total = qkv.shape[1] // dim
    half = angles.shape[-1] // 2
    rest = dim - 2 * half
    early = kept == PLAIN.value and few_start_early(len(qkv))  # As attention over those pages.
    _rotate_and_store[(len(qkv), triton.cdiv(total, ROTATED_HEADS))](
        qkv, angles, positions, slots, pages, tables, qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm, qkv.stride(0), tables.stride(0), place, epsilon,
        1.0 / key_scale, 1.0 / value_scale, angles if center is None else center,
        HEADS=total - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, TOKENS=tokens, PLACES=places,
        BLOCK_HEADS=ROTATED_HEADS, BLOCK_HALF=triton.next_power_of_2(max(1, half)), REST=rest,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)), NORM=query_norm is not None, FORMAT=kept,
        CENTERED=center is not None, EARLY=early, num_warps=WARPS, launch_pdl=early,
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
def _gate(gate_up, out, columns, in_stride, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
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


def gate(gate_up: torch.Tensor, activation: Literal["silu", "gelu", "gelu_tanh"], out: torch.Tensor) -> None:
    """out [tokens, inner] = activation(gate) · up, of gate beside up [tokens, 2·inner]."""
    rows, columns = out.shape
    if rows:
        _gate[(rows, triton.cdiv(columns, GATE_COLUMNS))](
            gate_up, out, columns, gate_up.stride(0), out.stride(0), ACTIVATION=_ACTIVATIONS[activation],
            BLOCK=GATE_COLUMNS, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _activate_rows(x, columns, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    line = x + row * stride + column
    before = tl.load(line, mask=inside, other=0.0)
    tl.store(line, activate(before.to(tl.float32), ACTIVATION).to(before.dtype), mask=inside)


def activate_rows(x: torch.Tensor, activation: Literal["silu", "gelu", "gelu_tanh"]) -> None:
    """x [tokens, columns] in place; columns side by side, rows apart."""
    rows, columns = x.shape
    if rows:
        _activate_rows[(rows, triton.cdiv(columns, GATE_COLUMNS))](
            x, columns, x.stride(0), ACTIVATION=_ACTIVATIONS[activation], BLOCK=GATE_COLUMNS, num_warps=WARPS
        )


@triton.jit
def _cap(x, columns, stride, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    line = x + row * stride + column
    before = tl.load(line, mask=inside, other=0.0)
    scaled = before.to(tl.float32) * scale
    if CAPPED:
        # tanh(y) is 2·sigmoid(2·y) - 1.
        scaled = cap * (2.0 * tl.sigmoid(2.0 * scaled / cap) - 1.0)
    tl.store(line, scaled.to(before.dtype), mask=inside)


def scale_and_cap(x: torch.Tensor, scale: float, cap: float) -> None:
    """x [rows, columns] becomes cap · tanh(scale · x / cap) in place, or scale · x where cap is 0."""
    rows, columns = x.shape
    if rows:
        _cap[(rows, triton.cdiv(columns, EMBED_COLUMNS))](
            x, columns, x.stride(0), scale, cap, CAPPED=cap > 0, BLOCK=EMBED_COLUMNS, num_warps=WARPS
        )


@triton.jit
def token_of(ids, slots, positions, ids_stride, row):
    """The token id of one row of the batch; -1 where the row has none."""
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int64)
    used = (slot >= 0) & (position >= 0)
    return tl.load(ids + slot * ids_stride + position, mask=used, other=-1).to(tl.int64)


@triton.jit
def _embed(
    ids, slots, positions, embedding, out, ids_stride, embedding_stride, out_stride, vocabulary, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = token_of(ids, slots, positions, ids_stride, row)
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
    rows, columns = out.shape
    if rows:
        _embed[(rows, triton.cdiv(columns, EMBED_COLUMNS))](
            tokens_of_slots, slots, positions, embedding, out, tokens_of_slots.stride(0), embedding.stride(0),
            out.stride(0), len(embedding), columns, BLOCK=EMBED_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
