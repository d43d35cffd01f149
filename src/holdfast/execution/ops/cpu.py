"""The fast CPU forms: few operations a layer, in place where they can be. Held against `reference` by tests."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from holdfast.execution.kv_pool import KVPool
from holdfast.execution.ops import reference
from holdfast.execution.ops.cpu_attention import CpuAttention
from holdfast.execution.ops.interface import Activation, Heads, Ops


@lru_cache(maxsize=16)
def _mean_terms(width: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Constants that make "mean of squares plus epsilon" one product."""
    return torch.tensor([epsilon]), torch.full((width, 1), 1.0 / width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        reference.rms_norm(x, weight, epsilon, out)
        return
    # The squares go where the result will stand; one product sums them with fewer calls than mean() makes.
    added, shares = _mean_terms(x.shape[-1], epsilon)
    scale = torch.addmm(added, torch.mul(x, x, out=out), shares).rsqrt_()
    torch.mul(x, scale, out=out).mul_(weight)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if heads.dtype != torch.float32:
        reference.rotate(heads, cos, sin)
        return
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


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
    reference.write_kv(heads, kv, place, rows)


def gate(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    gated, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        torch.mul(functional.silu(gated, inplace=True), up, out=out)
    else:
        torch.mul(reference.activate(gated, activation), up, out=out)


OPS = Ops(
    name="cpu",
    rms_norm=rms_norm,
    layer_norm=reference.layer_norm,
    norm_in_place=reference.norm_in_place,
    rotate_and_store=rotate_and_store,
    gate=gate,
    activate=reference.activate_in_place,
    make_attention=CpuAttention,
)
