"""Experts that the host computes for a GPU while it computes others, or an MLP that waits in RAM: requests and replies
pass through pinned memory that both see, laid out by `footprint.experts.ExchangeLayout`.

    GPU     x, pairs, request = step ──┐  computes its own        ┌── waits for reply = step, adds y
    host                 waits for it ─┘ ──► computes ──► y, reply = step

Knows nothing of GPUs: whoever writes requests is one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch

from holdfast.errors import EngineError
from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS
from holdfast.execution.native.experts import ExpertLayer
from holdfast.execution.native.loading import kernels, threads
from holdfast.execution.native.products import LAYOUT_NUMBERS
from holdfast.footprint.experts import EXCHANGE_BUFFERS, LINE_BYTES, ExchangeLayout

MOST_TOKENS = 256
"""In a step: as many rows as compiled pieces of products have room for."""
PATIENCE_S = 10.0
"""For a layer's request, once the GPU has come to the step."""
MEASURED_STEPS = 3
"""After one that warms up."""
LAST_STEP = 2**31 - 1
"""After it comes 1 again."""
NO_MEMORY, NOT_ASKED = 1, 2
"""As host_experts.h numbers them."""
_NUMBERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class HostExchange:
    """`memory`: contiguous uint8 that both sides see, at least the layout's bytes, at a cache line; it is zeroed, so
    that no step was asked for yet. Views of its parts are for whoever writes requests without kernels."""

    def __init__(self, layout: ExchangeLayout, memory: torch.Tensor, dtype: torch.dtype) -> None:
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(f"{dtype} has {dtype.itemsize} bytes an element, the layout {layout.element_bytes}")
        if memory.dtype is not torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or not memory.is_cpu:
            raise ValueError("an exchange needs contiguous uint8 memory of the host")
        if memory.nbytes < layout.nbytes or memory.data_ptr() % LINE_BYTES:
            raise ValueError(f"an exchange needs {layout.nbytes} bytes at a cache line, not {memory.nbytes}")
        self.layout, self.memory, self.dtype = layout, memory, dtype
        memory[: layout.nbytes].zero_()

    def request(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.request(layer), (1,), torch.int32)

    def reply(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.reply(layer), (1,), torch.int32)

    def chosen(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.chosen(layer), (self.layout.tokens, self.layout.per_token), torch.int32)

    def weights(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.weights(layer), (self.layout.tokens, self.layout.per_token), torch.float32)

    def x(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.x(layer), (self.layout.tokens, self.layout.hidden), self.dtype)

    def y(self, layer: int) -> torch.Tensor:
        return self._view(self.layout.y(layer), (self.layout.tokens, self.layout.hidden), torch.float32)

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        return self.memory[first : first + nbytes].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Served:
    """Of one step."""

    pairs: int
    """Of a token and an expert, in all layers."""
    waited_s: float
    """For requests."""
    computed_s: float
    """From requests to their replies."""


class HostExperts:
    """`layers`: in the order in which a step asks for them, all as wide as the exchange. One of a single expert is an
    MLP that every token goes through with weight 1: nothing needs to be written of what was chosen."""

    def __init__(self, layers: Sequence[ExpertLayer], exchange: HostExchange) -> None:
        layout = exchange.layout
        if len(layers) != layout.layers or any(layer.hidden != layout.hidden for layer in layers):
            raise ValueError(f"an exchange of {layout.layers} layers {layout.hidden} wide, for others")
        if exchange.dtype not in _NUMBERS or not 1 <= layout.tokens <= MOST_TOKENS:
            raise ValueError(f"no host experts for {layout.tokens} tokens in {exchange.dtype}")
        self.uses = [torch.zeros(layer.experts, dtype=torch.int64) for layer in layers]
        """Of each layer, for each expert: how many tokens had it computed here so far."""
        base = exchange.memory.data_ptr()
        self._described = numpy.array(
            [
                (
                    layer.gate_up_address,
                    layer.down_address,
                    layer.experts,
                    layer.parts,
                    ACTIVATION_NUMBERS[layer.activation],
                    layer.inner,
                    *(base + at(number) for at in (layout.request, layout.reply, layout.chosen, layout.weights)),
                    base + layout.x(number),
                    base + layout.y(number),
                    uses.data_ptr(),
                )
                for number, (layer, uses) in enumerate(zip(layers, self.uses, strict=True))
            ],
            dtype=numpy.int64,
        )
        self._asked: tuple[int, ...] | None = None
        self._described_asked = self._described[:0]
        self._kept = (layers, exchange)
        self._tokens, self._kernels = layout.tokens, kernels()
        self._numbers = (
            self._described.ctypes.data,
            len(layers),
            layout.hidden,
            layout.per_token,
            LAYOUT_NUMBERS[_NUMBERS[exchange.dtype]],
        )
        room_bytes = self._kernels.host_room(*self._numbers, layout.tokens)
        room = torch.empty(room_bytes + LINE_BYTES, dtype=torch.uint8)
        self._room = room[-room.data_ptr() % LINE_BYTES :][:room_bytes]

    @property
    def nbytes(self) -> int:
        """Beside weights and exchange."""
        return self._room.nbytes + self._described.nbytes + sum(uses.nbytes for uses in self.uses)

    def serve(
        self,
        step: int,
        tokens: int,
        patience_s: float = PATIENCE_S,
        layers: tuple[int, ...] | None = None,
        reached: Callable[[], bool] = lambda: True,
    ) -> Served:
        """Computes for all layers of a step as they are asked for, and returns after the last reply. An EngineError
        when a layer is not asked for in time: the step cannot be finished then, nor can another be served. `layers`:
        the numbers of those that it asks for; None: all. `reached`: whether the GPU has come to this step by now. Until
        then the first layer is waited for, however long the steps before it take."""
        if not 1 <= step <= LAST_STEP or not 1 <= tokens <= self._tokens:
            raise ValueError(f"step {step} of {tokens} tokens; there is room for {self._tokens}")
        if layers != self._asked:
            self._asked, self._described_asked = layers, self._described[list(layers or ())]
        described = self._described if layers is None else self._described_asked
        there, result, layer = False, NOT_ASKED, 0
        while not there and result == NOT_ASKED and layer == 0:  # Nothing was computed so far.
            there = reached()  # Before it is waited: all of the patience is the step's own.
            result, layer, waited_ns, computed_ns, pairs = self._kernels.serve(
                described.ctypes.data,
                len(described),
                *self._numbers[2:],
                self._room.data_ptr(),
                self._room.nbytes,
                step,
                tokens,
                int(patience_s * 1e9),
                threads(),
            )
        if result != 0:
            raise _failure(result, layer, patience_s)
        return Served(pairs=pairs, waited_s=waited_ns / 1e9, computed_s=computed_ns / 1e9)


def _failure(result: int, layer: int, patience_s: float) -> EngineError:
    what = f"the host could not compute layer {layer} of those that it computes for the GPU"
    fix = "--cpu-compute off; a GPU that stopped is named by `nvidia-smi` and `dmesg | grep -i xid`"
    if result == NO_MEMORY:
        return EngineError(
            what, code="HF445", needed="scratch memory for its threads", found="none", fix="a larger --ram"
        )
    if result == NOT_ASKED:
        needed = f"the GPU's request within {patience_s:g} s"
        return EngineError(what, code="HF445", needed=needed, found="no request: the GPU stopped, or hangs", fix=fix)
    return EngineError(
        what,
        code="HF445",
        needed="experts that the model has",
        found="the number of an expert beyond the last",
        fix=fix,
    )


def measure_layers(
    layers: Sequence[ExpertLayer], per_token: int, tokens: int, dtype: torch.dtype, steps: int = MEASURED_STEPS
) -> float:
    """Seconds that one of these layers takes here, for random tokens that choose at random; the median of some steps,
    after one more that warms up. With the threads of the caller."""
    layout = ExchangeLayout(len(layers), tokens, per_token, layers[0].hidden, dtype.itemsize)
    memory = torch.empty(layout.nbytes + LINE_BYTES, dtype=torch.uint8)
    exchange = HostExchange(layout, memory[-memory.data_ptr() % LINE_BYTES :][: layout.nbytes], dtype)
    host, taken = HostExperts(layers, exchange), []
    for step in range(1, steps + 2):
        for buffer in range(min(EXCHANGE_BUFFERS, len(layers))):
            exchange.x(buffer).normal_()
            chosen = [torch.randperm(layers[buffer].experts)[:per_token] for _ in range(tokens)]
            exchange.chosen(buffer).copy_(torch.stack(chosen))
            exchange.weights(buffer).fill_(1 / per_token)
        for number in range(len(layers)):
            exchange.request(number).fill_(step)
        taken.append(host.serve(step, tokens).computed_s / len(layers))
    return statistics.median(taken[1:])
