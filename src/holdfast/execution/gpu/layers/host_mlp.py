"""The MLP of a layer that the host computes in steps of few tokens, and the GPU in the others."""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.execution.streaming.expert_exchange import Exchange
from holdfast.execution.streaming.host_mlps import HostMlps
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.experts.host_rows import add_rows, send_rows


class OwnMlp(Protocol):
    """As the GPU computes it."""

    @property
    def kind(self) -> tuple[object, ...]: ...

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None: ...

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None: ...


class HostedGpuMlp:
    def __init__(self, own: OwnMlp, hosts: HostMlps, exchange: Exchange) -> None:
        self._own, self._host, self._exchange = own, hosts.host, exchange

    @property
    def kind(self) -> tuple[object, ...]:
        return self._own.kind

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        if not self._host.beside:
            self._own.add_normed(stream, norm, epsilon, normed)
            return
        kernels.rms_norm(stream, norm, epsilon, normed)
        self.run(normed, stream, add=True)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        if not self._host.beside:
            self._own.run(x, out, add=add)
            return
        send_rows(x, self._exchange)
        add_rows(self._exchange, out, add=add)
