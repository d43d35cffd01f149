"""Small operations between products, each one pass: norms, gates, rotary positions together with writing the KV pool.

Tensors are float32 with contiguous last dimensions; tokens may lie apart (slices of a fused product).
"""

from __future__ import annotations

import torch

from holdfast.execution.native.attention import STORED_TYPES, token_stride
from holdfast.execution.native.loading import kernels, threads

ACTIVATION_NUMBERS = {"silu": 0, "gelu_tanh": 1}
"""As elementwise.h numbers them."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """out [tokens, columns] = x over its root mean square, times weight. A `residual` is added to x first, in place.
    out may be x."""
    x_stride, out_stride = _row_stride(x, "x"), _row_stride(out, "out")
    rows, columns = x.shape
    if (
        out.shape != (rows, columns)
        or weight.shape != (columns,)
        or weight.dtype != torch.float32
        or weight.stride(0) != 1
    ):
        raise ValueError(f"out must be like x, {list(x.shape)}, and weight float32 [{columns}]")
    residual_stride = 0 if residual is None else _row_stride(residual, "residual")
    if residual is not None and residual.shape != (rows, columns):
        raise ValueError(f"residual must be like x, {list(x.shape)}, not {list(residual.shape)}")
    kernels().normalize(
        x.data_ptr(),
        x_stride,
        0 if residual is None else residual.data_ptr(),
        residual_stride,
        weight.data_ptr(),
        out.data_ptr(),
        out_stride,
        rows,
        columns,
        epsilon,
        threads(),
    )


def activate_and_multiply(gate_up: torch.Tensor, out: torch.Tensor, activation: str = "silu") -> None:
    """out [tokens, inner] = activation(first half of gate_up [tokens, 2·inner]) times its second half."""
    gate_stride, out_stride = _row_stride(gate_up, "gate_up"), _row_stride(out, "out")
    rows, columns = out.shape
    if gate_up.shape != (rows, 2 * columns):
        raise ValueError(f"gate_up must be [{rows}, {2 * columns}], not {list(gate_up.shape)}")
    if activation not in ACTIVATION_NUMBERS:
        raise ValueError(f"no compiled {activation}; there are {', '.join(ACTIVATION_NUMBERS)}")
    kernels().gate(
        gate_up.data_ptr(),
        gate_stride,
        out.data_ptr(),
        out_stride,
        rows,
        columns,
        ACTIVATION_NUMBERS[activation],
        threads(),
    )


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    positions: torch.Tensor | None = None,
    center: torch.Tensor | None = None,
) -> None:
    """Turns query [tokens, heads, dim] and key [tokens, kv heads, dim] in place and writes key and value to
    key_rows[places] and value_rows[places], views [any, kv heads · dim] of the pool in its own number type.

    cos and sin [tokens, half] (or [tokens, 1, half]): one line a token, or with `positions` (int64) tables that are
    indexed by position. The first `half` dimensions are turned against the next `half`; the rest stays.
    `center` [kv heads · dim] is taken off keys then, where there is one.
    `places` (int64) and `positions` are taken as they come: the caller has checked them against pool and tables.
    """
    tokens, heads, dim = query.shape
    half, kv_heads = cos.shape[-1], key.shape[1]
    query_stride = token_stride(query, dim, "query")
    key_stride, value_stride = token_stride(key, dim, "key"), token_stride(value, dim, "value")
    kv_shape, stored = (tokens, kv_heads, dim), key_rows.dtype
    if key.shape != kv_shape or value.shape != kv_shape or cos.shape != sin.shape or 2 * half > dim:
        raise ValueError("key and value must be alike, and cos and sin, with at most dim / 2 angles")
    for name, angles in (("cos", cos), ("sin", sin)):
        if (
            angles.dtype is not torch.float32
            or not angles.is_contiguous()
            or (positions is None and len(angles) != tokens)
        ):
            raise ValueError(f"{name} must be contiguous float32, a line a token or a table with positions")
    for name, index in (("places", places), ("positions", positions)):
        if index is not None and (
            index.dtype is not torch.int64 or index.shape != (tokens,) or not index.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous int64 [{tokens}]")
    for name, pool in (("key_rows", key_rows), ("value_rows", value_rows)):
        if pool.dtype is not stored or stored not in STORED_TYPES or not pool.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32, float16, bfloat16 or float8, both of one type")
        if pool.shape[1:] != (kv_heads * dim,):
            raise ValueError(f"{name} must be [rows, {kv_heads * dim}], not {list(pool.shape)}")
    kernels().turn(
        query.data_ptr(),
        query_stride,
        key.data_ptr(),
        key_stride,
        value.data_ptr(),
        value_stride,
        cos.data_ptr(),
        sin.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        places.data_ptr(),
        0 if center is None else center_address(center, kv_heads * dim),
        key_rows.data_ptr(),
        value_rows.data_ptr(),
        STORED_TYPES[stored],
        tokens,
        heads,
        kv_heads,
        dim,
        half,
        threads(),
    )


def center_address(center: torch.Tensor, width: int) -> int:
    if center.dtype is not torch.float32 or center.shape != (width,) or not center.is_contiguous():
        raise ValueError(f"center must be contiguous float32 [{width}], not {center.dtype} {list(center.shape)}")
    return center.data_ptr()


def _row_stride(tensor: torch.Tensor, name: str) -> int:
    strides = tensor.stride()
    if tensor.dtype is not torch.float32 or len(strides) != 2 or strides[1] != 1:
        raise ValueError(f"{name} must be float32 [tokens, columns] with contiguous rows, not {tensor.dtype}")
    return strides[0]
