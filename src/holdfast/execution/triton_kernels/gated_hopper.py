"""The first half of a gated MLP for many rows on Hopper: product, activation and gate in one kernel.

Twice as many numbers as are kept would else be written by the product and read again by the gate. Written in Gluon,
as `attention.prefill_hopper` is, because a kernel of Triton's own compiler does not multiply as fast as cuBLAS:

    fetch      one warp: tiles of inputs and of both halves of the matrix ─► shared memory (TMA), four steps ahead
    multiply   twice four warps, 64 rows each; a thread has the gate and the up of the same columns

Programs stay, one for each multiprocessor. Knows no bias and no norm.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from holdfast.execution.triton_kernels.layer import activation_code
from holdfast.execution.triton_kernels.tiles import GATED_COLUMNS, GATED_INPUTS

_ROWS = 128
_STAGES = 4
_BAND = 8
"""Tiles of rows that programs take before they go on to further columns: inputs and matrix then stay in the cache."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _tile(work, rows, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BAND: gl.constexpr):
    """(first row, first column)"""
    down, across = gl.cdiv(rows, ROWS), columns // COLUMNS
    band, within = work // (BAND * across), work % (BAND * across)
    high = gl.minimum(down - band * BAND, BAND)
    return (band * BAND + within % high) * ROWS, within // high * COLUMNS


@gluon.jit
def _fetch(
    x, weight, rows, columns, steps, inputs, weights, here, free, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    done = 0
    for work in range(gl.program_id(0), gl.cdiv(rows, ROWS) * (columns // COLUMNS), gl.num_programs(0)):
        row, column = _tile(work, rows, columns, ROWS, COLUMNS, BAND)
        for i in range(steps):
            stage, parity = done % STAGES, done // STAGES & 1
            mbarrier.wait(free.index(stage), parity ^ 1)
            mbarrier.expect(here.index(stage), (ROWS + 2 * COLUMNS) * STEP * 2)
            arrived = here.index(stage)
            tma.async_copy_global_to_shared(x, [row, i * STEP], arrived, inputs.index(stage))
            tma.async_copy_global_to_shared(weight, [column, i * STEP], arrived, weights.index(2 * stage))
            tma.async_copy_global_to_shared(weight, [columns + column, i * STEP], arrived, weights.index(2 * stage + 1))
            done += 1


@gluon.jit
def _activated(x, ACTIVATION: gl.constexpr):
    """As `layer.activate`."""
    if ACTIVATION == 0:
        result = x / (1.0 + gl.exp(-x))
    elif ACTIVATION == 1:
        result = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        result = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return result


@gluon.jit
def _multiply(
    out, rows, columns, steps, inputs, weights, made, here, free, PART: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    TYPE: gl.constexpr = made.dtype
    done = 0
    for work in range(gl.program_id(0), gl.cdiv(rows, ROWS) * (columns // COLUMNS), gl.num_programs(0)):
        row, column = _tile(work, rows, columns, ROWS, COLUMNS, BAND)
        sums = gl.zeros((64, 2 * COLUMNS), gl.float32, layout=SUMS)
        for i in range(steps):
            stage, parity, last = done % STAGES, done // STAGES & 1, (done + STAGES - 1) % STAGES
            mbarrier.wait(here.index(stage), parity)
            tile = weights.index(stage).permute((1, 0))
            sums = warpgroup_mma(inputs.index(2 * stage + PART), tile, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            mbarrier.arrive(free.index(last), count=1, pred=i > 0)
            done += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), count=1)
        gate, up = sums.reshape([64, 2, COLUMNS]).permute(0, 2, 1).split()
        # Rounded where the plain form writes to memory.
        active = _activated(gate.to(TYPE).to(gl.float32), ACTIVATION).to(TYPE).to(gl.float32)
        left, right = (
            (active * up.to(TYPE).to(gl.float32)).to(TYPE).reshape([64, 2, COLUMNS // 2]).permute(0, 2, 1).split()
        )
        tma.store_wait(0)
        made.index(2 * PART).store(left)
        made.index(2 * PART + 1).store(right)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row + PART * 64, column], made.index(2 * PART))
        tma.async_copy_shared_to_global(out, [row + PART * 64, column + COLUMNS // 2], made.index(2 * PART + 1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _gated_hopper(
    x, weight, out, rows, columns, steps, TYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    inputs = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, STEP], LAYOUT)
    weights = gl.allocate_shared_memory(TYPE, [2 * STAGES, COLUMNS, STEP], LAYOUT)
    made = gl.allocate_shared_memory(TYPE, [4, 64, COLUMNS // 2], LAYOUT)
    halves = inputs._reinterpret(TYPE, [2 * STAGES, 64, STEP], LAYOUT)
    both = weights._reinterpret(TYPE, [STAGES, 2 * COLUMNS, STEP], LAYOUT)
    here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(here.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, rows, columns, steps, halves, both, made, here, free, gl.constexpr(0), ROWS, COLUMNS, STAGES,
                    BAND, ACTIVATION,
                ),
            ),
            (
                _multiply,
                (
                    out, rows, columns, steps, halves, both, made, here, free, gl.constexpr(1), ROWS, COLUMNS, STAGES,
                    BAND, ACTIVATION,
                ),
            ),
            (
                _fetch,
                (
                    x, weight, rows, columns, steps, inputs, weights, here, free, ROWS, COLUMNS, STEP, STAGES, BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gated_product_hopper(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: Literal["silu", "gelu", "gelu_tanh"],
    out: torch.Tensor,
) -> None:
    """out [rows, inner] = activation(x·gateᵀ) · (x·upᵀ), of gate above up [2·inner, inputs]. Numbers of two bytes, x
    contiguous; `inner` in whole tiles of GATED_COLUMNS and inputs of GATED_INPUTS."""
    rows, inputs = x.shape
    columns = out.shape[1]
    if not rows:
        return
    works = -(-rows // _ROWS) * (columns // GATED_COLUMNS)
    _gated_hopper[(min(works, _processors(torch.cuda.current_device())),)](
        TensorDescriptor.from_tensor(x, [_ROWS, GATED_INPUTS], _LAYOUT),
        TensorDescriptor.from_tensor(weight, [GATED_COLUMNS, GATED_INPUTS], _LAYOUT),
        TensorDescriptor.from_tensor(out, [64, GATED_COLUMNS // 2], _LAYOUT),
        rows, columns, inputs // GATED_INPUTS,
        TYPE=_TYPES[x.dtype], ROWS=_ROWS, COLUMNS=GATED_COLUMNS, STEP=GATED_INPUTS, STAGES=_STAGES, BAND=_BAND,
        ACTIVATION=activation_code(activation), num_warps=4,
    )  # fmt: skip
