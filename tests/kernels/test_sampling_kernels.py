"""Sampling on the device against the CPU's sampler: the same tokens for every option, cut and neighbour."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from holdfast.execution.sampling.sampler import Sampler, uniforms
from holdfast.execution.triton_kernels.sampling import adjust, kernels, launch
from holdfast.execution.triton_kernels.sampling.slots import FLAGS, LANE, TEMPERATURE, SlotParams
from holdfast.footprint import sampling as sampling_sizes
from holdfast.records import SamplingParams, SequenceStart, StructuredOutputsParams

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 50_021 if ON_GPU else 2_501
PROMPT = 3
PLACES = 40
NEAR = 2e-6
"""How far a comparison of sums may be off where another order of rounding turns it over."""
TIE = 2.5e-7
"""Chances that are nearer to each other than this may be the same in float32."""

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"temperature": 0.01, "top_p": 0.9},
    {"temperature": 1.8, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 7},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-20, "top_k": 7},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 900, "top_p": 0.6, "min_p": 0.001, "temperature": 1.3},
    {"top_p": 0.7, "min_p": 0.2},
]


def fresh(*parts: object) -> torch.Generator:
    """Fresh numbers a run; the id that is printed brings them back."""
    seed = int(os.environ.get("KERNEL_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KERNEL_SEED={seed} for {parts}")
    return torch.Generator().manual_seed(seed)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8).fill_(0x7F)
    return tensor


@dataclass
class Bench:
    """Both samplers with the same sequences; slots are not the rows, and one is spare."""

    options: list[dict[str, Any]]
    vocab: int
    lanes: int = 0
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.options)
        self.slot_of = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
        self.known = torch.zeros((count + 1, PLACES), dtype=torch.int32, device=DEVICE)
        self.params = SlotParams(count + 1, self.vocab, DEVICE, self.lanes)
        self.buffers = SimpleNamespace(tokens=numpy.zeros((count + 1, PLACES), dtype=numpy.int32))
        self.sampler = Sampler(self.buffers, self.vocab)  # type: ignore[arg-type]
        self.words: list[list[list[int]]] = [option.get("spelled", []) for option in self.options]
        self.all = [
            SamplingParams(seed=index * 977 - 5, **{name: value for name, value in option.items() if name != "spelled"})
            for index, option in enumerate(self.options)
        ]
        for slot, params, words in zip(self.slot_of, self.all, self.words, strict=True):
            assert self.params.write(slot, params, PROMPT, self.banned, words)
            self.sampler.start(SequenceStart(slot, "", [1] * PROMPT, PROMPT, params, self.banned, words))
        self.params.upload()
        self.workspace = launch.Workspace.allocate(count, self.vocab, DEVICE)

    def sample(self, logits: torch.Tensor, lengths: list[int], **more: Any) -> list[int]:
        for name in self.workspace.__slots__:
            poison(getattr(self.workspace, name))
        out = poison(torch.empty(len(lengths), dtype=torch.int32, device=DEVICE))
        slots = torch.tensor(self.slot_of[: len(lengths)], dtype=torch.int32, device=DEVICE)
        at = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        before = logits.clone()
        launch.sample_rows(logits, slots, at, self.params, self.known, out, self.workspace, **more)
        torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
        told = out >= 0
        assert torch.equal(self.known[slots.long(), at.long()][told], out[told])
        return [int(token) for token in out.tolist()]

    def expected(self, logits: torch.Tensor, lengths: list[int]) -> list[int]:
        slots = numpy.array(self.slot_of[: len(lengths)], dtype=numpy.int64)
        tokens, _ = self.sampler.sample(logits.float().cpu().clone(), slots, numpy.array(lengths, dtype=numpy.int64))
        return [int(token) for token in tokens]

    def check(self, logits: torch.Tensor, lengths: list[int], **more: Any) -> list[int]:
        found, wanted = self.sample(logits, lengths, **more), self.expected(logits, lengths)
        splits = -(-self.vocab // launch.split_tokens(len(lengths), self.vocab))
        for row, (token, other) in enumerate(zip(found, wanted, strict=True)):
            params = self.all[row]
            if params.greedy:
                assert token == other
                continue
            tokens, kept = nearly(logits[row].double().cpu(), params, lengths[row] - PROMPT)
            assert token == other or {token, other} <= tokens, f"row {row} {params}: {token}, not {other}"
            filtered = 0 < params.top_k < self.vocab or params.top_p < 1
            parts = self.workspace.kept if filtered else self.workspace.masses
            mass = int(parts[row * splits : (row + 1) * splits].sum()) * 2.0**-40
            # Scores are rounded before they are weighed, as on the CPU: the larger, the coarser.
            coarse = 2.0**-22 * float(logits[row][logits[row].isfinite()].abs().max()) / params.temperature
            off = min(abs(mass / other_mass - 1) for other_mass in kept)
            assert off < 1e-5 + coarse, f"row {row} {params}: keeps {mass}, not {kept}"
        return found


def nearly(logits: torch.Tensor, params: SamplingParams, position: int) -> tuple[set[int], list[float]]:
    """In float64, plainly by sorting, with shares and the number off by a rounding: tokens drawn, and weights kept.

    A weight is counted in that of the likeliest token.
    """
    number = float(uniforms(numpy.array([params.seed]), numpy.array([position]))[0])
    tokens, kept = set[int](), list[float]()
    chances = (logits / params.temperature).softmax(-1)
    ordered = chances.sort(descending=True).values
    for share_off, floor_off, tie_off in itertools.product((-NEAR, 0.0, NEAR), (-NEAR, 0.0, NEAR), (0.0, TIE)):
        floor = ordered[0] * params.min_p * (1 + floor_off)
        if params.top_k:
            floor = torch.maximum(floor, ordered[min(params.top_k, len(ordered)) - 1] * (1 - tie_off))
        floor = torch.minimum(floor, ordered[0])
        masses = ordered.where(ordered >= floor, 0).cumsum(-1)
        if params.top_p < 1:
            last = int((masses < params.top_p * masses[-1] * (1 + share_off)).sum())
            floor = torch.maximum(floor, ordered[min(last, len(ordered) - 1)] * (1 - tie_off))
        cumulated = chances.where(chances >= floor, 0).cumsum(-1)
        kept.append(float(cumulated[-1] / ordered[0]))
        for number_off in (-NEAR, 0.0, NEAR):
            target = (number + number_off) * cumulated[-1]
            tokens.add(int((cumulated <= target).sum().clamp(max=len(chances) - 1)))
    return tokens, kept


@triton.jit
def _numbers(seeds, positions, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, COUNT)
    tl.store(out + index, kernels.uniform(tl.load(seeds + index), tl.load(positions + index)))


def test_the_numbers_are_the_hosts_bit_for_bit() -> None:
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 0x61C8864680B583EB]
    seeds = torch.randint(-(2**63), 2**63 - 1, (256,), generator=fresh("numbers"))
    seeds[: len(edges)] = torch.tensor(edges)
    positions = torch.arange(256, dtype=torch.int32) ** 4 % (2**31 - 1)
    out = torch.full((256,), float("nan"), dtype=torch.float64, device=DEVICE)
    _numbers[(1,)](seeds.to(DEVICE), positions.to(torch.int32).to(DEVICE), out, COUNT=256)
    assert out.cpu().numpy().tobytes() == uniforms(seeds.numpy(), positions.long().numpy()).tobytes()


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [
        (torch.float32, 0.2),
        (torch.float32, 4.0),
        (torch.bfloat16, 0.2),
        (torch.float16, 4.0),
        pytest.param(torch.bfloat16, 4.0, marks=pytest.mark.long),
        pytest.param(torch.float16, 0.2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_option_samples_what_the_cpu_samples(dtype: torch.dtype, spread: float) -> None:
    source = fresh(dtype, spread)
    bench = Bench(OPTIONS, VOCAB)
    for step in range(8 if ON_GPU else 1):
        wide = poison(torch.empty((len(OPTIONS), VOCAB + 11), dtype=dtype, device=DEVICE))
        logits = wide[:, :VOCAB]
        logits.copy_(torch.randn(logits.shape, generator=source) * spread)
        bench.check(logits, [PROMPT + step + row for row in range(len(OPTIONS))])


def adversaries(vocab: int, source: torch.Generator) -> dict[str, torch.Tensor]:
    ties = torch.randint(-3, 3, (vocab,), generator=source).float()
    sparse = torch.full((vocab,), float("-inf"))
    sparse[torch.randint(0, vocab, (9,), generator=source)] = torch.randn(9, generator=source)
    one = torch.full((vocab,), -1e4)
    one[vocab - 1] = 1e4
    few = torch.randn(vocab, generator=source) - 40.0
    few[torch.tensor([0, 1023, 1024, vocab - 1])] = torch.tensor([5.0, 5.0, 4.0, 4.5])
    return {"ties": ties, "equal": torch.full((vocab,), 7.25), "sparse": sparse, "one": one, "few": few}


@pytest.mark.parametrize("name", ["ties", "equal", "sparse", "one", "few"])
def test_adversaries(name: str) -> None:
    options = [option for option in OPTIONS if option != {"top_k": VOCAB - 1}]
    options = options if ON_GPU else options[::2]
    logits = adversaries(VOCAB, fresh(name))[name].to(DEVICE).expand(len(options), VOCAB)
    Bench(options, VOCAB).check(logits.contiguous(), [PROMPT + row for row in range(len(options))])


def test_more_tokens_in_doubt_than_are_listed() -> None:
    vocab = sampling_sizes.LISTED + 1_111
    logits = (torch.rand((1, vocab), generator=fresh("flat")) * 0.06).to(DEVICE)
    Bench([{"top_k": 15_000, "top_p": 0.83}], vocab).check(logits, [PROMPT])


def test_the_cut_and_the_neighbours_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{"top_p": 0.9}, {"temperature": 0.9}, {"top_k": 30, "top_p": 0.7}, {"temperature": 0.0}]
    logits = (torch.randn((4, VOCAB), generator=fresh("cut")) * 2).to(DEVICE)
    lengths, bench = [PROMPT, PROMPT + 4, PROMPT + 5, PROMPT], Bench(options, VOCAB)
    found = bench.check(logits, lengths)
    monkeypatch.setattr(launch, "split_tokens", lambda rows, vocabulary: 4096)
    assert bench.sample(logits, lengths) == found
    assert bench.sample(logits[:1], lengths[:1]) == found[:1]


def test_padding_writes_nothing() -> None:
    bench = Bench([{"top_p": 0.5}], 300)
    spare = len(bench.known) - 1
    logits = poison(torch.empty((4, 300), device=DEVICE))
    logits[0] = torch.randn(300, generator=fresh("padding")).to(DEVICE)
    workspace = launch.Workspace.allocate(4, 300, DEVICE)
    known = torch.full((2, PLACES), -9, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([bench.slot_of[0], -1, spare, bench.slot_of[0]], dtype=torch.int32, device=DEVICE)
    out = torch.full((4,), -9, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([PROMPT, 1, 0, PLACES], dtype=torch.int32, device=DEVICE)
    launch.sample_rows(logits, slots, lengths, bench.params, known, out, workspace)
    token = bench.expected(logits[:1], [PROMPT])[0]
    # The last row has no finite logit and no place left: its token is some id, and goes nowhere.
    assert out.tolist()[:3] == [token, 0, 0]
    assert 0 <= int(out[3]) < 300
    wanted = torch.full((2, PLACES), -9, dtype=torch.int32)
    wanted[bench.slot_of[0], PROMPT] = token
    assert torch.equal(known.cpu(), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    vocab = 5_003
    logits = torch.zeros((4, vocab), dtype=dtype, device=DEVICE)
    logits[0, [4_999, 2_047, 2_048]] = 3.0
    logits[1] = float("-inf")
    logits[2, vocab - 1] = 1.0
    bench = Bench([{"temperature": 0.0}] * 4, vocab)
    assert bench.sample(logits, [PROMPT] * 4) == bench.expected(logits, [PROMPT] * 4) == [2_047, 0, 5_002, 0]


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}])
def test_what_is_no_number_gives_no_token_and_nobody_else_one_less(asked: dict[str, float]) -> None:
    """Neither a row of nothing else, nor one with one such logit, nor an infinite one."""
    vocab = 5_003
    logits = torch.randn((4, vocab), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    bench = Bench([asked] * 4, vocab)
    whole = bench.sample(logits, [PROMPT] * 4)
    logits[1], logits[2, 4_000], logits[3, 17] = float("nan"), float("nan"), float("inf")
    assert bench.sample(logits, [PROMPT] * 4) == [whole[0], -1, -1, -1]
    assert bench.expected(logits, [PROMPT] * 4) == [whole[0], -1, -1, -1]


def test_an_upload_brings_what_was_written_before_it() -> None:
    params = SlotParams(6, 100, DEVICE, 1)
    seen, wanted = [], []
    for step in range(20):
        slot = step % 6
        assert params.write(slot, SamplingParams(temperature=1 + step, seed=-step), 4)
        params.upload()
        seen.append(params.table.clone())
        wanted.append(params.host.copy())
    for found, host in zip(seen, wanted, strict=True):
        assert numpy.array_equal(found.cpu().numpy(), host)
    assert params.host.view(numpy.float32)[1, TEMPERATURE] == 20.0
    params.release(1)
    params.upload()
    assert int(params.table[1, FLAGS]) == 0


def test_masks_go_to_their_own_lanes_and_touch_no_other() -> None:
    params = SlotParams(9, 100, DEVICE, 9)
    forms = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for slot in range(9):
        assert params.write(slot, forms, 4)
    lanes = params.host[:, LANE].tolist()
    params.masks.fill_(77)
    wanted = params.masks.clone()
    for chosen in ((7,), (8, 0, 3, 4, 2)):
        words = {slot: numpy.full(params.masks.shape[1], -slot, dtype=numpy.int32) for slot in chosen}
        for slot in chosen:
            wanted[lanes[slot]] = -slot
        params.mask(words)
        assert torch.equal(params.masks, wanted)


def test_more_lanes_than_copies_under_way() -> None:
    """Each lane has its own biases after one upload, though staging is written over many times."""
    lanes = 40
    params = SlotParams(lanes, 5_000, DEVICE, lanes)
    for slot in range(lanes):
        biases = {slot + index: float(slot) for index in range(1_000 - slot)}
        assert params.write(slot, SamplingParams(logit_bias=biases), 4)
    params.upload()
    for slot in range(lanes):
        pairs = params.entries[int(params.host[slot, LANE]), : 1_000 - slot].cpu()
        assert pairs[:, 0].tolist() == list(range(slot, 1_000))
        assert set(pairs[:, 1].contiguous().view(torch.float32).tolist()) == {float(slot)}


def test_lanes_run_out_and_come_back() -> None:
    params = SlotParams(3, 100, DEVICE, 1)
    assert params.write(0, SamplingParams(frequency_penalty=0.5), 4)
    assert not params.write(1, SamplingParams(logit_bias={3: 1.0}), 4)
    assert int(params.host[1, FLAGS]) == 0
    assert params.write(1, SamplingParams(), 4)
    assert params.write(0, SamplingParams(presence_penalty=0.5), 4)
    params.release(0)
    assert params.write(2, SamplingParams(logit_bias={3: 1.0}), 4)


def test_the_sizes_are_what_is_allocated() -> None:
    for rows, vocab in ((3, 1_000), (2, 151_936)):
        workspace = launch.Workspace.allocate(rows, vocab, DEVICE)
        assert workspace.nbytes == sampling_sizes.workspace_bytes(rows, vocab)
        params = SlotParams(rows, vocab, DEVICE, 2)
        assert params.nbytes == sampling_sizes.parameter_bytes(rows, 2, vocab)
    for rows in (1, 8, 64, 256, 1024):
        splits = -(-128_256 // sampling_sizes.split_tokens(rows, 128_256))
        assert splits <= sampling_sizes.most_splits(128_256)


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"presence_penalty": 1.1, "frequency_penalty": 0.7, "temperature": 0.0},
    {"presence_penalty": -2.0, "frequency_penalty": -0.3, "repetition_penalty": 0.6, "temperature": 1.0},
    {"temperature": 0.0},
    {"logit_bias": {7: 100.0, 11: -100.0, 10**6: 5.0}, "temperature": 0.0},
    {"min_tokens": 4, "temperature": 0.0},
    {"min_tokens": 4, "logit_bias": {3: 50.0, 20: 9.0}, "frequency_penalty": 2.0, "temperature": 0.0},
    {"logit_bias": {token: (token % 7) - 3.0 for token in range(1_024)}, "top_p": 0.9, "repetition_penalty": 2.0},
    {"top_k": 5},
    {"allowed_token_ids": [0, 3, 11, 31, 32, 63, 64, 1_500, 1_536], "temperature": 0.0},
    {"allowed_token_ids": list(range(5, 1_400, 3)), "logit_bias": {8: 3.0, 9: 50.0}, "repetition_penalty": 1.2},
    {"spelled": [[3], *([token, token * 5 % 24] for token in range(24))], "temperature": 0.0},
    {"spelled": [[4] * 15, [4] * 14 + [5], [4] * 13 + [3, 6], [4], [9, 4, 7]] * 51, "temperature": 0.0},
    {"spelled": [[3, 4], [4, 3, 7], [8]], "allowed_token_ids": list(range(20)), "frequency_penalty": 0.5},
]
LANES = 12
BANNED = (3, 0, 299)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(kind, marks=pytest.mark.long) for kind in TYPES if kind != torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("vocab", [1_537, VOCAB] if ON_GPU else [1_537])
def test_bans_biases_and_penalties(dtype: torch.dtype, vocab: int) -> None:
    source, count = fresh(dtype, vocab), len(ADJUSTED)
    bench = Bench(ADJUSTED, vocab, lanes=LANES, banned=BANNED)
    lanes = adjust.Lanes.allocate(LANES, vocab, DEVICE)
    assert lanes.nbytes == sampling_sizes.lane_bytes(LANES, vocab)
    # Few different tokens, so that they come again, and the favourites are among them.
    tokens = torch.randint(0, 24, (count + 1, PLACES), generator=source, dtype=torch.int32)
    tokens[bench.slot_of[12]] = 4  # The longest bad words come true here, where the answer is long enough.
    slots = torch.tensor(bench.slot_of, dtype=torch.int32, device=DEVICE)
    for lengths in (
        [PROMPT + row + row // 10 * 4 for row in range(count)],
        [PROMPT + 3 + 4 * (row % 2) for row in range(count)],
    ):
        poison(lanes.adjusted)
        poison(lanes.counts)
        bench.known.copy_(tokens)
        bench.buffers.tokens[:] = tokens.numpy()
        logits = torch.randn((count, vocab), generator=source)
        logits[:, :24] += 3.0
        logits[:, 3] += 4.0
        logits = logits.to(dtype).to(DEVICE)
        at = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        adjusted = adjust.adjust_rows(logits, slots, at, bench.params, bench.known, lanes)
        wanted = logits.float().cpu().clone()
        rows = [bench.sampler._slots[slot] for slot in bench.slot_of]
        lengths_before = numpy.array(lengths, dtype=numpy.int64)
        bench.sampler._adjust(wanted, rows, numpy.array(bench.slot_of), lengths_before, lengths_before - PROMPT)
        for row, slot in enumerate(bench.slot_of):
            lane = int(bench.params.host[slot, LANE])
            if lane >= 0:
                assert torch.equal(adjusted[lane].cpu(), wanted[row]), ADJUSTED[row]
        found = bench.sample(logits, lengths, adjusted=adjusted)
        assert found == bench.expected(logits, lengths)


def test_adjusting_leaves_padding_alone() -> None:
    bench = Bench([{"frequency_penalty": 1.0}], 100, lanes=2)
    lanes = adjust.Lanes.allocate(2, 100, DEVICE)
    poison(lanes.adjusted)
    poison(lanes.counts)
    before = lanes.adjusted.clone()
    slots = torch.tensor([-1, len(bench.known) - 1], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5, 0], dtype=torch.int32, device=DEVICE)
    logits = torch.zeros((2, 100), device=DEVICE)
    adjust.adjust_rows(logits, slots, lengths, bench.params, bench.known, lanes)
    assert torch.equal(lanes.adjusted.view(torch.int32), before.view(torch.int32))


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph needs a GPU")
def test_a_graph_follows_what_changes_between_replays() -> None:
    options = [*OPTIONS, *ADJUSTED]
    bench, rows, source = Bench(options, VOCAB, lanes=LANES, banned=BANNED), len(options), fresh("graph")
    lanes = adjust.Lanes.allocate(LANES, VOCAB, DEVICE)
    logits = torch.zeros((rows, VOCAB), dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor(bench.slot_of, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((rows,), PROMPT, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(rows, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        adjusted = adjust.adjust_rows(logits, slots, lengths, bench.params, bench.known, lanes)
        launch.sample_rows(logits, slots, lengths, bench.params, bench.known, out, bench.workspace, adjusted=adjusted)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(4):
        # The options move on by a row each turn, lanes included: everything is released before it is written.
        for slot in bench.slot_of:
            bench.params.release(slot)
        for row, slot in enumerate(bench.slot_of):
            params, words = bench.all[(row + turn) % rows], bench.words[(row + turn) % rows]
            assert bench.params.write(slot, params, PROMPT, BANNED, words)
            bench.sampler.start(SequenceStart(slot, "", [1] * PROMPT, PROMPT, params, BANNED, words))
        bench.params.upload()
        logits.copy_(torch.randn((rows, VOCAB), generator=source) * 3)
        at = [PROMPT + turn + row for row in range(rows)]
        lengths.copy_(torch.tensor(at, dtype=torch.int32))
        bench.buffers.tokens[:] = bench.known.cpu().numpy()
        graph.replay()
        found, wanted = out.tolist(), bench.expected(logits, at)
        differing = [row for row in range(rows) if found[row] != wanted[row]]
        for row in differing:
            params = bench.all[(row + turn) % rows]
            tokens, _ = nearly(logits[row].double().cpu(), params, at[row] - PROMPT)
            assert {found[row], wanted[row]} <= tokens, f"turn {turn} row {row} {params}"
