"""The compiled CPU forms, for float32: attention straight from pages, one pass for each small operation."""

from __future__ import annotations

import numpy
import torch

from holdfast.execution import native
from holdfast.execution.kv_store import KVStore
from holdfast.execution.ops import cpu
from holdfast.execution.ops.interface import Activation, AttentionShape, Heads, Integers, Ops, StepRows
from holdfast.kvcache.groups import KVGroup


class CompiledAttention:
    name = "compiled"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape

    def plan(self, rows: StepRows, group: KVGroup, tables: Integers) -> native.AttentionRows:
        return native.AttentionRows(
            tables.astype(numpy.int32),
            (rows.starts + rows.counts).astype(numpy.int32),
            block_tokens=self._shape.block_tokens,
            counts=rows.counts.astype(numpy.int32),
            firsts=rows.firsts.astype(numpy.int32),
            window=group.window,
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: KVStore,
        place: int,
        plan: native.AttentionRows,
        out: torch.Tensor,
    ) -> None:
        native.paged_attention(query, kv.pages, place, plan, self._shape.scale, out)


def rotate_and_store(
    heads: Heads, cos: torch.Tensor, sin: torch.Tensor, kv: KVStore, place: int, rows: torch.Tensor
) -> None:
    key_rows, value_rows = kv.token_rows_at(place)
    native.rotate_and_store(heads.query, heads.key, heads.value, cos, sin, rows, key_rows, value_rows)


def gate(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    if activation == "gelu":
        cpu.gate(gate_up, activation, out)
    else:
        native.activate_and_multiply(gate_up, out, activation)


OPS = Ops(
    name="compiled",
    rms_norm=native.rms_norm,
    rotate_and_store=rotate_and_store,
    gate=gate,
    make_attention=CompiledAttention,
)
