"""The plain forms: torch on any device, one row at a time, no workspace. Written to be read, not to be fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from holdfast.execution.kv_pool import KVPool
from holdfast.execution.ops.interface import Activation, AttentionShape, Heads, Integers, Ops, StepRows
from holdfast.kvcache.groups import KVGroup

NORMED_TOKENS = 512
"""What `norm_in_place` takes at a time: bounds its copies."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Multiplied in the weight's type: where that is wider than x's (Gemma, OLMo 2) it is rounded once, at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    out.copy_((wide * scale).to(weight.dtype) * weight)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, out: torch.Tensor
) -> None:
    out.copy_(functional.layer_norm(x, weight.shape, weight, bias, epsilon))


def norm_in_place(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    for part in torch.split(x, NORMED_TOKENS):
        rms_norm(part, weight, epsilon, part)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    heads[..., :half] = turned_first
    heads[..., half : 2 * half] = turned_second


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_in_place(x: torch.Tensor, activation: Activation) -> None:
    x.copy_(activate(x, activation))


def gate(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    gated, up = gate_up.chunk(2, dim=-1)
    torch.mul(activate(gated, activation), up, out=out)


def write_kv(heads: Heads, kv: KVPool, place: int, rows: torch.Tensor) -> None:
    key_rows, value_rows = kv.token_rows_at(place)
    kv.write(heads.key_rows, key_rows, rows)
    kv.write(heads.value_rows, value_rows, rows)


def rotate_and_store(
    heads: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KVPool,
    place: int,
    rows: torch.Tensor,
    center: torch.Tensor | None = None,
) -> None:
    rotate(heads.rotated, cos, sin)
    if center is not None:
        heads.key_rows.sub_(center)
    write_kv(heads, kv, place, rows)


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: StepRows
    group: KVGroup
    tables: Integers


class ReferenceAttention:
    name = "reference"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._device = shape, device

    def plan(self, rows: StepRows, group: KVGroup, tables: Integers) -> _Plan:
        return _Plan(rows, group, tables)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: KVPool,
        place: int,
        plan: _Plan,
        out: torch.Tensor,
    ) -> None:
        rows, tokens = plan.rows, self._shape.block_tokens
        for index, (start, count, first) in enumerate(zip(rows.starts, rows.counts, rows.firsts, strict=True)):
            earliest = plan.group.first_needed(int(start))
            blocks = torch.from_numpy(plan.tables[index, earliest // tokens : -(-int(start + count) // tokens)])
            pages = kv.pages[blocks.to(self._device), place].float()
            keys, values = pages[:, 0].flatten(0, 1), pages[:, 1].flatten(0, 1)
            positions = earliest // tokens * tokens + torch.arange(len(keys), device=self._device)
            queries = torch.arange(int(start), int(start + count), device=self._device)[:, None]
            seen = positions <= queries
            if plan.group.window is not None:
                seen &= positions > queries - plan.group.window
            part = slice(int(first), int(first + count))
            out[part] = self._attend(query[part].float(), keys, values, seen).to(out.dtype)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        shape = self._shape
        # Pages beyond a row's end may hold anything, and zero weight does not silence a NaN.
        used = seen.any(0)[:, None, None]
        keys, values = keys.masked_fill(~used, 0), values.masked_fill(~used, 0)
        grouped = query.view(-1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        scores = torch.einsum("qkgd,skd->kgqs", grouped, keys) * shape.scale
        if shape.softcap:
            scores = (scores / shape.softcap).tanh() * shape.softcap
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("kgqs,skd->qkgd", weights, values).flatten(1, 2)


OPS = Ops(
    name="reference",
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    norm_in_place=norm_in_place,
    rotate_and_store=rotate_and_store,
    gate=gate,
    activate=activate_in_place,
    make_attention=ReferenceAttention,
)
