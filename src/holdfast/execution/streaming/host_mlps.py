"""MLPs of streamed layers that the host computes in steps of few tokens, while the link brings the other layers:

    layer      S         H          S          H            S: comes over the link whole; H: its attention comes, its
    the link  ─Ha─►─S'm──────────►─S'a─►─Ha─►─S''m────►     MLP is computed by the host beside the next one's copy
    the host        ── MLP of H ──       ── MLP of H ──

In steps with more tokens they are streamed like the others. Until the host has its copies, which are made while steps
run, all are. How many are worth it is decided then, from what was measured. Knows nothing of files or kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from holdfast.errors import HoldfastError
from holdfast.execution.native import ComputeThreads, ExpertLayer, measure_layers
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.expert_exchange import LayerExchange
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.experts import ExchangeLayout
from holdfast.footprint.streamed import MOST_IN_A_ROW, WORTH, hosted_layers, speedup
from holdfast.observability.decisions import Decision
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

PAGE_BYTES = 4096
MEASURED_MLPS = 2
"""Computed to see how fast the host's cores are: other bytes each time."""
FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""Steps of so many tokens are measured."""
LOADERS, WHILE_LOADED = 4, 3
"""MLPs that are loaded for the host at a time, and how many times its bytes each takes meanwhile beside them: raw, and
unpacked to a byte a code."""

STOPPED, NOT_READ = "the engine was stopped before they were copied", "compiled kernels do not read them"
SHORT = "RAM had no room for copies of them by then"


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
    tokens: int
    """Of a step, at most."""
    threads: int
    room_bytes: Callable[[], int]
    """Of RAM that is free for MLPs once more."""
    load: Callable[[int], ExpertLayer | None]
    """The MLP of a layer; None: compiled products do not read it."""

    @property
    def room(self) -> int:
        """MLPs that RAM has room for."""
        return max(0, self.room_bytes() // self.mlp_bytes - LOADERS * WHILE_LOADED)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Those that the host may be given, however many are worth it."""
        found = {
            layer for row in range(1, MOST_IN_A_ROW + 1) for layer in hosted_layers(self.order, row, len(self.order))
        }
        return tuple(sorted(found))

    def speedup(self, in_a_row: int, link_bytes_per_s: float, host_mlp_s: float) -> float:
        return speedup(in_a_row, self.attention_bytes, self.mlp_bytes, link_bytes_per_s, host_mlp_s)


@dataclass(frozen=True, slots=True)
class Joined:
    """What the host computes from now on."""

    host: ExpertHost
    exchanges: Mapping[int, LayerExchange]
    """By layer."""
    few_tokens: int
    reason: str

    def numbers(self, streamed: Sequence[int]) -> tuple[int, ...]:
        """Of its layers, those that come for every step now. One that came to stay is the GPU's."""
        return tuple(number for number, layer in enumerate(self.exchanges) if layer in streamed)


class HostMlps:
    """Closed before the streamed layers are."""

    def __init__(
        self,
        offer: MlpOffer,
        streamed: DeviceLayers,
        device: torch.device,
        pinned: Callable[[Sequence[int], torch.device], PinnedMemory] = PinnedMemory,
    ) -> None:
        self.candidates = offer.candidates
        self._offer, self._streamed, self._device, self._pinned = offer, streamed, device, pinned
        self.joined: Joined | None = None
        """None: the GPU computes all."""
        self._now: Mapping[int, LayerExchange] = {}
        self._why_not = NOT_READ
        """Some were not copied last."""
        self._stopping, self._thread = (
            threading.Event(),
            threading.Thread(target=self._run, name="host-mlps", daemon=True),
        )

    @property
    def decision(self) -> Decision:
        reason = (
            "the host's cores may compute MLPs of streamed layers in steps of few tokens: copies of them are made while"
            " requests are served, and a line says how many are worth it"
        )
        return Decision("cpu_compute", "auto", reason, "planner")

    @property
    def decided(self) -> bool:
        """Nothing is copied, or measured, now."""
        return not self._thread.is_alive()

    @property
    def most_bytes(self) -> int:
        """Of RAM, for copies."""
        most = max(
            len(hosted_layers(self._offer.order, row, len(self.candidates))) for row in range(1, MOST_IN_A_ROW + 1)
        )
        return self._offer.mlp_bytes * min(most, self._offer.room)

    def begin(self) -> None:
        """Once the link was measured: copies are made, and the host joins when they are there."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is decided."""
        self._thread.join(timeout_s)

    def exchange(self, layer: int) -> LayerExchange | None:
        """With the host, for the step that is being launched; None: the GPU computes this layer's MLP in it."""
        return self._now.get(layer)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Around all that launches a step of so many tokens."""
        joined = self.joined
        numbers = () if joined is None or tokens > joined.few_tokens else joined.numbers(self._streamed.streamed)
        if joined is None or not numbers:
            self._streamed.hosted = frozenset()
            yield
            return
        every = list(joined.exchanges.items())
        self._now = dict(every[number] for number in numbers)
        self._streamed.hosted = frozenset(self._now)
        try:
            with joined.host.step(tokens, numbers):
                yield
        finally:
            self._now = {}

    def check(self) -> None:
        """Raises what went wrong on the host, whose answers then mean nothing."""
        if self.joined is not None:
            self.joined.host.check()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.joined is not None:
            self.joined.host.close()

    def _run(self) -> None:
        try:
            found = self._measured()
        except (HoldfastError, OSError, MemoryError, RuntimeError) as error:
            log.warning("cpu_compute: the GPU computes all MLPs (%s)", error)
            self._streamed.host_bytes = 0
            return
        if isinstance(found, str):
            log.info("cpu_compute: the GPU computes all MLPs (%s)", found)
            self._streamed.host_bytes = 0
            return
        log.info("cpu_compute: %s", found.reason)
        self.joined = found

    def _measured(self) -> Joined | str:
        """As many as make steps fastest, by what the link and some MLPs are measured to take; or why there are none."""
        offer, link = self._offer, self._streamed.link_bytes_per_s
        room, trial = offer.room, hosted_layers(offer.order, MOST_IN_A_ROW, MEASURED_MLPS)
        if room < len(trial) or not trial or not link:
            size = format_bytes(offer.mlp_bytes)
            return f"RAM has room for {counted(room, 'MLP')} of {size} beside what is pinned"
        kept = self._loaded(trial)
        if len(kept) < len(trial):
            return self._why_not
        sizes = [size for size in FEW_SIZES if size < 2 * offer.tokens]  # Steps are padded, at most so far.
        with ComputeThreads(offer.threads, own=True).computing():
            taken_s = {size: measure_layers(list(kept.values()), 1, size, offer.dtype) for size in sizes}
        # For eight tokens one seems better than two, but is not: copies are slower beside cores that compute so much.
        # On an H200's host 36 GB/s in place of 55, and 27.3 tokens/s with one in a row, 30.7 with two.
        rows = range(1, MOST_IN_A_ROW + 1)
        in_a_row = max(rows, key=lambda count: offer.speedup(count, link, taken_s[1]))
        gains = {size: offer.speedup(in_a_row, link, taken) for size, taken in taken_s.items()}
        few = max((size for size, gain in gains.items() if gain >= WORTH), default=0)
        rate = offer.mlp_bytes / taken_s[1]
        said = f"its cores read {rate / 1e9:.0f} GB/s for one token, the link brings {link / 1e9:.0f}"
        if not few:
            return f"{said}: steps would be {gains[1]:.2f}x as fast"
        layers = hosted_layers(offer.order, in_a_row, room)
        self._streamed.host_bytes = len(layers) * offer.mlp_bytes
        kept |= self._loaded([layer for layer in layers if layer not in kept])
        chosen, layers = layers, tuple(layer for layer in layers if layer in kept)
        if len(layers) < len(chosen):
            layers = self._within_ram(layers) if self._why_not == SHORT else ()
            self._streamed.host_bytes = len(layers) * offer.mlp_bytes
            if not layers:
                return self._why_not
        fewer = "" if layers == chosen else f", which had no room for {len(chosen)} of them"
        # A step waits for the others' MLPs as before.
        share = len(layers) / len(hosted_layers(offer.order, in_a_row, len(offer.order)))
        gain = 1 / (1 - share + share / gains[1])
        reason = (
            f"the host computes the MLPs of {counted(len(layers), 'streamed layer')} in steps of up to"
            f" {counted(few, 'token')} on {counted(offer.threads, 'thread')}, expected {gain:.2f}x as fast:"
            f" {said}; {format_bytes(len(layers) * offer.mlp_bytes)} of RAM{fewer}"
        )
        return self._join([kept[layer] for layer in layers], layers, few, reason)

    def _within_ram(self, copied: tuple[int, ...]) -> tuple[int, ...]:
        """Without as many of them as there is RAM too little by now: several were begun on the same last bytes, and
        others may have taken some."""
        over = max(0, -self._offer.room_bytes())
        return copied[: max(0, len(copied) - -(-over // self._offer.mlp_bytes))]

    def _join(self, mlps: Sequence[ExpertLayer], layers: Sequence[int], few: int, reason: str) -> Joined:
        offer, device = self._offer, self._device
        layout = ExchangeLayout(len(layers), few, 1, offer.hidden, offer.dtype.itemsize)
        on_gpu = device.type == "cuda"
        with torch.cuda.device(device) if on_gpu else nullcontext():
            memory = self._pinned([-(-layout.nbytes // PAGE_BYTES) * PAGE_BYTES], device)
            host = ExpertHost(mlps, layout, memory, offer.dtype, device, offer.threads)
            if on_gpu:  # What it made on the device was made on another stream than steps are computed on.
                torch.cuda.synchronize(device)
        return Joined(host, dict(zip(layers, host.exchanges, strict=True)), few, reason)

    def _loaded(self, layers: Sequence[int]) -> dict[int, ExpertLayer]:
        """Without those that compiled products do not read, what is not begun when this is closed, and what RAM has no
        room for by then, whoever took it: `_why_not` says which."""
        self._why_not = NOT_READ

        def load(layer: int) -> ExpertLayer | None:
            if self._offer.room_bytes() < WHILE_LOADED * self._offer.mlp_bytes:
                self._why_not = SHORT
            if self._stopping.is_set():
                self._why_not = STOPPED
            return None if self._why_not != NOT_READ else self._offer.load(layer)

        with ThreadPoolExecutor(min(LOADERS, max(1, len(layers))), "host-mlp") as pool:
            made = dict(zip(layers, pool.map(load, layers), strict=True))
        return {layer: mlp for layer, mlp in made.items() if mlp is not None}
