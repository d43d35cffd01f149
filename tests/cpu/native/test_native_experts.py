"""A layer's compiled experts against float64: routing, every way of storing matrices, odd numbers of tokens."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch

from holdfast.execution import native

HIDDEN, INNER = 64, 96


def matrices(
    count: int, rows: int, columns: int, layout: str, seed: int
) -> tuple[list[native.BlockMatrix], numpy.ndarray]:
    """One an expert, and the very numbers they hold."""
    numbers = 0.3 * numpy.random.default_rng(seed).standard_normal((count, rows, columns)).astype(numpy.float32)
    kind = gguf.GGMLQuantizationType[layout]
    stored = gguf.quants.quantize(numbers, kind).view(numpy.uint8).reshape(count, rows, -1)
    exact = gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind)
    return [native.BlockMatrix(torch.from_numpy(one.copy()), layout) for one in stored], exact.astype(numpy.float64)


def expected(
    x: torch.Tensor, logits: torch.Tensor, gate_up: numpy.ndarray, down: numpy.ndarray, chosen: int, normalized: bool
) -> torch.Tensor:
    weights, experts = logits.double().softmax(-1).topk(chosen, dim=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (shares, own) in enumerate(zip(weights, experts.tolist(), strict=True)):
        for share, expert in zip(shares, own, strict=True):
            gate, up = (torch.from_numpy(gate_up[expert]) @ x[token].double()).chunk(2)
            out[token] += share * (torch.from_numpy(down[expert]) @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("layout", ["F32", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 5, 2), (7, 8, 8), (90, 3, 2)])
def test_experts_are_those_of_float64(layout: str, normalized: bool, tokens: int, experts: int, chosen: int) -> None:
    gate_up, gate_up_numbers = matrices(experts, 2 * INNER, HIDDEN, layout, 1)
    down, down_numbers = matrices(experts, HIDDEN, INNER, layout, 2)
    layer = native.ExpertLayer(
        gate_up=[[one] for one in gate_up], down=down, per_token=chosen, normalized=normalized, activation="silu"
    )
    buffers = native.NativeExpertBuffers.allocate(tokens + 2, chosen, experts, HIDDEN, INNER)
    for buffer in (buffers.lines, buffers.gate_up, buffers.inner, buffers.weights):
        buffer.fill_(float("nan"))
    generator = torch.Generator().manual_seed(tokens)
    x, logits = torch.randn(tokens, HIDDEN, generator=generator), torch.randn(tokens, experts, generator=generator)
    stream = torch.randn(tokens, HIDDEN + 8, generator=generator)
    wanted = stream.clone()
    wanted[:, :HIDDEN] += expected(x, logits, gate_up_numbers, down_numbers, chosen, normalized)
    layer.add(x, logits, stream[:, :HIDDEN], buffers)
    # Activations are quantized, as finely as the layout's products do it.
    tolerance = 1e-5 if layout in ("F32", "BF16") else 2e-3
    torch.testing.assert_close(stream, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["Q4_K", "Q5_K", "Q6_K"])
def test_experts_in_denser_blocks(layout: str) -> None:
    """Any bytes are blocks, as long as their scales are numbers."""
    kind, rng = gguf.GGMLQuantizationType[layout], numpy.random.default_rng(4)
    halves = (-2,) if layout == "Q6_K" else (0, 2)

    def random_matrices(rows: int) -> tuple[list[native.BlockMatrix], numpy.ndarray]:
        stored = rng.integers(0, 256, (3, rows, gguf.GGML_QUANT_SIZES[kind][1]), dtype=numpy.uint8)
        for at in halves:
            place = slice(at, at + 2 or None)
            stored[..., place] = numpy.frombuffer(numpy.float16(2e-4).tobytes(), dtype=numpy.uint8)
        kept = [native.BlockMatrix(torch.from_numpy(one.copy()), layout) for one in stored]
        return kept, gguf.quants.dequantize(stored, kind).astype(numpy.float64)

    gate_up, gate_up_numbers = random_matrices(512)
    down, down_numbers = random_matrices(256)
    layer = native.ExpertLayer(
        gate_up=[[one] for one in gate_up], down=down, per_token=2, normalized=True, activation="silu"
    )
    x, logits, out = torch.randn(11, 256), torch.randn(11, 3), torch.zeros(11, 256)
    layer.add(x, logits, out, native.NativeExpertBuffers.allocate(11, 2, 3, 256, 256))
    wanted = expected(x, logits, gate_up_numbers, down_numbers, 2, True)
    assert float((out - wanted).norm() / wanted.norm()) < 0.02


def test_gate_and_up_in_different_ways() -> None:
    gate, gate_numbers = matrices(4, INNER, HIDDEN, "Q8_0", 1)
    up, up_numbers = matrices(4, INNER, HIDDEN, "F16", 3)
    down, down_numbers = matrices(4, HIDDEN, INNER, "F32", 2)
    layer = native.ExpertLayer(
        gate_up=list(zip(gate, up, strict=True)), down=down, per_token=2, normalized=True, activation="silu"
    )
    x, logits, out = torch.randn(9, HIDDEN), torch.randn(9, 4), torch.zeros(9, HIDDEN)
    layer.add(x, logits, out, native.NativeExpertBuffers.allocate(9, 2, 4, HIDDEN, INNER))
    wanted = expected(x, logits, numpy.concatenate((gate_numbers, up_numbers), axis=1), down_numbers, 2, True)
    torch.testing.assert_close(out, wanted.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", ["F32", "Q8_0"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_that_are_elsewhere_add_nothing_here(layout: str, tokens: int) -> None:
    """Two layers with some of the experts each add what one with all of them does; one may have nothing to do."""
    gate_up, gate_up_numbers = matrices(5, 2 * INNER, HIDDEN, layout, 1)
    down, down_numbers = matrices(5, HIDDEN, INNER, layout, 2)
    generator = torch.Generator().manual_seed(tokens)
    x, logits = torch.randn(tokens, HIDDEN, generator=generator), torch.randn(tokens, 5, generator=generator)
    logits[0, :] = torch.tensor([0.0, 5.0, 1.0, 4.0, 0.5])  # Experts 1 and 3 alone.
    out = torch.zeros(tokens, HIDDEN)
    for numbers in ([1, 3], [0, 2, 4]):
        layer = native.ExpertLayer(
            gate_up=[[gate_up[number]] for number in numbers],
            down=[down[number] for number in numbers],
            per_token=2,
            normalized=True,
            activation="silu",
            experts=5,
            numbers=numbers,
        )
        buffers = native.NativeExpertBuffers.allocate(tokens, 2, 5, HIDDEN, INNER, layer.most_here)
        for buffer in (buffers.lines, buffers.gate_up, buffers.inner):
            buffer.fill_(float("nan"))
        layer.add(x, logits, out, buffers)
    wanted = expected(x, logits, gate_up_numbers, down_numbers, 2, True)
    tolerance = 1e-5 if layout == "F32" else 2e-3
    torch.testing.assert_close(out, wanted.float(), atol=tolerance, rtol=tolerance)


def test_a_token_that_chooses_nothing_disturbs_nobody() -> None:
    """Logits that are no numbers still find experts that there are."""
    down, _ = matrices(4, HIDDEN, INNER, "F32", 2)
    gate_up, _ = matrices(4, 2 * INNER, HIDDEN, "F32", 1)
    layer = native.ExpertLayer(
        gate_up=[[one] for one in gate_up], down=down, per_token=2, normalized=True, activation="silu"
    )
    x, logits = torch.randn(3, HIDDEN), torch.randn(3, 4)
    alone, together = torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN)
    buffers = native.NativeExpertBuffers.allocate(3, 2, 4, HIDDEN, INNER)
    layer.add(x[:2], logits[:2], alone, buffers)
    logits[2] = float("nan")
    layer.add(x, logits, together, buffers)
    assert torch.equal(alone, together[:2])
    assert together[2].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    down, _ = matrices(2, HIDDEN, INNER, "F32", 2)
    gate_up, _ = matrices(2, 2 * INNER, HIDDEN, "F32", 1)
    pairs = [[one] for one in gate_up]
    with pytest.raises(ValueError, match="3 experts a token"):
        native.ExpertLayer(gate_up=pairs, down=down, per_token=3, normalized=True, activation="silu")
    with pytest.raises(ValueError, match="gate and up"):
        native.ExpertLayer(gate_up=[[one] for one in down], down=down, per_token=1, normalized=True, activation="silu")
    layer = native.ExpertLayer(gate_up=pairs, down=down, per_token=2, normalized=True, activation="silu")
    x, logits = torch.zeros(3, HIDDEN), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="4 pairs and 4 lines, not 6 and 6"):
        layer.add(x, logits, x.clone(), native.NativeExpertBuffers.allocate(2, 2, 2, HIDDEN, INNER))
    with pytest.raises(ValueError, match="logits"):
        layer.add(x, logits[:2], x.clone(), native.NativeExpertBuffers.allocate(3, 2, 2, HIDDEN, INNER))
