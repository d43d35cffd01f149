"""MLPs of streamed layers that the host computes in steps of few tokens, while the link brings the other layers:

    layer       S          H          S          H            S: comes over the link whole; H: its attention comes, its
    the link  ─Ha─►─S'm──────────►─S'a─►─Ha─►─S''m────►       MLP is computed where it waits, beside the copy of the next
    the host         ── MLP of H ──        ── MLP of H ──

In steps with more tokens they are streamed like the others. Decides how many are worth it, from what was measured.
Knows nothing of files or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from holdfast.execution.native import ComputeThreads, ExpertLayer, measure_layers
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.experts import ExchangeLayout
from holdfast.observability.decisions import Decision
from holdfast.units import counted, format_bytes

PAGE_BYTES = 4096
MEASURED_MLPS = 2
"""Computed to see how fast the host's cores are: other bytes each time."""
FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""Steps of so many tokens are measured."""
LOADERS = 8
"""MLPs that are loaded for the host at a time."""

WORTH = 1.1
"""What steps must become faster by, as they are estimated, for the host to compute beside them."""
MOST_IN_A_ROW = 2
"""Layers that the host computes between two that come whole. The attention of a third would wait behind a whole MLP on
the link, and the host with it."""
DURING_COPIES = 0.8
"""Of what the host reads alone, what is left beside the link's copies: 93 of 127 GB/s on an H200's host, and 52 of 54
for the link."""


def speedup(
    in_a_row: int, attention_bytes: float, mlp_bytes: float, link_bytes_per_s: float, host_mlp_s: float
) -> float:
    """Of a step whose streamed layers are computed so, as estimated. `in_a_row`: layers that the host computes between
    two that come whole; `host_mlp_s`: for one MLP, with nothing beside it."""
    first, second = attention_bytes / link_bytes_per_s, mlp_bytes / link_bytes_per_s
    computed = host_mlp_s / DURING_COPIES
    # The next MLP comes beside the first that is computed here, the attention of each other one after that.
    chain = first + max(computed, second) + (in_a_row - 1) * (first + computed)
    return (in_a_row + 1) * (first + second) / max(chain, second + (in_a_row + 1) * first)


def hosted_layers(streamed: Sequence[int], in_a_row: int, most: int) -> tuple[int, ...]:
    """Of these, at most so many, spread evenly: the first comes whole."""
    if in_a_row == 0 or most <= 0:
        return ()
    found = [layer for number, layer in enumerate(streamed) if number % (in_a_row + 1)]
    count = min(most, len(found))
    return tuple(found[number * len(found) // count] for number in range(count))


class HostMlps:
    """`layers`: those whose MLPs the host has, in their order. Closed before the streamed layers are."""

    def __init__(
        self, layers: Sequence[int], streamed: DeviceLayers, host: ExpertHost, few_tokens: int, decision: Decision
    ) -> None:
        self.layers, self.few_tokens, self.host, self.decision = tuple(layers), few_tokens, host, decision
        self._streamed, self._all = streamed, frozenset(layers)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Around all that launches a step of so many tokens."""
        if tokens > self.few_tokens:
            self._streamed.hosted = frozenset()
            yield
            return
        self._streamed.hosted = self._all
        with self.host.step(tokens):
            yield

    def check(self) -> None:
        """Raises what went wrong on the host, whose answers then mean nothing."""
        self.host.check()

    def close(self) -> None:
        self.host.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpOffer:
    """What the host could compute, and with what."""

    order: tuple[int, ...]
    """Streamed layers, all in RAM."""
    attention_bytes: int
    mlp_bytes: int
    """Of one of them."""
    hidden: int
    dtype: torch.dtype
    room_bytes: int
    """Of RAM, for MLPs once more."""
    tokens: int
    """Of a step, at most."""
    threads: int
    load: Callable[[int], ExpertLayer | None]
    """The MLP of a layer; None: compiled products do not read it."""

    def loaded(self, layers: Sequence[int]) -> dict[int, ExpertLayer | None]:
        with ThreadPoolExecutor(min(LOADERS, max(1, len(layers))), "host-mlp") as pool:
            return dict(zip(layers, pool.map(self.load, layers), strict=True))

    def speedup(self, in_a_row: int, link_bytes_per_s: float, host_mlp_s: float) -> float:
        return speedup(in_a_row, self.attention_bytes, self.mlp_bytes, link_bytes_per_s, host_mlp_s)


def measured_mlps(
    offer: MlpOffer,
    streamed: DeviceLayers,
    device: torch.device,
    pinned: Callable[[Sequence[int], torch.device], PinnedMemory] = PinnedMemory,
) -> HostMlps | str:
    """As many as make steps fastest, by what the link and some MLPs are measured to take; or why there are none."""
    room, trial = offer.room_bytes // offer.mlp_bytes, hosted_layers(offer.order, MOST_IN_A_ROW, MEASURED_MLPS)
    if room < len(trial) or not trial:
        return (
            f"RAM has room for {counted(max(0, room), 'MLP')} of {format_bytes(offer.mlp_bytes)} beside what is pinned"
        )
    kept = offer.loaded(trial)
    tried = [one for one in kept.values() if one is not None]
    if len(tried) < len(trial):
        return "compiled kernels do not read them"
    streamed.decisions()
    link, sizes = streamed.use().possible_bytes_per_s, [size for size in FEW_SIZES if size <= offer.tokens]
    with ComputeThreads(offer.threads, own=True).computing():
        taken_s = {size: measure_layers(tried, 1, size, offer.dtype) for size in sizes}
    gains = {count: offer.speedup(count, link, taken_s[1]) for count in range(1, MOST_IN_A_ROW + 1)}
    in_a_row = max(gains, key=lambda count: gains[count])
    few = max((size for size in sizes if offer.speedup(in_a_row, link, taken_s[size]) >= WORTH), default=0)
    rate = offer.mlp_bytes / taken_s[1]
    said = f"its cores read {rate / 1e9:.0f} GB/s for one token, the link brings {link / 1e9:.0f}"
    if not few:
        return f"{said}: steps would be {gains[in_a_row]:.2f}x as fast"
    layers = hosted_layers(offer.order, in_a_row, room)
    kept |= offer.loaded([layer for layer in layers if layer not in kept])
    layout = ExchangeLayout(len(layers), few, 1, offer.hidden, offer.dtype.itemsize)
    memory = pinned([-(-layout.nbytes // PAGE_BYTES) * PAGE_BYTES], device)
    computed = [one for layer in layers if (one := kept[layer]) is not None]
    host = ExpertHost(computed, layout, memory, offer.dtype, device, offer.threads)
    reason = (
        f"the host computes the MLPs of {counted(len(layers), 'streamed layer')} in steps of up to"
        f" {counted(few, 'token')}, expected {gains[in_a_row]:.2f}x as fast: {said};"
        f" {format_bytes(len(layers) * offer.mlp_bytes)} of RAM"
    )
    return HostMlps(
        layers, streamed, host, few, Decision("cpu_compute", f"{offer.threads} threads", reason, "measured")
    )
