"""Attention of a step on a GPU: rows of one token and rows of several, each by its own kernel, from the same pages.

Holds the workspace of the first kind, and says where rows lie on the device. Knows no projections.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.layers.prefill_kernel import HOPPER, choose_prefill_kernel
from holdfast.execution.gpu.slots import DeviceSlots
from holdfast.execution.triton_kernels.attention.decode import decode_attention
from holdfast.execution.triton_kernels.attention.expand_pages import expand_pages
from holdfast.execution.triton_kernels.attention.own_token import OwnTokens
from holdfast.execution.triton_kernels.attention.prefill import prefill_attention
from holdfast.footprint.gpu import PROCESSORS, decode_workspace_bytes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """[rows] each, int32."""

    slots: torch.Tensor
    lengths: torch.Tensor
    """Tokens that a row sees, its own included; 0: padding."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """[rows] each, and the tiles of all of them; int32."""

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    firsts: torch.Tensor
    """Where a row's tokens begin in the batch."""
    tile_rows: torch.Tensor
    tile_starts: torch.Tensor
    page_firsts: torch.Tensor
    """Where a row's pages begin if those of all rows lie one after the other."""
    _: KW_ONLY
    total_pages: int
    most_pages: int
    """Of one row."""


class GpuAttention:
    name = "triton"

    """`spare`: of the type of queries; what lies there may be overwritten while attention runs."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KVLayout,
        limits: RunnerLimits,
        slots: DeviceSlots,
        device: torch.device,
        spare: torch.Tensor,
    ) -> None:
        self._shape = (spec.heads, spec.kv_heads, spec.head_dim)
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._softcap = spec.decoder.attention_softcap
        self._tables = slots.tables
        self._windows = [group.window or 0 for group in layout.groups]
        size = decode_workspace_bytes(limits.max_num_seqs, *self._shape)
        self._workspace = torch.empty(size // 4, dtype=torch.float32, device=device)
        self.decision = choose_prefill_kernel(spec, layout, device, spare.dtype)
        """Which kernel attends for prompts."""
        page = (1, *layout.page_shape[1:])
        held = spare.numel() // math.prod(page)
        self._expanded = spare.view(-1)[: held * math.prod(page)].view(held, *page)
        """Pages of one layer, for a kernel that knows no codes."""
        self._described: tuple[torch.Tensor, Any] | None = None

    def turns(self, decode: DecodeRows | None, prefill: PrefillRows | None) -> bool:
        """Whether tokens of this step are turned, and their keys and values kept, on the way. Not of many rows: their
        programs have the GPU to themselves, and the more registers one takes the fewer there are at a time."""
        if decode is None or prefill is not None:
            return False
        return len(decode.slots) * self._shape[1] < PROCESSORS

    def run(
        self,
        qkv: torch.Tensor,
        pages: torch.Tensor,
        group: int,
        place: int,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        out: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
        own: OwnTokens | None = None,
    ) -> None:
        """`scales`: keys and values are so many times what float8 pages hold. `own`: of rows of one token alone, what
        is still to be done to them (see `decode_attention`)."""
        heads, _, width = self._shape
        key_scale, value_scale = scales
        query = qkv[:, : heads * width].view(-1, heads, width)
        attended = out.view(-1, heads, width)
        table, window = self._tables[group], self._windows[group]
        if decode is not None:
            rows = len(decode.slots)
            decode_attention(
                query[:rows],
                pages,
                table,
                decode.slots,
                decode.lengths,
                place=place,
                scale=self._scale,
                window=window,
                softcap=self._softcap,
                out=attended[:rows],
                workspace=self._workspace,
                key_scale=key_scale,
                value_scale=value_scale,
                own=own,
            )
        if prefill is not None:
            self._prefill(query, pages, table, place, window, prefill, attended, scales)

    def _prefill(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        table: torch.Tensor,
        place: int,
        window: int,
        rows: PrefillRows,
        out: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        fits = pages.dtype == query.dtype or rows.total_pages <= len(self._expanded)
        if self.decision.value == HOPPER and fits:
            self._prefill_hopper(query, pages, table, place, window, rows, out, scales)
            return
        prefill_attention(
            query,
            pages,
            table,
            rows.tile_rows,
            rows.tile_starts,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.firsts,
            place=place,
            scale=self._scale,
            window=window,
            softcap=self._softcap,
            out=out,
            key_scale=scales[0],
            value_scale=scales[1],
        )

    def _prefill_hopper(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        table: torch.Tensor,
        place: int,
        window: int,
        rows: PrefillRows,
        out: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        # Imported here: there is no such thing for other GPUs, nor for Triton's interpreter.
        from holdfast.execution.triton_kernels.attention.prefill_hopper import page_descriptor, prefill_attention_hopper

        page_firsts = None
        if pages.dtype != query.dtype:
            page_firsts = rows.page_firsts
            expand_pages(
                pages,
                table,
                rows.slots,
                rows.starts,
                rows.counts,
                page_firsts,
                rows.most_pages,
                place=place,
                window=window,
                out=self._expanded,
            )
            pages, place = self._expanded, 0
        if self._described is None or self._described[0] is not pages:
            self._described = (pages, page_descriptor(pages))
        prefill_attention_hopper(
            query,
            pages,
            table,
            rows.tile_rows,
            rows.tile_starts,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.firsts,
            descriptor=self._described[1],
            place=place,
            scale=self._scale * scales[0],
            window=window,
            out=out,
            value_scale=scales[1],
            page_firsts=page_firsts,
        )
