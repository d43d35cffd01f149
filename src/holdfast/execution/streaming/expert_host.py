"""The host beside a GPU that computes a step: a thread of its own answers what the step's layers ask of it, one after
the other, through pinned memory that both see.

    launching      ── step 1 ──── step 2 ──                the host is told of a step before it is launched, so that it
    this thread       └─ layers of 1 ─┴─ layers of 2 ─     answers while others are still being launched

Counts what it did. Knows nothing of products or kernels.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from holdfast.errors import EngineError
from holdfast.execution.native import ComputeThreads, ExpertLayer, HostExchange, HostExperts
from holdfast.execution.streaming.expert_exchange import SHARES, LayerExchange
from holdfast.execution.streaming.pinned_memory import PinnedMemory, as_device_memory
from holdfast.footprint.experts import ExchangeLayout
from holdfast.held_interrupts import interrupts_put_off

PATIENCE_S = 60.0
"""For a layer's request, once the GPU has come to the step: kernels are compiled between layers when they are first
used. The GPU waits as long."""
MEASURED_STEPS = 3
GIVEN_UP_LOOK_S = 0.001
LAST_STEP = 2**31 - 1
"""After it comes 1 again."""


Asked = queue.SimpleQueue[tuple[int, int, tuple[int, ...] | None, Callable[[], bool]] | None]
"""Steps: number, tokens, the layers that it asks for, and whether the GPU has come to it; None: it is over."""


def computed_so_far(device: torch.device) -> Callable[[], bool]:
    """Whether the device has computed all that was launched before this call. May be asked by another thread."""
    if device.type != "cuda":
        return lambda: True
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))

    def computed() -> bool:
        with torch.cuda.device(device):  # The thread that asks has another, which it would begin to use.
            return bool(done.query())

    return computed


class ExpertHost:
    """`layers`: with all experts of each. `memory`: one piece of the layout's size at least, which is closed with this.
    `link_share`: of the experts that wait, and that a step chose, what the GPU fetches over the link itself."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        layout: ExchangeLayout,
        memory: PinnedMemory,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        link_share: float = 0.0,
    ) -> None:
        self._exchange = exchange = HostExchange(layout, memory.pieces[0], dtype)
        self._experts, self._memory, self._device = HostExperts(layers, exchange), memory, device
        self._threads = ComputeThreads(threads, own=True)
        self._shared = as_device_memory(memory.pieces[0], device)
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._lost = torch.zeros(4, dtype=torch.uint8, pin_memory=device.type == "cuda")
        lost = as_device_memory(self._lost, device).view(torch.int32)
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        chosen = torch.zeros((layout.tokens, layout.per_token), dtype=torch.int32, device=device)
        self.exchanges = [
            LayerExchange(
                request=self._view(layout.request(layer), (1,), torch.int32),
                reply=self._view(layout.reply(layer), (1,), torch.int32),
                chosen=self._view(layout.chosen(layer), (layout.tokens, layout.per_token), torch.int32),
                weights=self._view(layout.weights(layer), (layout.tokens, layout.per_token), torch.float32),
                x=self._view(layout.x(layer), (layout.tokens, layout.hidden), exchange.dtype),
                y=self._view(layout.y(layer), (layout.tokens, layout.hidden), torch.float32),
                experts=chosen,
                over_link=round(link_share * SHARES),
                step=self._step,
                arrived=arrived,
                failed=self._failed,
                lost=lost,
            )
            for layer in range(layout.layers)
        ]
        """Of each layer."""
        self.beside = False
        """Whether the step that is being launched has the host beside it."""
        self.pairs, self.computed_s, self.waited_s = 0, 0.0, 0.0
        """That were computed here so far, and how long that and waiting for requests took."""
        self._number = self._answered = 0
        """Of the last step that was launched, and of the last that this thread is done with."""
        self._error: Exception | None = None
        self._asked: Asked = queue.SimpleQueue()
        given = weakref.ref(self), self._asked, self._threads
        self._thread = threading.Thread(target=_serve, args=given, name="expert-host", daemon=True)
        self._thread.start()
        # A start may fail before anybody closes this: it ends with whoever has it.
        self._end = weakref.finalize(self, self._asked.put, None)

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        return self._shared[first : first + nbytes].view(dtype).view(shape)

    @property
    def tokens(self) -> int:
        """Of a step, at most."""
        return self._exchange.layout.tokens

    @property
    def pinned_bytes(self) -> int:
        return self._memory.nbytes

    def measure(self, expert_bytes: Sequence[int]) -> float:
        """Bytes of experts a second, as a step of one token reads them; `expert_bytes`: of one expert of each layer.
        Before the first step."""
        layout, fastest = self._exchange.layout, 0.0
        for _ in range(MEASURED_STEPS):
            self._number += 1
            for layer in range(layout.layers):
                first = (self._number * layout.per_token) % (len(self._experts.uses[layer]) - layout.per_token + 1)
                self._exchange.chosen(layer)[0] = torch.arange(first, first + layout.per_token, dtype=torch.int32)
                self._exchange.request(layer).fill_(self._number)
            with self._threads.computing():
                served = self._experts.serve(self._number, 1, PATIENCE_S)
            fastest = max(fastest, layout.per_token * sum(expert_bytes) / served.computed_s)
        return fastest

    def share_with_link(self, link_share: float) -> None:
        """Before anything is captured."""
        over_link = round(link_share * SHARES)
        self.exchanges[:] = [exchange._replace(over_link=over_link) for exchange in self.exchanges]

    @contextmanager
    def step(self, tokens: int, layers: tuple[int, ...] | None = None) -> Iterator[None]:
        """Around what launches a step of so many tokens, or captures it: that is computed when it is launched.
        `layers`: the numbers of those that it asks for; None: all."""
        self.beside = True
        try:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                yield
                return
            number, told = self._number % LAST_STEP + 1, False
            try:
                with interrupts_put_off():  # Who was told is told of the end, too.
                    self._number = number
                    self._step.fill_(number)
                    # A long step may be computed before this one, which is none of the host's patience.
                    self._asked.put((number, tokens, layers, computed_so_far(self._device)))
                    told = True
                yield
            except BaseException:
                if told:
                    self._give_up(number)
                raise
        finally:
            self.beside = False

    def _give_up(self, number: int) -> None:
        """Of a step that was not launched to its end: nobody asks for its other layers, nor reads the answers. The next
        one must not write what is still read for this one."""
        if self._device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
        for layer in range(self._exchange.layout.layers):
            self._exchange.request(layer).fill_(number)
        while self._answered != number and self._thread.is_alive():
            time.sleep(GIVEN_UP_LOOK_S)

    def answer(self, number: int, tokens: int, layers: tuple[int, ...] | None, reached: Callable[[], bool]) -> None:
        """A step's layers; by the thread alone."""
        if self._error is None:
            self._compute(number, tokens, layers, reached)
        if self._error is not None:
            # Whoever reads the step looks at the error first; the GPU shall not wait until then.
            for layer in range(self._exchange.layout.layers):
                self._exchange.reply(layer).fill_(number)
        self._answered = number

    def _compute(self, number: int, tokens: int, layers: tuple[int, ...] | None, reached: Callable[[], bool]) -> None:
        try:
            served = self._experts.serve(number, tokens, PATIENCE_S, layers, reached)
        except Exception as error:
            self._error = error
            return
        self.pairs += served.pairs
        self.computed_s += served.computed_s
        self.waited_s += served.waited_s

    def check(self) -> None:
        """Once a step is computed: raises what kept the host from answering, or the GPU from waiting for it."""
        if self._error is not None:
            raise self._error
        if self._lost.any():
            raise EngineError(
                "the GPU did not get what the host was to compute for it",
                code="HF445",
                needed=f"an answer within {PATIENCE_S:g} s",
                found="none: the host's cores are stopped, or busy with something else",
                fix="--cpu-compute off, or leave the server its cores",
            )

    def close(self) -> None:
        self._end()
        self._thread.join()
        self.exchanges.clear()
        del self._shared
        self._memory.close()


def _serve(host: weakref.ref[ExpertHost], asked: Asked, threads: ComputeThreads) -> None:
    with threads.computing():
        while (step := asked.get()) is not None:
            if (there := host()) is not None:
                there.answer(*step)
            del there
