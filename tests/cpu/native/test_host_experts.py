"""Experts that the host computes for a GPU, which a thread plays here: every way of storing matrices, all the number
types of x, any number of tokens, several steps over poisoned buffers, against float64; and a GPU that never asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gguf
import numpy
import pytest
import torch
from torch.nn.functional import silu

from holdfast.errors import EngineError
from holdfast.execution import native
from holdfast.execution.layers.rounding import rounded_inputs
from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS
from holdfast.execution.native.planes import ScaledBlockMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.expert_places import HOST_ACTIVATIONS
from holdfast.footprint.experts import ExchangeLayout
from holdfast.footprint.scaled_layouts import ScaledLayout

HIDDEN = 256
SCALED = {
    "int4": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "int4-ordered": ScaledLayout(codes="int4", scales="float16", group=64, zeros=True, ordered=True),
    "int8": ScaledLayout(codes="int8", scales="bfloat16", group=128),
    "fp8": ScaledLayout(codes="fp8", inputs="fp8"),
    "fp8-weights": ScaledLayout(codes="fp8", scales="bfloat16"),
}
LOSS = {"F32": 1e-5, "BF16": 1e-5} | dict.fromkeys(("Q4_K", "Q6_K"), 1e-3)
"""Of y's norm; 1e-4 of the others, since inputs have sixteen bits. Random blocks add up to little."""


@dataclass(frozen=True)
class Stored:
    matrix: native.CompiledMatrix
    numbers: torch.Tensor
    layout: ScaledLayout | None = None
    inputs: torch.Tensor | None = None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout is not None and self.layout.inputs != "plain":
            x = rounded_inputs(x.float().contiguous(), self.layout, self.inputs).double()
        return x @ self.numbers.T


def stored(kind: str, rows: int, columns: int, rng: numpy.random.Generator) -> Stored:
    if kind in SCALED:
        made = ScaledMatrix(SCALED[kind], rows, columns, torch.device("cpu"))
        codes = torch.from_numpy(rng.integers(0, 256, tuple(made.codes.shape), dtype=numpy.uint8))
        if made.layout.codes == "fp8":
            codes[(codes & 127) > 100] = 0x31
        made.codes.copy_(codes if made.layout.four_bits else codes.view(made.codes.dtype))
        made.scales.copy_(torch.from_numpy(0.002 + 0.004 * rng.random(tuple(made.scales.shape))))
        if made.zeros is not None:
            made.zeros.copy_(torch.from_numpy(rng.integers(0, 16, tuple(made.zeros.shape))))
        if made.order is not None:
            made.order.copy_(torch.from_numpy(rng.permutation(columns)))
        numbers = torch.empty(rows, columns)
        made.dequantize(0, rows, numbers)
        matrix = ScaledBlockMatrix(made.layout, made.codes, made.scales, made.zeros, made.order, made.inputs)
        return Stored(matrix, numbers.double(), made.layout, made.inputs)
    quantization = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        elements, nbytes = gguf.GGML_QUANT_SIZES[quantization]
        bits = rng.integers(0, 256, (rows, columns // elements, nbytes), dtype=numpy.uint8)
        for at in (208,) if kind == "Q6_K" else (0, 2):
            bits[..., at : at + 2] = numpy.frombuffer(numpy.float16(2e-4).tobytes(), dtype=numpy.uint8)
        bits = bits.reshape(rows, -1)
    else:
        drawn = 0.1 * rng.standard_normal((rows, columns)).astype(numpy.float32)
        bits = gguf.quants.quantize(drawn, quantization).view(numpy.uint8).reshape(rows, -1)
    numbers = torch.from_numpy(gguf.quants.dequantize(bits, quantization).reshape(rows, columns).astype(numpy.float64))
    return Stored(native.BlockMatrix(torch.from_numpy(bits.copy()), kind), numbers)


class Layer:
    """Of `kinds` (gate_up, or gate and up; down), and what it makes of a row in float64."""

    def __init__(self, experts: int, inner: int, kinds: Sequence[str], seed: int) -> None:
        rng, outputs = numpy.random.default_rng(seed), 2 * inner // (len(kinds) - 1)
        self.gate_up = [[stored(kind, outputs, HIDDEN, rng) for kind in kinds[:-1]] for _ in range(experts)]
        self.down = [stored(kinds[-1], HIDDEN, inner, rng) for _ in range(experts)]
        self.compiled = native.ExpertLayer(
            gate_up=[[part.matrix for part in expert] for expert in self.gate_up],
            down=[one.matrix for one in self.down],
            per_token=1,
            normalized=False,
            activation="silu",
        )

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.cat([part.times(x) for part in self.gate_up[number]], dim=-1).chunk(2, dim=-1)
        return self.down[number].times(silu(gate) * up)

    def expected(self, asked: Asked) -> torch.Tensor:
        y = torch.zeros(len(asked.x), HIDDEN, dtype=torch.float64)
        for token, row in enumerate(asked.x.double()):
            for expert, weight in zip(asked.chosen[token].tolist(), asked.weights[token].double(), strict=True):
                if len(self.down) == 1:
                    y[token] = self.expert(0, row[None])[0]
                elif expert >= 0:
                    y[token] += weight * self.expert(expert, row[None])[0]
        return y


@dataclass(frozen=True)
class Asked:
    """Of a layer in a step."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


def drawn(tokens: int, per_token: int, experts: int, dtype: torch.dtype, seed: int) -> Asked:
    """A token has its experts in any order, and about a third of its pairs are not the host's."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]).int()
    chosen[torch.rand(chosen.shape, generator=generator) < 0.3] = -1
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return Asked(x, chosen, torch.rand(chosen.shape, generator=generator))


class PlayedGpu:
    """Asks for layer after layer, and keeps what it is given; poisons what it does not write."""

    def __init__(self, exchange: native.HostExchange) -> None:
        self.exchange, self.got = exchange, dict[tuple[int, int], torch.Tensor]()

    def run(self, step: int, layers: Sequence[Asked]) -> None:
        exchange = self.exchange
        for number, asked in enumerate(layers):
            tokens = len(asked.x)
            exchange.x(number).fill_(float("nan"))[:tokens].copy_(asked.x)
            exchange.y(number).fill_(float("nan"))
            exchange.chosen(number).fill_(2**30)[:tokens].copy_(asked.chosen)
            exchange.weights(number).fill_(float("nan"))[:tokens].copy_(asked.weights)
            exchange.request(number).fill_(step)
            deadline_s = time.monotonic() + 30
            while int(exchange.reply(number)) != step and time.monotonic() < deadline_s:
                time.sleep(0)
            assert exchange.y(number)[tokens:].isnan().all()
            self.got[step, number] = exchange.y(number)[:tokens].clone()

    def beside(self, work: Callable[[], object], steps: Sequence[Sequence[Asked]]) -> None:
        played = threading.Thread(
            target=lambda: [self.run(number, layers) for number, layers in enumerate(steps, 1)], name="played-gpu"
        )
        played.start()
        try:
            work()
        finally:
            played.join(60)
        assert not played.is_alive()


def exchange_of(layers: int, tokens: int, per_token: int, dtype: torch.dtype) -> native.HostExchange:
    layout = ExchangeLayout(layers, tokens, per_token, HIDDEN, dtype.itemsize)
    memory = torch.full((layout.nbytes + 64,), 255, dtype=torch.uint8)
    return native.HostExchange(layout, memory[-memory.data_ptr() % 64 :][: layout.nbytes], dtype)


def served(
    layers: Sequence[Layer], steps: Sequence[Sequence[Asked]], room: int, dtype: torch.dtype
) -> tuple[PlayedGpu, native.HostExperts]:
    """`room`: tokens that there is room for."""
    exchange = exchange_of(len(layers), room, steps[0][0].chosen.shape[1], dtype)
    host, gpu = native.HostExperts([layer.compiled for layer in layers], exchange), PlayedGpu(exchange)

    def serve() -> None:
        for step, asked in enumerate(steps, 1):
            told = host.serve(step, len(asked[0].x), patience_s=30)
            assert told.pairs == sum(
                int((one.chosen >= 0).sum()) if layer.compiled.experts > 1 else len(one.x)
                for one, layer in zip(asked, layers, strict=True)
            )

    gpu.beside(serve, steps)
    return gpu, host


KINDS = [
    ("F32", "F32"), ("BF16", "F16", "BF16"), ("Q8_0", "Q4_0"), ("Q4_K", "Q6_K"), ("Q5_K", "Q4_K", "Q4_K"),
    *((name, name) for name in SCALED),
]  # fmt: skip


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_steps_are_those_of_float64(kinds: tuple[str, ...]) -> None:
    """Layers of different widths, one of them an MLP without experts; steps of different numbers of tokens."""
    dtype = (torch.bfloat16, torch.float16, torch.float32)[KINDS.index(kinds) % 3]
    inner = 256 if kinds[-1].endswith("_K") else 128
    layers = [Layer(5, inner, kinds, 1), Layer(1, 2 * inner, kinds, 2), Layer(9, inner, kinds, 3)]
    steps = [
        [drawn(tokens, 3, max(3, len(layer.down)), dtype, 10 * tokens + at) for at, layer in enumerate(layers)]
        for tokens in (1, 2, 19, 1, 32, 7)
    ]
    gpu, host = served(layers, steps, 32, dtype)
    for step, asked in enumerate(steps, 1):
        for number, (layer, one) in enumerate(zip(layers, asked, strict=True)):
            wanted, got = layer.expected(one), gpu.got[step, number].double()
            none = torch.tensor([layer.compiled.experts > 1 and bool((row < 0).all()) for row in one.chosen])
            assert not got[none].any()
            assert float((got - wanted).norm()) <= LOSS.get(kinds[-1], 1e-4) * float(wanted.norm()) + 1e-30
    for number, layer in enumerate(layers):
        numbers = [int(one) for asked in steps for one in asked[number].chosen.flatten() if one >= 0]
        counted = numpy.bincount(numbers, minlength=len(layer.down)) if len(layer.down) > 1 else [62]
        assert host.uses[number].tolist() == list(counted)


@pytest.mark.parametrize("kinds", [("F32", "BF16"), ("Q4_K", "Q6_K"), ("int4", "fp8")], ids="-".join)
def test_a_token_gets_the_same_in_any_company(kinds: tuple[str, ...]) -> None:
    layer, room = Layer(4, 256, kinds, 1), 32
    together = drawn(room, 3, 4, torch.bfloat16, 5)
    steps = [[together]]
    for first, count in ((0, 1), (3, 2), (7, 9), (31, 1), (8, 16)):
        rows = slice(first, first + count)
        turned = torch.arange(2, -1, -1)
        steps.append([Asked(together.x[rows], together.chosen[rows][:, turned], together.weights[rows][:, turned])])
    gpu, _ = served([layer], steps, room, torch.bfloat16)
    for step, (first, count) in enumerate(((0, 1), (3, 2), (7, 9), (31, 1), (8, 16)), 2):
        assert torch.equal(gpu.got[step, 0], gpu.got[1, 0][first : first + count])


def test_a_gpu_that_never_asks_is_an_error() -> None:
    layers = [Layer(2, 32, ("F32", "F32"), 1), Layer(2, 32, ("F32", "F32"), 2)]
    exchange = exchange_of(2, 4, 1, torch.float32)
    host = native.HostExperts([layer.compiled for layer in layers], exchange)
    asked = drawn(2, 1, 2, torch.float32, 1)

    def serve() -> None:
        with pytest.raises(EngineError, match="layer 1 of those") as failed:
            host.serve(1, 2, patience_s=0.2)
        assert failed.value.code == "HF445"
        assert "request within 0.2 s" in str(failed.value)

    PlayedGpu(exchange).beside(serve, [[asked]])
    assert int(exchange.reply(0)) == 1
    assert int(exchange.reply(1)) == 0


def test_an_expert_that_there_is_not_is_an_error() -> None:
    exchange = exchange_of(1, 4, 1, torch.float32)
    host = native.HostExperts([Layer(2, 32, ("F32", "F32"), 1).compiled], exchange)
    exchange.chosen(0).fill_(2)
    exchange.request(0).fill_(7)
    with pytest.raises(EngineError, match="beyond the last"):
        host.serve(7, 1)
    assert int(exchange.reply(0)) == 0


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(2, 32, ("F32", "F32"), 1).compiled
    host = native.HostExperts([layer], exchange_of(1, 4, 1, torch.float32))
    for step, tokens in ((0, 1), (2**31, 1), (1, 0), (1, 5)):
        with pytest.raises(ValueError, match="there is room for 4"):
            host.serve(step, tokens)
    with pytest.raises(ValueError, match="2 layers"):
        native.HostExperts([layer], exchange_of(2, 4, 1, torch.float32))
    with pytest.raises(ValueError, match="257 tokens"):
        native.HostExperts([layer], exchange_of(1, 257, 1, torch.float32))
    layout = ExchangeLayout(1, 4, 1, HIDDEN, 4)
    with pytest.raises(ValueError, match="at a cache line"):
        native.HostExchange(layout, torch.empty(layout.nbytes - 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="bytes an element"):
        native.HostExchange(layout, torch.empty(layout.nbytes, dtype=torch.uint8), torch.bfloat16)


def test_plans_know_its_activations() -> None:
    assert set(HOST_ACTIVATIONS) == set(ACTIVATION_NUMBERS)
