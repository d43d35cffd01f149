"""A whole compiled layer against its own parts, which are held against float64 elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import pytest
import torch

from holdfast.execution import native

HEADS, KV_HEADS, DIM, INNER, BLOCK = 6, 2, 32, 224, 8
HIDDEN, KV_WIDTH = HEADS * DIM, KV_HEADS * DIM
WIDTH = HIDDEN + 2 * KV_WIDTH


def matrix(rows: int, columns: int, seed: int, *, bias: bool = False) -> native.BlockMatrix:
    random = numpy.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // 32, 20)).astype(numpy.uint8)
    halves = numpy.array([0.02, -0.15], numpy.float16) * random.uniform(0.5, 1.5, (rows, columns // 32, 1))
    blocks[..., :4] = halves.astype(numpy.float16).view(numpy.uint8)
    added = torch.from_numpy(random.standard_normal(rows).astype(numpy.float32)) if bias else None
    return native.BlockMatrix(torch.from_numpy(blocks.reshape(rows, -1)), "Q4_1", added)


@dataclass
class Step:
    """`counts` tokens of three sequences, and the buffers of a step, filled with NaN."""

    rows: native.AttentionRows
    places: torch.Tensor
    pages: torch.Tensor
    buffers: dict[str, torch.Tensor]


def make_step(counts: list[int], dtype: torch.dtype, mlp_tokens: int) -> Step:
    random = torch.Generator().manual_seed(sum(counts))
    ends, tokens = numpy.array([5, 20, 41], numpy.int32) + numpy.array(counts, numpy.int32), sum(counts)
    tables = (1 + numpy.arange(30, dtype=numpy.int32)).reshape(3, 10)
    firsts = (numpy.cumsum(counts) - counts).astype(numpy.int32)
    rows = native.AttentionRows(
        tables, ends, block_tokens=BLOCK, counts=numpy.array(counts, numpy.int32), firsts=firsts, window=33
    )
    positions = [
        (row, end - count + i) for row, (end, count) in enumerate(zip(ends, counts, strict=True)) for i in range(count)
    ]
    # A page has 2 places of 2 halves of BLOCK tokens.
    places = [int(tables[row, at // BLOCK]) * 4 * BLOCK + int(at) % BLOCK for row, at in positions]
    angles = torch.rand(tokens, 1, DIM // 2, generator=random) * 6
    empty = {"normed": HIDDEN, "qkv": WIDTH, "attended": HIDDEN}
    buffers = {name: torch.full((tokens + 1, width), float("nan")) for name, width in empty.items()}
    buffers["gate_up"] = torch.full((mlp_tokens, 2 * INNER), float("nan"))
    buffers["inner"] = torch.full((mlp_tokens, INNER), float("nan"))
    buffers |= {"cos": angles.cos(), "sin": angles.sin(), "stream": torch.randn(tokens, HIDDEN, generator=random)}
    pages = torch.randn(31, 2, 2, BLOCK, KV_HEADS, DIM, generator=random).to(dtype)
    return Step(rows, torch.tensor(places), pages, buffers)


def by_parts(
    step: Step,
    norms: tuple[torch.Tensor, torch.Tensor],
    qkv: list[native.BlockMatrix],
    o: native.BlockMatrix,
    gate_up: list[native.BlockMatrix],
    down: native.BlockMatrix,
    place: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    stream, pages = step.buffers["stream"].clone(), step.pages.clone()
    tokens = len(stream)
    normed, fused, attended = torch.empty(tokens, HIDDEN), torch.empty(tokens, WIDTH), torch.empty(tokens, HIDDEN)

    def write_all(parts: list[native.BlockMatrix], out: torch.Tensor) -> None:
        begin = 0
        for part in parts:
            part.write(normed, out[:, begin : begin + part.rows])
            begin += part.rows

    native.rms_norm(stream, norms[0], 1e-5, normed)
    write_all(qkv, fused)
    heads = fused.view(tokens, -1, DIM)
    query, key, value = heads[:, :HEADS], heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]
    lines = pages.view(-1, KV_WIDTH)
    native.rotate_and_store(
        query,
        key,
        value,
        step.buffers["cos"],
        step.buffers["sin"],
        step.places,
        lines[2 * place * BLOCK :],
        lines[(2 * place + 1) * BLOCK :],
    )
    pool = native.PoolPlace(pages, place)
    native.paged_attention(query, pool, step.rows, DIM**-0.5, attended.view(tokens, HEADS, DIM))
    o.add(attended, stream)
    tile = len(step.buffers["inner"])
    for first in range(0, tokens, tile):
        part = stream[first : first + tile]
        normed = torch.empty_like(part)
        both, inner = torch.empty(len(part), 2 * INNER), torch.empty(len(part), INNER)
        native.rms_norm(part, norms[1], 1e-5, normed)
        write_all(gate_up, both)
        native.activate_and_multiply(both, inner)
        down.add(inner, part)
    return stream, pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts", [[1, 1, 1], [7, 1, 30]])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_layer_is_its_parts_in_order(dtype: torch.dtype, counts: list[int], parts: int) -> None:
    step = make_step(counts, dtype, mlp_tokens=16)
    norms = torch.rand(HIDDEN) + 0.5, torch.rand(HIDDEN) + 0.5
    if parts == 1:
        qkv, gate_up = [matrix(WIDTH, HIDDEN, 1, bias=True)], [matrix(2 * INNER, HIDDEN, 2)]
    else:
        qkv = [matrix(HIDDEN, HIDDEN, 3), matrix(2 * KV_WIDTH, HIDDEN, 4, bias=True)]
        gate_up = [matrix(INNER, HIDDEN, 5), matrix(INNER, HIDDEN, 6)]
    o, down = matrix(HIDDEN, HIDDEN, 7), matrix(HIDDEN, INNER, 8)
    wanted, wanted_pages = by_parts(step, norms, qkv, o, gate_up, down, place=1)
    layer = native.DecoderLayer(
        attention_norm=norms[0],
        qkv=qkv,
        o=o,
        mlp_norm=norms[1],
        gate_up=gate_up,
        down=down,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim=DIM,
        epsilon=1e-5,
        scale=DIM**-0.5,
    )
    stack = native.DecoderStack([native.PlacedLayer(layer, native.PoolPlace(step.pages, 1))])
    stack.run(native.DecoderStep(**step.buffers), step.places, step.rows, 0, 1)
    assert torch.equal(step.buffers["stream"], wanted)
    assert torch.equal(step.pages, wanted_pages)
    assert bool(step.buffers["qkv"][-1].isnan().all())


def test_layers_in_one_call_are_the_layers_one_by_one() -> None:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "epsilon": 1e-5, "scale": DIM**-0.5}
    layers = [
        native.DecoderLayer(
            attention_norm=torch.rand(HIDDEN) + 0.5,
            qkv=[matrix(WIDTH, HIDDEN, seed)],
            o=matrix(HIDDEN, HIDDEN, seed + 1),
            mlp_norm=torch.rand(HIDDEN) + 0.5,
            gate_up=[matrix(2 * INNER, HIDDEN, seed + 2)],
            down=matrix(HIDDEN, INNER, seed + 3),
            **sizes,
        )
        for seed in (20, 30)
    ]
    scales, centers = [(2.0, 0.5), (1.0, 1.0)], [torch.rand(KV_WIDTH), None]
    steps = [make_step([1, 4, 1], torch.float16, mlp_tokens=16) for _ in range(2)]
    for step, calls in zip(steps, ([(0, 2)], [(0, 1), (1, 2)]), strict=True):
        placed = [
            native.PlacedLayer(layer, native.PoolPlace(step.pages, 1 - index), scales[index], centers[index])
            for index, layer in enumerate(layers)
        ]
        before = step.buffers["stream"].clone()
        for first, last in calls:
            native.DecoderStack(placed).run(native.DecoderStep(**step.buffers), step.places, step.rows, first, last)
        assert not torch.equal(step.buffers["stream"], before)
    assert torch.equal(steps[0].buffers["stream"], steps[1].buffers["stream"])
    assert torch.equal(steps[0].pages, steps[1].pages)


def test_misuse_is_refused() -> None:
    step = make_step([1, 1, 1], torch.float32, mlp_tokens=4)
    norm, o, down = torch.ones(HIDDEN), matrix(HIDDEN, HIDDEN, 7), matrix(HIDDEN, INNER, 8)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "epsilon": 1e-5, "scale": 1.0}
    parts = {"attention_norm": norm, "mlp_norm": norm, "o": o, "down": down}
    qkv, gate_up = [matrix(WIDTH, HIDDEN, 1)], [matrix(2 * INNER, HIDDEN, 2)]
    with pytest.raises(ValueError, match="outputs"):
        native.DecoderLayer(**parts, qkv=qkv, gate_up=qkv, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit one another"):
        native.DecoderLayer(**parts, qkv=[down], gate_up=gate_up, **sizes)  # type: ignore[arg-type]
    layer = native.DecoderLayer(**parts, qkv=qkv, gate_up=gate_up, **sizes)  # type: ignore[arg-type]
    stack = native.DecoderStack([native.PlacedLayer(layer, native.PoolPlace(step.pages, 0))])
    with pytest.raises(ValueError, match="places"):
        stack.run(native.DecoderStep(**step.buffers), step.places[:2], step.rows, 0, 1)
    with pytest.raises(ValueError, match="no layers 0 to 1"):
        stack.run(native.DecoderStep(**step.buffers), step.places, step.rows, 0, 2)
    with pytest.raises(ValueError, match="too short"):
        native.DecoderStep(**{**step.buffers, "qkv": torch.empty(2, WIDTH)})
    narrow = native.DecoderStep(**{**step.buffers, "qkv": torch.empty(3, WIDTH - 4)})
    with pytest.raises(ValueError, match="do not fit the layer"):
        stack.run(narrow, step.places, step.rows, 0, 1)
    other = native.DecoderLayer(**parts, qkv=qkv, gate_up=gate_up, **{**sizes, "epsilon": 1e-6})  # type: ignore[arg-type]
    pool = native.PoolPlace(step.pages, 0)
    with pytest.raises(ValueError, match="equal sizes"):
        native.DecoderStack([native.PlacedLayer(layer, pool), native.PlacedLayer(other, pool)])
