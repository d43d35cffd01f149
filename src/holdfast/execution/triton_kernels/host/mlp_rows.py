# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""An MLP that the host computes: its inputs go to pinned memory that both see, and what comes of them is added. The
same flags as for experts (`exchange`), without a choice: every token goes there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.streaming.expert_exchange import LayerExchange
from holdfast.execution.triton_kernels.experts.device import interpreted
from holdfast.execution.triton_kernels.host.exchange import _AWAIT, _SET, WAIT_NS

ADDED_COLUMNS = 1024
"""By a program."""


@triton.jit
def _send_rows(
    x, host_x, request, step, arrived, x_stride, columns, WIDTH: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    for start in tl.range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        row = tl.load(x + token * x_stride + column, mask=column < columns, other=0.0)
        tl.store(host_x + token * columns + column, row, mask=column < columns)
    tl.debug_barrier()
    # The last program has seen what all have written.
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        number = tl.load(step + tl.arange(0, 1))
        if ASSEMBLED:
            address = (request + tl.arange(0, 1)).to(tl.int64)
            tl.inline_asm_elementwise(
                _SET, "=r,l,r", [address, number], dtype=tl.int32, is_pure=False, pack=1
            )  # fmt: skip
        else:
            tl.store(request + tl.arange(0, 1), number)


def send_rows(x: torch.Tensor, exchange: LayerExchange) -> None:
    """Asks the host for what its MLP makes of x [tokens, columns]."""
    tokens, columns = x.shape
    _send_rows[(tokens,)](
        x, exchange.x, exchange.request, exchange.step, exchange.arrived, x.stride(0), columns,
        WIDTH=min(2048, triton.next_power_of_2(columns)), ASSEMBLED=not interpreted(), num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_rows(
    out, y, reply, step, failed, out_stride, columns, ADD: tl.constexpr, BLOCK: tl.constexpr, WAIT_NS: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = out + token * out_stride + column
    if ASSEMBLED:
        one = tl.arange(0, 1)
        tl.inline_asm_elementwise(
            _AWAIT, "=&r,l,r,l,l",
            [(reply + one).to(tl.int64), tl.load(step + one), (failed + one).to(tl.int64),
             tl.full((1,), WAIT_NS, tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()
    else:
        number, found = tl.load(step), tl.load(reply)
        while found != number:
            found = tl.load(reply)
    total = tl.load(y + token * columns + column, mask=inside, other=0.0, cache_modifier=".cv")
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def add_rows(exchange: LayerExchange, out: torch.Tensor, *, add: bool) -> None:
    """out [tokens, columns] = (or +=) what the host makes of the rows that were sent, once it is there."""
    tokens, columns = out.shape
    _add_rows[(tokens, triton.cdiv(columns, ADDED_COLUMNS))](
        out, exchange.y, exchange.reply, exchange.step, exchange.failed, out.stride(0), columns, ADD=add,
        BLOCK=ADDED_COLUMNS, WAIT_NS=WAIT_NS, ASSEMBLED=not interpreted(), num_warps=4,
    )  # fmt: skip


def load_host_rows(x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Launches both once, on memory of the device and with a host that has answered: what the driver takes for them is
    taken then."""
    tokens, columns = x.shape
    numbers = [torch.zeros(1, dtype=torch.int32, device=x.device) for _ in range(5)]
    request, reply, step, arrived, failed = numbers
    pairs = torch.zeros((tokens, 1), dtype=torch.int32, device=x.device)
    exchange = LayerExchange(
        request=request, reply=reply, chosen=pairs, weights=pairs.float(), x=torch.empty_like(x),
        y=torch.zeros((tokens, columns), device=x.device), experts=pairs, over_link=0, step=step, arrived=arrived,
        failed=failed,
    )  # fmt: skip
    send_rows(x, exchange)
    add_rows(exchange, out, add=add)
