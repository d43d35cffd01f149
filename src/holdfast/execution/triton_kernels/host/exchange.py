# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Experts that wait in the host's memory, in steps with few tokens: the host computes some while the GPU computes
others, and what it is asked for and answers passes through pinned memory that both see, as
`footprint.experts.ExchangeLayout` lays it out. What the GPU computes of them itself it fetches over the link.

    send         x, which experts the host has, their weights ─► there; then the layer's request = the step's number
    fetch        the experts that were chosen and that are left ─► their places in the layer's slot
    products     of the experts that are left
    add_replies  waits until the layer's reply is the step's number; a token's rows, weighed, and the host's sum of it
                 ─► its place in the stream

A step's number lies on the device, so that both may be captured in a graph. Waiting ends after WAIT_NS, or at once
where a host failed before: then `failed` is set, and what is added means nothing. In Triton's interpreter the host is
another thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.execution.streaming.expert_exchange import FETCHED_BYTES, SHARES, FetchedPieces, LayerExchange
from holdfast.execution.triton_kernels.experts.device import interpreted
from holdfast.execution.triton_kernels.experts.launch import SUMMED_COLUMNS, ExpertAssignments
from holdfast.execution.triton_kernels.rounded.early import let_others_start, starts_early, wait_for_others

WAIT_NS = 60_000_000_000

_SET = tl.constexpr("""{
.reg .pred first; .reg .u32 thread;
mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
@first st.release.sys.global.u32 [$1], $2;
mov.u32 $0, $2;
}""")
_AWAIT = tl.constexpr("""{
.reg .pred go; .reg .u32 found; .reg .u64 begin, now;
mov.u32 $0, 0;
mov.u32 found, %tid.x; setp.ne.u32 go, found, 0; @go bra over;
ld.volatile.global.u32 found, [$3]; setp.ne.u32 go, found, 0; @go bra over;
mov.u64 begin, %globaltimer;
again:
ld.acquire.sys.global.u32 found, [$1];
setp.eq.u32 go, found, $2; @go bra over;
mov.u64 now, %globaltimer; sub.u64 now, now, begin;
setp.lt.u64 go, now, $4; @go bra again;
mov.u32 found, 1; st.volatile.global.u32 [$3], found;
over:
}""")


@triton.jit
def _send(
    x, experts, weights, counts, places, uses, host_x, host_chosen, host_weights, request, step, arrived, x_stride,
    columns, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, CHOICES: tl.constexpr,
    OVER_LINK: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr, ASSEMBLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token. OVER_LINK of SHARES of the experts that wait, and that anybody chose, stay the GPU's."""
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    known, inside = expert < EXPERTS, choice < PER_TOKEN
    wait_for_others(EARLY)
    lengths = tl.load(counts + expert, mask=known, other=0)
    hosted = (lengths > 0) & (tl.load(places + expert, mask=known, other=0) < 0)
    if OVER_LINK > 0:
        waiting = hosted.to(tl.int32)
        hosted = hosted & (tl.cumsum(waiting, 0) * SHARES > tl.sum(waiting, 0) * OVER_LINK)
    pair = token * PER_TOKEN + choice
    mine = tl.load(experts + pair, mask=inside, other=-1)
    weight = tl.load(weights + pair, mask=inside, other=0.0)
    given = tl.sum(((mine[:, None] == expert[None, :]) & hosted[None, :]).to(tl.int32), 1) > 0
    tl.store(host_chosen + pair, tl.where(given, mine, -1), mask=inside)
    tl.store(host_weights + pair, weight, mask=inside)
    tl.store(weights + pair, tl.where(given, 0.0, weight), mask=inside)
    for start in tl.range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        row = tl.load(x + token * x_stride + column, mask=column < columns, other=0.0)
        tl.store(host_x + token * columns + column, row, mask=column < columns)
    let_others_start(EARLY)
    tl.debug_barrier()
    # The last program has seen what all have written.
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(counts + expert, tl.where(hosted, 0, lengths), mask=known)
        tl.store(uses + expert, tl.load(uses + expert, mask=known, other=0) + lengths, mask=known)
        tl.store(arrived, 0)
        number = tl.load(step + tl.arange(0, 1))
        if ASSEMBLED:
            address = (request + tl.arange(0, 1)).to(tl.int64)
            tl.inline_asm_elementwise(
                _SET, "=r,l,r", [address, number], dtype=tl.int32, is_pure=False, pack=1
            )  # fmt: skip
        else:
            tl.store(request + tl.arange(0, 1), number)


def send(
    x: torch.Tensor,
    experts: torch.Tensor,
    lines: ExpertAssignments,
    places: torch.Tensor,
    uses: torch.Tensor,
    exchange: LayerExchange,
) -> None:
    """Asks the host for the experts that wait, but for those that the GPU keeps: their lines are empty afterwards, and
    their pairs have no weight. x [tokens, columns]; `experts` int32 [tokens, per_token]: what each token chose; `uses`
    int32 [experts]: counts them."""
    (tokens, columns), count, per_token = x.shape, len(lines.counts), lines.weights.shape[1]
    early = starts_early()
    _send[(tokens,)](
        x, experts, lines.weights, lines.counts, places, uses, exchange.x, exchange.chosen, exchange.weights,
        exchange.request, exchange.step, exchange.arrived, x.stride(0), columns, EXPERTS=count,
        BLOCK=triton.next_power_of_2(count), PER_TOKEN=per_token, CHOICES=triton.next_power_of_2(per_token),
        OVER_LINK=exchange.over_link, SHARES=SHARES, WIDTH=min(2048, triton.next_power_of_2(columns)),
        ASSEMBLED=not interpreted(), EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _fetch(
    counts, places, uses, pieces, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
    WORD: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One piece of one expert."""
    expert = tl.arange(0, BLOCK)
    known = expert < EXPERTS
    wait_for_others(EARLY)
    lengths = tl.load(counts + expert, mask=known, other=0)
    place = tl.load(places + expert, mask=known, other=0)
    if COUNTED:
        once = known & (tl.program_id(0) == 0)
        tl.store(uses + expert, tl.load(uses + expert, mask=once, other=0) + lengths, mask=once)
    wanted = ((lengths > 0) & (place < 0)).to(tl.int32)
    number = tl.program_id(0) // PIECES
    mine = (wanted > 0) & (tl.cumsum(wanted, 0) == number + 1)
    let_others_start(EARLY)
    if number < tl.sum(wanted, 0):
        at = tl.sum(tl.where(mine, -1 - place, 0), 0).to(tl.int64)
        piece = pieces + tl.program_id(0) % PIECES * 4
        first = at * tl.load(piece + 2)
        source, target = tl.load(piece) + first, tl.load(piece + 1) + first
        word = tl.arange(0, WORDS)
        inside = word < tl.multiple_of(tl.load(piece + 3), 2 if WORD == 8 else 1)
        kind: tl.constexpr = tl.int64 if WORD == 8 else tl.uint8
        source = tl.multiple_of(source.to(tl.pointer_type(kind)), 16 if WORD == 8 else 1)
        target = tl.multiple_of(target.to(tl.pointer_type(kind)), 16 if WORD == 8 else 1)
        tl.store(target + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def fetch(
    lines: ExpertAssignments, places: torch.Tensor, uses: torch.Tensor | None, pieces: FetchedPieces, pairs: int
) -> None:
    """Copies the waiting experts that have lines to where products find them; no more than `pairs` of them. `uses`
    int32 [experts]: counts pairs; None: they are counted."""
    count, early = len(lines.counts), starts_early()
    most = min(pairs, pieces.waiting)
    _fetch[(most * len(pieces.table),)](
        lines.counts, places, uses, pieces.table, EXPERTS=count, BLOCK=triton.next_power_of_2(count),
        PIECES=len(pieces.table), WORDS=FETCHED_BYTES // pieces.word_bytes, WORD=pieces.word_bytes,
        COUNTED=uses is not None, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


@triton.jit
def _add_replies(
    rows, weights, out, y, reply, step, failed, lost, rows_stride, out_stride, columns, PER_TOKEN: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr, WAIT_NS: tl.constexpr, TOLD: tl.constexpr, ASSEMBLED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = out + token * out_stride + column
    total = tl.zeros((BLOCK,), tl.float32)
    wait_for_others(EARLY)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        weight = tl.load(weights + pair)
        # Rows of what the host computes were not written.
        line = tl.load(rows + pair * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(weight > 0.0, line * weight, 0.0)
    if ADD:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    let_others_start(EARLY)
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
    if TOLD:
        never = tl.load(failed + tl.arange(0, 1))
        tl.store(lost + tl.arange(0, 1), never, mask=never > 0)
    total += tl.load(y + token * columns + column, mask=inside, other=0.0, cache_modifier=".cv")
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def add_replies(
    rows: torch.Tensor, lines: ExpertAssignments, exchange: LayerExchange, out: torch.Tensor, *, add: bool
) -> None:
    """out [tokens, columns] = (or +=) the rows [pairs, columns] of each token by their weights, and what the host makes
    of it: in float32, rounded once."""
    (tokens, columns), early = out.shape, starts_early()
    _add_replies[(tokens, triton.cdiv(columns, SUMMED_COLUMNS))](
        rows, lines.weights, out, exchange.y, exchange.reply, exchange.step, exchange.failed, exchange.lost,
        rows.stride(0), out.stride(0), columns, PER_TOKEN=lines.weights.shape[1], ADD=add, BLOCK=SUMMED_COLUMNS,
        WAIT_NS=WAIT_NS, TOLD=exchange.lost is not None, ASSEMBLED=not interpreted(), EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
