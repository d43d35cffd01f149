"""Experts against float64: who goes where, products of every expert with its tokens, and their sums."""

from __future__ import annotations

import itertools
import os
from typing import Literal

import gguf
import pytest
import torch

pytest.importorskip("triton")

from holdfast.execution.ops.reference import activate
from holdfast.execution.triton_kernels.experts import launch as kernels
from holdfast.execution.triton_kernels.experts.blocks import multiply_blocks
from holdfast.execution.triton_kernels.experts.direct import multiply_dense
from holdfast.execution.triton_kernels.experts.tiles import ExpertTile, expert_tile, most_tiles
from holdfast.execution.triton_kernels.quantized.blocks import BlockPlanes
from holdfast.execution.weights.gguf_block_types import KINDS
from holdfast.execution.weights.gguf_blocks import QUANTIZED_LAYOUTS, QuantizedMatrix

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN = float("nan")
# Triton's interpreter cuts bfloat16 off where the GPU rounds it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TILE = ExpertTile(16, 16, 32, 4, 2)
SHAPES = [(1, 5, 2, 40, 24), (23, 3, 2, 80, 40)]
"""(tokens, experts, chosen of them, hidden, inner)"""
if ON_GPU:
    SHAPES += [(1, 128, 8, 2048, 768), (200, 128, 8, 2048, 768), (700, 8, 2, 4096, 1024), (3000, 60, 4, 1024, 1408)]
CASES = [(shape, TILE if shape[4] < 100 else None) for shape in SHAPES]


def seeded(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator(DEVICE).manual_seed(seed)


class Case:
    """Tokens whose rows lie apart, experts, and lines with room to spare."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        self.tokens, self.experts, self.per_token, self.hidden, self.inner = shape
        self.source, self.dtype = seeded(shape, dtype), dtype
        self.x = self.normal(self.tokens, self.hidden + 16)[:, : self.hidden]
        self.gate_up = self.normal(self.experts, 2 * self.inner, self.hidden)
        self.gate_up.mul_(self.hidden**-0.5)
        self.down = self.normal(self.experts, self.hidden, self.inner)
        self.logits = self.normal(self.tokens, self.experts)
        self.lines = kernels.ExpertAssignments.allocate(self.tokens + 3, self.experts, self.per_token, DEVICE)
        self.lines.pairs.fill_(-(10**6))
        self.lines.weights.fill_(NAN)
        self.lines.counts.fill_(99)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.source, device=DEVICE).to(self.dtype)

    def chosen(self) -> torch.Tensor:
        """Experts [tokens, per_token] as they stand in the lines."""
        found = torch.full((self.tokens * self.per_token,), -1, device=DEVICE)
        for expert, count in enumerate(self.lines.counts.tolist()):
            pairs = self.lines.pairs[expert, :count].long()
            assert (found[pairs] == -1).all()
            found[pairs] = expert
        assert (found >= 0).all()
        return found.view(self.tokens, self.per_token)

    def check(self, found: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor, roundings: float) -> None:
        tolerance = roundings * UNIT[self.dtype] * (wanted.abs() + terms) + 2.0**-20 * terms
        error = (found.double() - wanted).abs()
        assert torch.isfinite(error).all()
        assert (error <= tolerance).all(), f"off by {(error / tolerance).max().item():.2f} of the tolerance"


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_stands_in_the_lines_of_its_likeliest(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, normalized: bool
) -> None:
    case = Case(shape, dtype)
    for _ in range(2):  # What the lines held before is forgotten.
        kernels.route(case.logits, case.lines, normalized=normalized)
    weights, chosen = case.logits.double().softmax(-1).topk(case.per_token, dim=-1)
    found = case.chosen()
    # Half precision has equals: they count as chosen when they are as likely.
    torch.testing.assert_close(case.logits.gather(1, found), case.logits.gather(1, chosen), atol=0, rtol=0)
    assert all(len(set(row)) == case.per_token for row in found.tolist())
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(case.lines.weights[: case.tokens].double(), weights, atol=1e-6, rtol=1e-5)
    assert torch.isnan(case.lines.weights[case.tokens :]).all()


def test_rows_of_no_meaning_disturb_nobody() -> None:
    """Padding may hold anything, infinities and NaN included."""
    case = Case((6, 5, 2, 40, 24), torch.float32)
    odd = torch.tensor([NAN, float("inf"), -float("inf")], device=DEVICE)
    case.logits[:3] = odd[:, None]
    kernels.route(case.logits, case.lines, normalized=True)
    found = case.chosen()
    assert all(len(set(row)) == 2 for row in found.tolist())
    wanted = case.logits[3:].topk(2, dim=-1).indices
    assert torch.equal(found[3:], wanted)


@pytest.mark.parametrize("here", [(1, 4), (3,)])
@pytest.mark.parametrize("tokens", [7, 40])
def test_experts_that_are_elsewhere_have_no_lines(tokens: int, here: tuple[int, ...]) -> None:
    """Weights are shares of all that were chosen; what the other ranks have weighs nothing, and is not read."""
    case = Case((tokens, 5, 2, 40, 24), torch.float32)
    kernels.route(case.logits, case.lines, normalized=True)
    weights, chosen = case.lines.weights[:tokens].clone(), case.chosen()
    own = kernels.ExpertAssignments.allocate(tokens + 3, 5, 2, DEVICE, here)
    own.counts.fill_(99)
    own.weights.fill_(NAN)
    for _ in range(2):
        kernels.route(case.logits, own, normalized=True)
    for line, expert in enumerate(here):
        pairs = own.pairs[line, : int(own.counts[line])].sort().values
        assert torch.equal(pairs.long(), (chosen.view(-1) == expert).nonzero().view(-1))
    kept = torch.isin(chosen, torch.tensor(here, device=DEVICE))
    assert torch.equal(own.weights[:tokens], weights * kept)
    rows = case.normal(tokens * 2, 40)
    rows[~kept.view(-1)] = NAN
    out = torch.zeros(tokens, 40, device=DEVICE)
    kernels.add_pairs(rows, own, out, add=False)
    wanted = (rows.nan_to_num().view(tokens, 2, 40) * own.weights[:tokens, :, None]).sum(1)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("tokens", [7, 40])
def test_rows_that_pad_a_step_choose_nothing(tokens: int) -> None:
    """Those without a slot, and those beyond the slots: they are in no lines, weights or choices."""
    case = Case((tokens, 5, 2, 40, 24), torch.float32)
    slots = torch.arange(tokens - 2, dtype=torch.int32, device=DEVICE)
    slots[1] = slots[4] = -1
    live = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    live[[1, 4, -2, -1]] = False
    chosen = torch.full((tokens, 2), 99, dtype=torch.int32, device=DEVICE)
    kernels.route(case.logits, case.lines, normalized=True, chosen=chosen, slots=slots)
    wanted = case.logits.topk(2, dim=-1).indices.int()
    assert torch.equal(chosen, torch.where(live[:, None], wanted, -1))
    assert torch.equal(case.lines.counts, wanted[live].view(-1).bincount(minlength=5).int())
    standing = [pair for expert in range(5) for pair in case.lines.pairs[expert, : case.lines.counts[expert]].tolist()]
    assert sorted(standing) == [2 * token + choice for token in live.nonzero().view(-1).tolist() for choice in (0, 1)]
    weights = case.lines.weights[:tokens]
    torch.testing.assert_close(weights.sum(1), live.float())
    rows = torch.full((2 * tokens, 24), NAN, device=DEVICE)
    rows.view(tokens, 2, 24)[live] = 3.0
    out = torch.ones((tokens, 24), device=DEVICE)
    kernels.add_pairs(rows, case.lines, out, add=True, padded=True)
    torch.testing.assert_close(out, (1 + 3 * live.float())[:, None].expand(-1, 24))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("shape", "tile"), CASES)
@pytest.mark.parametrize("activation", ["silu", *(["gelu_tanh"] if ON_GPU else [])])
def test_products_of_experts(
    shape: tuple[int, int, int, int, int], tile: ExpertTile | None, dtype: torch.dtype,
    activation: Literal["silu", "gelu", "gelu_tanh"],
) -> None:  # fmt: skip
    case = Case(shape, dtype)
    kernels.route(case.logits, case.lines, normalized=True)
    chosen, pairs = case.chosen().view(-1), case.tokens * case.per_token
    inner = torch.full((pairs + 2, case.inner + 8), NAN, dtype=dtype, device=DEVICE)
    multiply_dense(
        case.x, case.gate_up, case.lines, inner[:pairs, : case.inner], by_token=True, activation=activation, tile=tile
    )
    out = torch.full((pairs + 2, case.hidden + 8), NAN, dtype=dtype, device=DEVICE)
    multiply_dense(
        inner[:pairs, : case.inner], case.down, case.lines, out[:pairs, : case.hidden], by_token=False, tile=tile
    )
    tokens = torch.arange(pairs, device=DEVICE) // case.per_token
    for expert in range(case.experts):
        mine = (chosen == expert).nonzero().view(-1)
        x, weight = case.x[tokens[mine]].double(), case.gate_up[expert].double()
        (gated, up), (gate_terms, up_terms) = (x @ weight.T).chunk(2, -1), (x.abs() @ weight.abs().T).chunk(2, -1)
        # An error of either factor is felt through the other; activations are no steeper than 1.13.
        felt = 1.2 * ((gated.abs() + 1) * (up_terms + up.abs()) + (up.abs() + 1) * (gate_terms + gated.abs()))
        found = inner[mine, : case.inner]
        case.check(found, activate(gated, activation) * up, felt, 3)
        found, weight = found.double(), case.down[expert].double()
        case.check(out[mine, : case.hidden], found @ weight.T, found.abs() @ weight.abs().T, 2.2)
    for buffer, columns in ((inner, case.inner), (out, case.hidden)):
        assert torch.isnan(buffer[pairs:]).all()
        assert torch.isnan(buffer[:, columns:]).all()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_matrices_by_descriptor(activation: Literal["silu"] | None) -> None:
    """Outputs and columns that are no whole number of tiles."""
    case = Case((23, 3, 2, 80, 40), torch.float16)
    kernels.route(case.logits, case.lines, normalized=True)
    outputs = case.inner if activation else 2 * case.inner
    found = []
    for described in (False, True):
        out = torch.full((46, outputs), NAN, dtype=case.dtype, device=DEVICE)
        multiply_dense(
            case.x, case.gate_up, case.lines, out, by_token=True, activation=activation, tile=TILE, described=described
        )
        found.append(out)
    assert torch.equal(found[0], found[1])


def test_gates_that_are_there_already() -> None:
    case = Case((23, 3, 2, 80, 40), TYPES[-1])
    kernels.route(case.logits, case.lines, normalized=True)
    pairs, tile = 46, None if ON_GPU else TILE
    weight = case.gate_up[:, case.inner :].contiguous()
    up = torch.full((pairs, case.inner), NAN, dtype=case.dtype, device=DEVICE)
    multiply_dense(case.x, weight, case.lines, up, by_token=True, tile=tile)
    gates = case.normal(pairs, case.inner)
    found = gates.clone()
    multiply_dense(case.x, weight, case.lines, found, by_token=True, activation="silu", gates="out", tile=tile)
    wanted = activate(gates.double(), "silu") * up.double()
    case.check(found, wanted, wanted.abs() + 1e-3, 4)


@pytest.mark.parametrize("layout", sorted(QUANTIZED_LAYOUTS))
def test_products_of_experts_in_blocks(layout: str) -> None:
    """Of every kind, by tokens and by pairs; as near as the same numbers expanded."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    case = Case((200, 16, 4, 512, 256) if ON_GPU else (5, 3, 2, 256, 24), dtype)
    case.down = case.normal(case.experts, 24, 256)
    kernels.route(case.logits, case.lines, normalized=True)
    kind = gguf.GGMLQuantizationType[layout]
    rows = case.experts * 24
    # The package quantizes only some kinds; any bytes are blocks, as long as their scales are numbers.
    stored = torch.randint(0, 256, (rows, 256 // KINDS[layout].elements, KINDS[layout].nbytes), dtype=torch.uint8)
    for at in {KINDS[layout].scale_at, KINDS[layout].minimum_at or KINDS[layout].scale_at}:
        stored[..., at : at + 2] = torch.full((*stored.shape[:2], 1), 0.03, dtype=torch.float16).view(torch.uint8)
    matrix = QuantizedMatrix(layout, rows, 256, DEVICE)
    matrix.fill_rows(0, stored.to(DEVICE).view(-1))
    exact = torch.from_numpy(gguf.quants.dequantize(stored.view(rows, -1).numpy(), kind)).to(DEVICE)
    exact = exact.to(dtype).double().view(case.experts, 24, 256)
    planes = BlockPlanes(layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small)
    pairs, chosen = case.tokens * case.per_token, case.chosen().view(-1)
    for by_token in (True, False):
        x = case.normal(case.tokens if by_token else pairs, 264)[:, :256]
        out = torch.full((pairs + 1, 28), NAN, dtype=dtype, device=DEVICE)
        tile = None if ON_GPU else ExpertTile(16, 16, 4, 4, 2)
        multiply_blocks(x, planes, case.lines, out[:pairs, :24], by_token=by_token, tile=tile)
        mine = x.double().repeat_interleave(case.per_token, 0) if by_token else x.double()
        weight = exact[chosen]
        wanted = torch.einsum("pi,poi->po", mine, weight)
        case.check(out[:pairs, :24], wanted, torch.einsum("pi,poi->po", mine.abs(), weight.abs()), 2.2)
        assert torch.isnan(out[pairs:]).all()
        assert torch.isnan(out[:, 24:]).all()
        if by_token:  # The same matrix as gates above ups, and as ups to gates that are there already.
            rounded = out[:pairs, :24].clone()
            gated = torch.full((pairs, 12), NAN, dtype=dtype, device=DEVICE)
            multiply_blocks(x, planes, case.lines, gated, by_token=True, activation="silu", tile=tile)
            exactly = activate(rounded[:, :12].double(), "silu") * rounded[:, 12:].double()
            case.check(gated, exactly, exactly.abs() + 1e-3, 4)
            there = case.normal(pairs, 24)
            found = there.clone()
            multiply_blocks(x, planes, case.lines, found, by_token=True, activation="silu", gates="out", tile=tile)
            exactly = activate(there.double(), "silu") * rounded.double()
            case.check(found, exactly, exactly.abs() + 1e-3, 4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_sums_of_a_tokens_experts(dtype: torch.dtype, add: bool) -> None:
    case = Case((7, 5, 3, 40, 24), dtype)
    kernels.route(case.logits, case.lines, normalized=False)
    rows = case.normal(21, 48)[:, :40]
    before = case.normal(7, 40) if add else torch.zeros(7, 40, dtype=dtype, device=DEVICE)
    out = torch.full((7, 48), NAN, dtype=dtype, device=DEVICE)
    if add:
        out[:, :40] = before
    kernels.add_pairs(rows, case.lines, out[:, :40], add=add)
    weights = case.lines.weights[:7].double()
    wanted = torch.einsum("tk,tkh->th", weights, rows.double().view(7, 3, 40)) + before.double()
    case.check(out[:, :40], wanted, wanted.abs() + 1, 2.2)
    assert torch.isnan(out[:, 40:]).all()


def test_no_tokens_at_all() -> None:
    case = Case((1, 5, 2, 40, 24), torch.float32)
    empty = torch.empty(0, 40, device=DEVICE)
    kernels.route(case.logits[:0], case.lines, normalized=True)
    assert not case.lines.counts.any()
    multiply_dense(empty, case.gate_up, case.lines, torch.empty(0, 24, device=DEVICE), by_token=True, activation="silu")
    multiply_dense(torch.empty(0, 24, device=DEVICE), case.down, case.lines, empty, by_token=False)
    kernels.add_pairs(empty, case.lines, empty, add=True)


def test_no_lines_have_more_tiles_than_the_grid() -> None:
    """Worst are many lines of one pair more than whole tiles."""
    for tokens, experts, per_token, rows in itertools.product((1, 2, 17, 100), (2, 5, 64), (1, 2, 8), (16, 64)):
        pairs, lengths = tokens * per_token, [0] * experts
        while per_token <= experts and sum(lengths) < pairs:
            shortest = lengths.index(min(lengths))
            room = min(pairs - sum(lengths), tokens - lengths[shortest])
            lengths[shortest] += min(room, rows if lengths[shortest] else 1)
        tiles = sum(-(-length // rows) for length in lengths)
        assert tiles <= most_tiles(tokens, per_token, experts, rows) <= pairs


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit_where_there_is_little_shared_memory(element_bytes: int, gated: bool) -> None:
    for pairs in (1, 8, 1000, 10**5):
        tile = expert_tile(pairs, 8, element_bytes, 99 * 1024, gated=gated)
        columns = tile.rows + (2 if gated else 1) * tile.outputs
        assert tile.stages * columns * tile.inputs * element_bytes <= 99 * 1024


def test_captured_once_and_replayed() -> None:
    if not ON_GPU:
        pytest.skip("needs a CUDA graph")
    case = Case((16, 64, 8, 512, 256), torch.bfloat16)
    pairs = case.tokens * case.per_token
    inner = torch.empty(pairs, case.inner, dtype=case.dtype, device=DEVICE)
    rows = torch.empty(pairs, case.hidden, dtype=case.dtype, device=DEVICE)
    out = torch.empty(case.tokens, case.hidden, dtype=case.dtype, device=DEVICE)

    def work() -> None:
        kernels.route(case.logits, case.lines, normalized=True)
        multiply_dense(case.x, case.gate_up, case.lines, inner, by_token=True, activation="silu")
        multiply_dense(inner, case.down, case.lines, rows, by_token=False)
        kernels.add_pairs(rows, case.lines, out, add=False)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        case.logits.copy_(case.normal(case.tokens, case.experts))
        case.x.copy_(case.normal(case.tokens, case.hidden))
        graph.replay()
        found = out.clone()
        work()
        assert torch.equal(found, out)
