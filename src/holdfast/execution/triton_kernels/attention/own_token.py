# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""What becomes of a token's own heads before attention: queries and keys turned by their position, keys and values as
pages keep them. For kernels that do it on the way; knows no grids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention.kv_codes import PLAIN, encode


class OwnTokens(NamedTuple):
    """Of rows whose queries are followed by their keys and values, as a product left them."""

    angles: torch.Tensor
    """float32 [rows, turned dims] of `fill_cos_sin`."""
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    """[dim]: heads are divided by their root mean square and multiplied with these before."""
    epsilon: float = 0.0
    center: torch.Tensor | None = None
    """float32 [kv heads · dim]: what float8 pages hold keys without."""


@triton.jit
def as_kept(
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
def _normed(part, factor, norm, real, KIND: tl.constexpr):
    weight = tl.load(norm, mask=real, other=0.0).to(tl.float32)
    return ((part * factor).to(norm.dtype.element_ty).to(tl.float32) * weight).to(KIND).to(tl.float32)


@triton.jit
def norm_factor(heads, real, epsilon, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, NORM: tl.constexpr):
    """What heads at these pointers [heads, 1] are multiplied with by their norm."""
    if NORM:
        dims = tl.arange(0, DIM_PADDED)[None, :]
        wide = tl.load(heads + dims, mask=real & (dims < DIM), other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + epsilon)[:, None]
    else:
        factor = 1.0
    return factor


@triton.jit
def turned(heads, dims, real, angles, norm, factor, HALF: tl.constexpr, NORM: tl.constexpr):
    """These dimensions of heads, normed and turned, in their type. Heads are turned as two halves of the turned part;
    what is beyond it stays as it is."""
    KIND: tl.constexpr = heads.dtype.element_ty
    own = tl.load(heads + dims, mask=real, other=0.0).to(tl.float32)
    if NORM:
        own = _normed(own, factor, norm + dims, real, KIND)
    if HALF:
        turns = real & (dims < 2 * HALF)
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        other = tl.load(heads + partner, mask=turns, other=0.0).to(tl.float32)
        if NORM:
            other = _normed(other, factor, norm + partner, turns, KIND)
        cos = tl.load(angles + dims % HALF, mask=turns, other=1.0)
        sin = tl.load(angles + HALF + dims % HALF, mask=turns, other=0.0)
        own = tl.where(dims < HALF, own * cos - other * sin, own * cos + other * sin)
    return own.to(KIND)


@triton.jit
def keep_own_token(
    key, value, target, to_values, there, angles, key_norm, center, epsilon, by_key_scale, by_value_scale,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """A key and a value of one head, at these pointers [1, 1], to pages at `target`, where they are `there`."""
    KIND: tl.constexpr = key.dtype.element_ty
    dims = tl.arange(0, DIM_PADDED)[None, :]
    real = dims < DIM
    factor = norm_factor(key, real, epsilon, DIM, DIM_PADDED, NORM)
    own_key = turned(key, dims, real, angles, key_norm, factor, HALF, NORM)
    kept_key = as_kept(own_key, by_key_scale, center + dims, real, KIND, target, FORMAT, CENTERED)
    tl.store(target + dims, kept_key, mask=real & there)
    own_value = tl.load(value + dims, mask=real, other=0.0)
    kept_value = as_kept(own_value, by_value_scale, center + dims, real, KIND, target, FORMAT, False)
    tl.store(target + to_values + dims, kept_value, mask=real & there)
