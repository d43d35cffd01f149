"""The MLP of a layer that the host computes in steps of few tokens, and the GPU in the others."""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.execution.streaming.host_mlps import HostMlps
from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels.host.mlp_rows import add_rows, load_host_rows, send_rows


class OwnMlp(Protocol):
    """As the GPU computes it."""

    @property
    def kind(self) -> tuple[object, ...]: ...

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None: ...

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None: ...


class HostedGpuMlp:
    def __init__(self, own: OwnMlp, hosts: HostMlps, layer: int) -> None:
        self._own, self._hosts, self._layer = own, hosts, layer

    @property
    def kind(self) -> tuple[object, ...]:
        return self._own.kind

    def add_normed(self, stream: torch.Tensor, norm: torch.Tensor, epsilon: float, normed: torch.Tensor) -> None:
        if self._hosts.exchange(self._layer) is None:
            self._own.add_normed(stream, norm, epsilon, normed)
            return
        kernels.rms_norm(stream, norm, epsilon, normed)
        self.run(normed, stream, add=True)

    def run(self, x: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        exchange = self._hosts.exchange(self._layer)
        if exchange is None:
            self._own.run(x, out, add=add)
            return
        send_rows(x, exchange)
        add_rows(exchange, out, add=add)

    @staticmethod
    def load_kernels(stream: torch.Tensor, norm: torch.Tensor | None, epsilon: float, normed: torch.Tensor) -> None:
        """Those that layers have when the host has joined: in place of it the GPU's memory answers."""
        if norm is not None:
            kernels.rms_norm(stream, norm, epsilon, normed)
        for add in (True, False):
            load_host_rows(normed, stream, add=add)
