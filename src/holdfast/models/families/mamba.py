"""The Mamba-2 layer as hybrids carry it: its sizes, its tensors, and the state a sequence holds in it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.models.spec import StateSpec
from holdfast.models.tensors import LayerTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    bias: bool

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the short convolution runs over."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state(self) -> StateSpec:
        return StateSpec(
            recurrent_elements=self.inner * self.state_size, convolution_elements=self.channels * (self.kernel - 1)
        )


def mamba_tensors(block: LayerTensors, hidden: int, mamba: MambaShape, stem: str) -> None:
    for name, hf in (("decay", "A_log"), ("skip", "D"), ("dt_bias", "dt_bias")):
        block.add(f"mamba.{name}", (mamba.heads,), f"{stem}.{hf}", shard_axis=0)
    block.add("mamba.conv", (mamba.channels, 1, mamba.kernel), f"{stem}.conv1d.weight", shard_axis=0)
    if mamba.conv_bias:
        block.add("mamba.conv_bias", (mamba.channels,), f"{stem}.conv1d.bias", shard_axis=0)
    rows = mamba.inner + mamba.channels + mamba.heads
    block.linear("mamba.in", rows, hidden, f"{stem}.in_proj", axis=0, bias=mamba.bias)
    block.norm("mamba.norm", mamba.inner, f"{stem}.norm")
    block.linear("mamba.out", hidden, mamba.inner, f"{stem}.out_proj", axis=1, bias=mamba.bias)
