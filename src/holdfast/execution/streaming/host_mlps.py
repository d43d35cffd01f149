"""MLPs of streamed layers that the host computes in steps of few tokens, while the link brings the other layers:

    layer      S         H          S          H            S: comes over the link whole; H: its attention comes, its
    the link  ─Ha─►─S'm──────────►─S'a─►─Ha─►─S''m────►     MLP is computed by the host beside the next one's copy
    the host        ── MLP of H ──       ── MLP of H ──

In steps with more tokens they are streamed like the others. How many are worth it is decided once, before the first
step, by what cores and link do beside each other (link/contention.py). Until the host has its copies, which are made
while steps run, all are streamed. Knows nothing of files or kernels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.errors import HoldfastError
from holdfast.execution.link.contention import BesideCopies, Together, wait_beating
from holdfast.execution.native import ComputeThreads, ExpertLayer, measure_layers
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.expert_exchange import LayerExchange
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.footprint.experts import ExchangeLayout
from holdfast.footprint.streamed import (
    COPIES_LEFT,
    DURING_COPIES,
    MOST_IN_A_ROW,
    WORTH,
    estimated_speedup,
    hosted_layers,
    speedup,
)
from holdfast.observability.decisions import Decision
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

PAGE_BYTES = 4096
MEASURED_MLPS = 2
"""Computed to see how fast the host's cores are: other bytes each time."""
FEW_SIZES = (1, 2, 4, 8, 16, 32)
"""Steps of so many tokens are measured, up to the first that is not worth it."""
MOST_MEASURED_S = 3.0
"""After that no larger step is measured, and none is the host's: cores and a link that need so long are slow."""
LOADED_PATIENCE_S, CHOSEN_PATIENCE_S = 10.0, 3.0
"""Of a start: for the MLPs that are measured to be there, which are loaded beside it; and for what follows of it."""
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

    def speedup(self, in_a_row: int, link_bytes_per_s: float, beside: Together) -> float:
        """As measured at once. `link_bytes_per_s`: alone."""
        brought = min(beside.link_bytes_per_s, link_bytes_per_s)
        return speedup(in_a_row, self.attention_bytes, self.mlp_bytes, link_bytes_per_s, brought, beside.host_s)

    def estimated(self, in_a_row: int, link_bytes_per_s: float, alone_s: float, tokens: int) -> float:
        """As plans estimate it, from what each does alone."""
        return estimated_speedup(in_a_row, self.attention_bytes, self.mlp_bytes, link_bytes_per_s, alone_s, tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is worth it."""

    in_a_row: int
    gains: Mapping[int, float]
    """By tokens of a step, how many times as fast it would be; from one token on."""
    said: str
    """What was measured."""
    source: str

    @property
    def few_tokens(self) -> int:
        """Of a step, at most; 0: the GPU computes all."""
        return max((size for size, gain in self.gains.items() if gain >= WORTH), default=0)


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
        self._room: int | None = None
        """MLPs that RAM had room for before the first was copied; None: that is now."""
        self._beside, self._chosen = BesideCopies(), threading.Event()
        self._decision: Decision | None = None
        self._stopping, self._thread = (
            threading.Event(),
            threading.Thread(target=self._run, name="host-mlps", daemon=True),
        )

    @property
    def decision(self) -> Decision:
        """What is known so far."""
        if self._decision is not None:
            return self._decision
        reason = (
            "the host's cores may compute MLPs of streamed layers in steps of few tokens: copies of them are made while"
            " requests are served, and a line says how many are worth it"
        )
        if self._beside.over:
            reason += f"; not measured beside the link's copies ({self._beside.why_not}), but estimated as in plans"
        return Decision("cpu_compute", "auto", reason, "planner")

    @property
    def most_bytes(self) -> int:
        """Of RAM, for copies."""
        most = max(
            len(hosted_layers(self._offer.order, row, len(self.candidates))) for row in range(1, MOST_IN_A_ROW + 1)
        )
        return self._offer.mlp_bytes * min(most, self._offer.room if self._room is None else self._room)

    def begin(self) -> None:
        """Once the link was measured: the first copies are made, and all that are worth it after `calibrate`. The host
        joins when they are there."""
        self._room = self._offer.room
        self._thread.start()

    def calibrate(self, beat: Callable[[], None] = lambda: None) -> None:
        """By the thread that launches steps, before the first, and after `begin`: layers come as for steps while the
        cores are timed, for about a second, or for half a minute where all is slow. What is worth it is decided then.
        `beat`: called again and again meanwhile."""
        with torch.inference_mode(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._beside.copy(self._streamed.bring_more, LOADED_PATIENCE_S, beat)
            self._streamed.link.settle()  # Raises where the GPU has failed for good.
        if self._beside.asked:
            wait_beating(self._chosen, CHOSEN_PATIENCE_S, beat)

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
        self._beside.give_up()
        if self._thread.ident is not None:
            self._thread.join()
        if self.joined is not None:
            self.joined.host.close()

    def _run(self) -> None:
        try:
            found = self._measured()
            if isinstance(found, str):
                log.info("cpu_compute: the GPU computes all MLPs (%s)", found)
        except (HoldfastError, OSError, MemoryError, RuntimeError) as error:
            found = self._none(str(error))
            log.warning("cpu_compute: the GPU computes all MLPs (%s)", error)
        finally:  # Whoever waits for it.
            self._beside.end()
            self._chosen.set()
        if isinstance(found, str):
            self._streamed.host_bytes = 0
            return
        log.info("cpu_compute: %s", found.reason)
        self.joined = found

    def _measured(self) -> Joined | str:
        """As many as make steps fastest, by what the link and some MLPs are measured to take; or why there are none."""
        offer, link = self._offer, self._streamed.link_bytes_per_s
        room, trial = self._room or 0, hosted_layers(offer.order, MOST_IN_A_ROW, MEASURED_MLPS)
        if room < len(trial) or not trial or not link:
            size = format_bytes(offer.mlp_bytes)
            return self._none(f"RAM has room for {counted(room, 'MLP')} of {size} beside what is pinned")
        kept = self._loaded(trial)
        if len(kept) < len(trial):
            return self._none(self._why_not)
        choice = self._choose(list(kept.values()), link)
        if self._stopping.is_set():
            return STOPPED
        few, gains = choice.few_tokens, choice.gains
        if not few:
            return self._none(choice.said, choice.source)
        layers = hosted_layers(offer.order, choice.in_a_row, room)
        self._streamed.host_bytes = len(layers) * offer.mlp_bytes
        value = f"MLPs of {counted(len(layers), 'streamed layer')}, in steps of up to {counted(few, 'token')}"
        soon = f"{choice.said}; copies of them are made while requests are served"
        self._decision = Decision("cpu_compute", value, soon, choice.source)
        self._chosen.set()
        kept |= self._loaded([layer for layer in layers if layer not in kept])
        chosen, layers = layers, tuple(layer for layer in layers if layer in kept)
        if len(layers) < len(chosen):
            layers = self._within_ram(layers) if self._why_not == SHORT else ()
            self._streamed.host_bytes = len(layers) * offer.mlp_bytes
            if not layers:
                return self._why_not
        fewer = "" if layers == chosen else f", which had no room for {len(chosen)} of them"
        # A step waits for the others' MLPs as before.
        share = len(layers) / len(hosted_layers(offer.order, choice.in_a_row, len(offer.order)))
        gain = 1 / (1 - share + share / gains[1])
        reason = (
            f"the host computes the MLPs of {counted(len(layers), 'streamed layer')} in steps of up to"
            f" {counted(few, 'token')} on {counted(offer.threads, 'thread')}, expected {gain:.2f}x as fast for one:"
            f" {choice.said}; {format_bytes(len(layers) * offer.mlp_bytes)} of RAM{fewer}"
        )
        return self._join([kept[layer] for layer in layers], layers, few, reason)

    def _none(self, why: str, source: str = "planner") -> str:
        """None are worth it, or possible, as is known at the start."""
        self._decision = Decision("cpu_compute", "none", f"the GPU computes all MLPs ({why})", source)
        return why

    def _choose(self, mlps: Sequence[ExpertLayer], link: float) -> Choice:
        """With these MLPs computed by turns, while the thread that launches steps has layers copied, or without that.
        `link`: bytes a second, alone."""
        offer = self._offer
        sizes = [size for size in FEW_SIZES if size < 2 * offer.tokens]  # Steps are padded, at most so far.

        def mlp_s(tokens: int) -> float:
            return measure_layers(mlps, 1, tokens, offer.dtype, 1)

        calm = self._beside.calm()
        with ComputeThreads(offer.threads, own=True).computing():
            choice = self._choose_beside(mlp_s, sizes, link) if calm else None
            self._beside.end()
            return self._choose_alone(mlp_s, sizes, link) if choice is None else choice

    def _choose_beside(self, mlp_s: Callable[[int], float], sizes: Sequence[int], link: float) -> Choice | None:
        """By what both do at once; None: it could not be measured."""
        offer, found, gains, in_a_row = self._offer, dict[int, Together](), dict[int, float](), 0
        alone = offer.mlp_bytes / mlp_s(1)
        if not self._beside.begin():
            return None
        ends_s, late = time.monotonic() + MOST_MEASURED_S, ""
        for size in sizes:
            if found and time.monotonic() > ends_s:
                late = "; larger steps were not measured, for want of time"
                break
            together = self._beside.timed(partial(mlp_s, size))
            if together is None and found:
                late = f"; larger steps were not measured ({self._beside.why_not})"
                break
            if together is None:
                return None
            if not in_a_row:  # One token is what the host computes for most.
                by_row = {row: offer.speedup(row, link, together) for row in range(1, MOST_IN_A_ROW + 1)}
                in_a_row = max(by_row, key=by_row.__getitem__)
            found[size], gains[size] = together, offer.speedup(in_a_row, link, together)
            if gains[size] < WORTH:
                break
        read = _listed(offer.mlp_bytes / one.host_s / 1e9 for one in found.values())
        brought = _listed(one.link_bytes_per_s / 1e9 for one in found.values())
        said = (
            f"measured at once, by tokens of a step ({_listed(found)}), its cores read {read} GB/s beside copies"
            f" ({alone / 1e9:.0f} alone for one), and the link brings {brought} beside them ({link / 1e9:.0f} alone):"
            f" steps would be {_listed(gains.values(), '.2f')}x as fast{late}"
        )
        return Choice(in_a_row, gains, said, "measured")

    def _choose_alone(self, mlp_s: Callable[[int], float], sizes: Sequence[int], link: float) -> Choice:
        """By what each does alone, and what plans take that to be worth beside the other."""
        offer, gains, in_a_row, alone = self._offer, dict[int, float](), 0, 0.0
        for size in sizes:
            taken_s = mlp_s(size)
            if not in_a_row:
                by_row = {row: offer.estimated(row, link, taken_s, size) for row in range(1, MOST_IN_A_ROW + 1)}
                in_a_row, alone = max(by_row, key=by_row.__getitem__), offer.mlp_bytes / taken_s
            gains[size] = offer.estimated(in_a_row, link, taken_s, size)
            if gains[size] < WORTH or self._stopping.is_set():
                break
        said = (
            f"its cores read {alone / 1e9:.0f} GB/s alone for one token, the link brings {link / 1e9:.0f} alone; at"
            f" once they could not be measured ({self._beside.why_not}), and are taken, as in plans, to keep"
            f" {DURING_COPIES:.0%} and, beside many tokens, {COPIES_LEFT[1]:.0%} of it: by tokens of a step"
            f" ({_listed(gains)}) they would be {_listed(gains.values(), '.2f')}x as fast"
        )
        return Choice(in_a_row, gains, said, "planner")

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


def _listed(numbers: Iterable[float], form: str = ".0f") -> str:
    return "/".join(format(number, form) for number in numbers)
