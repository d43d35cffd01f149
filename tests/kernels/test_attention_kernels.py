"""Paged attention in Triton against float64, over shuffled pages among garbage."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from holdfast.execution.triton_kernels import layer as kernels
from holdfast.execution.triton_kernels import tiles
from holdfast.execution.triton_kernels.attention.decode import decode_attention
from holdfast.execution.triton_kernels.attention.expand_pages import expand_pages
from holdfast.execution.triton_kernels.attention.own_token import OwnTokens
from holdfast.execution.triton_kernels.attention.prefill import prefill_attention
from holdfast.footprint import gpu

ON_GPU = torch.cuda.is_available()
# Of the norm of the whole output; the weights are rounded to the values' type before they meet them.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SMALL = tiles.Tile(16, 16, 4, 2)
"""Small tiles give short rows an inside, a diagonal and a window's edge, and keep the interpreter quick."""


@dataclass
class Case:
    """Rows (start, count) of one batch; each has the pages it can see, everything else is NaN."""

    device: torch.device
    rows: list[tuple[int, int]]
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    block_tokens: int = 16
    places: int = 3
    place: int = 1
    stored: torch.dtype | None = None
    """Of pages, where it is not the queries'; keys and values then have scales."""
    seed: int = field(
        default_factory=lambda: int(os.environ.get("KERNEL_SEED", random.SystemRandom().randrange(1 << 30)))
    )

    def __post_init__(self) -> None:
        print(f"seed {self.seed}")
        self.generator = torch.Generator().manual_seed(self.seed)
        self.scale = 1.7 / self.width**0.5
        blocks = -(-max(start + count for start, count in self.rows) // self.block_tokens)
        slots = torch.randperm(len(self.rows) + 2, generator=self.generator)[: len(self.rows)]
        free = (torch.randperm((len(self.rows) * blocks) + 3, generator=self.generator) + 1).tolist()
        kept = self.stored or self.dtype
        self.scales = (1.0, 1.0) if self.stored is None else (0.037, 2.6)
        self.keys = [self._random(start + count, self.kv_heads).to(kept) for start, count in self.rows]
        self.values = [self._random(start + count, self.kv_heads).to(kept) for start, count in self.rows]
        pages = torch.full(
            (len(free) + 1, self.places, 2, self.block_tokens, self.kv_heads, self.width), torch.nan, dtype=kept
        )
        # Entries nobody may follow point at page 0, which is NaN here.
        tables = torch.zeros((len(self.rows) + 2, blocks), dtype=torch.int32)
        for row, (start, count) in enumerate(self.rows):
            first_seen = max(0, start - self.window + 1) if self.window else 0
            for position in range(first_seen, start + count):
                block, token = divmod(position, self.block_tokens)
                if tables[slots[row], block] == 0:
                    tables[slots[row], block] = free.pop()
                page = int(tables[slots[row], block])
                pages[page, self.place, 0, token] = self.keys[row][position]
                pages[page, self.place, 1, token] = self.values[row][position]
        self.pages, self.tables = pages.to(self.device), tables.to(self.device)
        self.slots = slots.to(self.device, torch.int32)
        self.tokens = sum(count for _, count in self.rows)
        # A view of a fused product, as the decoder has it.
        fused = self._random(self.tokens, self.heads + 2 * self.kv_heads).to(self.device)
        self.query = fused[:, : self.heads]
        shape = (self.tokens, self.heads, self.width + 16)
        self.out = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn((tokens, heads, self.width), generator=self.generator).to(self.dtype)

    def ints(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(numpy.asarray(numbers), dtype=torch.int32, device=self.device)

    def expected(self) -> torch.Tensor:
        outputs, first = [], 0
        for (start, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            query = self.query[first : first + count].cpu().double()
            first += count
            ratio = self.heads // self.kv_heads
            key_scale, value_scale = self.scales
            keys = key_scale * keys.double().repeat_interleave(ratio, dim=1)
            values = value_scale * values.double().repeat_interleave(ratio, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            behind = start + torch.arange(count)[:, None] - torch.arange(start + count)[None, :]
            seen = (behind >= 0) & ((behind < self.window) if self.window else torch.tensor(True))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)

    def check(self) -> None:
        found, expected = self.out[..., : self.width].cpu().double(), self.expected()
        assert (found - expected).norm() / expected.norm() < TOLERANCE[self.dtype]
        assert bool(self.out[..., self.width :].isnan().all()), "written beside the output"

    def prefill(self, tile: tiles.Tile | None = SMALL) -> None:
        starts, counts = numpy.array(self.rows).T
        chosen = tile or tiles.prefill_tile(self.heads // self.kv_heads, self.width, self.query.element_size())
        tile_rows, tile_starts = tiles.prefill_tiles(counts, starts, chosen.rows // (self.heads // self.kv_heads))
        firsts = numpy.cumsum(counts) - counts
        prefill_attention(
            self.query, self.pages, self.tables, self.ints(tile_rows), self.ints(tile_starts), self.slots,
            self.ints(starts), self.ints(counts), self.ints(firsts), place=self.place, scale=self.scale,
            window=self.window, softcap=self.softcap, out=self.out[..., : self.width], key_scale=self.scales[0],
            value_scale=self.scales[1], tile=tile,
        )  # fmt: skip

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of float8 as queries are, one row's after the other's among garbage, and where each row's begin."""
        starts, counts = numpy.array(self.rows).T
        pages = -(-(starts + counts) // self.block_tokens)
        firsts = self.ints(numpy.cumsum(pages) - pages)
        shape = (int(pages.sum()) + 1, 1, *self.pages.shape[2:])
        out = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        expand_pages(
            self.pages, self.tables, self.slots, self.ints(starts), self.ints(counts), firsts, int(pages.max()),
            place=self.place, window=self.window, out=out,
        )  # fmt: skip
        return out, firsts

    def prefill_hopper(self) -> None:
        from holdfast.execution.triton_kernels.attention.prefill_hopper import page_descriptor, prefill_attention_hopper

        starts, counts = numpy.array(self.rows).T
        tile_rows, tile_starts = tiles.prefill_tiles(counts, starts, tiles.HOPPER_ROWS // (self.heads // self.kv_heads))
        firsts = numpy.cumsum(counts) - counts
        (pages, page_firsts), place = (self.pages, None) if self.stored is None else self.expanded(), self.place
        prefill_attention_hopper(
            self.query, pages, self.tables, self.ints(tile_rows), self.ints(tile_starts), self.slots,
            self.ints(starts), self.ints(counts), self.ints(firsts), descriptor=page_descriptor(pages),
            place=place if self.stored is None else 0, scale=self.scale * self.scales[0], window=self.window,
            out=self.out[..., : self.width], value_scale=self.scales[1], page_firsts=page_firsts,
        )  # fmt: skip

    def decode(self, tile: tiles.Tile | None = SMALL, splits: int | None = None) -> None:
        """Rows must be of one token."""
        size = gpu.decode_workspace_bytes(len(self.rows), self.heads, self.kv_heads, self.width) // 4
        workspace = torch.full((size,), float("nan"), device=self.device)
        decode_attention(
            self.query, self.pages, self.tables, self.slots, self.ints([start + 1 for start, _ in self.rows]),
            place=self.place, scale=self.scale, window=self.window, softcap=self.softcap,
            out=self.out[..., : self.width], workspace=workspace, key_scale=self.scales[0],
            value_scale=self.scales[1], tile=tile, splits=splits,
        )  # fmt: skip


RAGGED = [(0, 37), (21, 1), (5, 18), (0, 1), (70, 3), (16, 16)]
SINGLE = [(0, 1), (15, 1), (16, 1), (130, 1), (47, 1)]
SHAPES = [(4, 4, 64), (6, 2, 64), (8, 2, 80), (5, 1, 96), (16, 2, 128), (16, 1, 64), (4, 1, 256)]
KINDS = [(8, 2, 80, torch.float16), *((*shape, torch.bfloat16 if ON_GPU else torch.float32) for shape in SHAPES)]
KINDS += [(6, 2, width, torch.float32) for width in (64, 128, 256)] if ON_GPU else []


@pytest.mark.parametrize(("heads", "kv_heads", "width", "dtype"), KINDS, ids=str)
def test_prefill_over_shapes(device: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    rows = [(start * 9, count * 9) for start, count in RAGGED] if ON_GPU else [(0, 20), (21, 1), (5, 18)]
    case = Case(device, rows, heads, kv_heads, width, dtype)
    case.prefill(tile=None if ON_GPU else SMALL)
    case.check()


@pytest.mark.parametrize(("heads", "kv_heads", "width", "dtype"), KINDS, ids=str)
def test_decode_over_shapes(device: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    rows = [(start * 17, 1) for start, _ in SINGLE] if ON_GPU else SINGLE
    case = Case(device, rows, heads, kv_heads, width, dtype)
    case.decode(None, None) if ON_GPU else case.decode(SMALL, 3)
    case.check()


@pytest.mark.parametrize(("window", "softcap"), [(0, 2.5), (1, 0.0), (5, 2.5), (16, 0.0), (33, 2.5), (64, 0), (999, 0)])
def test_prefill_in_windows(device: torch.device, window: int, softcap: float) -> None:
    case = Case(device, RAGGED, 6, 2, 64, window=window, softcap=softcap)
    case.prefill()
    case.check()


@pytest.mark.parametrize(("window", "softcap"), [(0, 2.5), (1, 0.0), (5, 2.5), (16, 0.0), (33, 2.5), (64, 0), (999, 0)])
def test_decode_in_windows(device: torch.device, window: int, softcap: float) -> None:
    case = Case(device, SINGLE, 6, 2, 64, window=window, softcap=softcap)
    case.decode(splits=3)
    case.check()


FLOAT8 = [
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.float32),
    (torch.float8_e4m3fn, torch.float16),
]
if ON_GPU:
    FLOAT8 += [(stored, torch.bfloat16) for stored in (torch.float8_e4m3fn, torch.float8_e5m2)]


@pytest.mark.parametrize(("stored", "dtype"), FLOAT8, ids=str)
@pytest.mark.parametrize(("window", "softcap", "width"), [(0, 0.0, 64), (20, 2.5, 80)])
def test_pages_of_float8(
    device: torch.device, stored: torch.dtype, dtype: torch.dtype, window: int, softcap: float, width: int
) -> None:
    """Keys and values are scaled codes; a key that is NaN in a page nobody sees stays unseen."""
    rows = RAGGED if ON_GPU else [(0, 20), (21, 1), (30, 18)]
    case = Case(device, rows, 6, 2, width, dtype, window=window, softcap=softcap, stored=stored)
    case.prefill(tile=None if ON_GPU else SMALL)
    case.check()
    case = Case(device, SINGLE, 6, 2, width, dtype, window=window, softcap=softcap, stored=stored)
    case.decode(None, None) if ON_GPU else case.decode(SMALL, 3)
    case.check()


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_key_that_is_no_number_is_not_hidden_by_float8(device: torch.device, stored: torch.dtype) -> None:
    """So that the row is found to be broken."""
    case = Case(device, [(5, 1), (9, 1)], 4, 2, 64, stored=stored)
    case.pages[int(case.tables[int(case.slots[0]), 0]), case.place, 0, 3, :, 5] = torch.nan
    case.decode(splits=1)
    assert case.out[0, ..., :64].isnan().all()
    assert not case.out[1, ..., :64].isnan().any()


@pytest.mark.parametrize("block_tokens", [4, 8, 32])
def test_pages_of_other_sizes(device: torch.device, block_tokens: int) -> None:
    case = Case(device, RAGGED, 4, 2, 64, window=20, block_tokens=block_tokens, places=1, place=0)
    case.prefill()
    case.check()
    case = Case(device, SINGLE, 4, 2, 64, window=20, block_tokens=block_tokens, places=5, place=4)
    case.decode(splits=4)
    case.check()


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_the_tiles_of_the_table(device: torch.device, kernel: str) -> None:
    """The sizes that are really used, here where the others are taken for speed."""
    case = Case(device, [(300, 1), (3, 1)], 8, 2, 128, torch.float16, window=200)
    getattr(case, kernel)(tile=None)
    case.check()


@pytest.mark.parametrize("width", [128, 256])
def test_tiles_for_little_shared_memory(device: torch.device, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tiles.prefill_tile_tokens(8, 2, width, 2)
    monkeypatch.setattr(tiles, "shared_memory_bytes", lambda: 99 * 1024)
    assert tiles.prefill_tile(4, width, 2).keys < 128
    assert tiles.prefill_tile_tokens(8, 2, width, 2) <= large
    case = Case(device, [(100, 40), (3, 1)], 8, 2, width, torch.float16)
    case.prefill(tile=None)
    case.check()


@pytest.mark.parametrize("splits", [1, 2, 7, 20])
def test_any_number_of_splits_gives_the_same(device: torch.device, splits: int) -> None:
    case = Case(device, SINGLE, 4, 2, 64)
    case.decode(splits=splits)
    case.check()


@pytest.mark.parametrize(
    ("stored", "dtype", "width", "turned", "norm", "window"),
    [
        (None, torch.float32, 64, 64, False, 0),
        (None, torch.float32, 80, 32, True, 20),
        (None, torch.float32, 64, 0, False, 0),
        (torch.float8_e4m3fn, torch.float16, 64, 64, False, 0),
        (torch.float8_e5m2, torch.float16, 64, 32, True, 20),
    ],
    ids=str,
)
def test_own_tokens_are_turned_and_kept_on_the_way(
    device: torch.device,
    stored: torch.dtype | None,
    dtype: torch.dtype,
    width: int,
    turned: int,
    norm: bool,
    window: int,
) -> None:
    """As `rotate_and_store` does before."""
    lengths = [1, 16, 17, 50, 33, 0]
    rows = [(max(length, 1) - 1, 1) for length in lengths]
    case = Case(device, rows, heads=4, kv_heads=2, width=width, dtype=dtype, window=window, stored=stored)
    fused = case._random(len(rows), 8).to(device).view(len(rows), -1)
    angles = torch.randn(len(rows), turned, generator=case.generator).to(device)
    norms = [torch.rand(width, generator=case.generator).to(dtype).to(device) if norm else None for _ in range(2)]
    center = None if stored is None else torch.randn(2 * width, generator=case.generator).to(device)
    own = OwnTokens(angles, norms[0], norms[1], 1e-5, center)
    counts = case.ints(lengths)
    found = []
    for apart in (False, True):
        pages, qkv = case.pages.clone(), fused.clone()
        for row, (last, _) in enumerate(rows):
            page = int(case.tables[case.slots[row], last // 16])
            pages[page, case.place, :, last % 16] = torch.nan  # What is not written is seen.
        if apart:
            kernels.rotate_and_store(
                qkv, angles, counts - 1, case.slots, pages, case.tables, place=case.place, query_norm=norms[0],
                key_norm=norms[1], epsilon=1e-5, key_scale=case.scales[0], value_scale=case.scales[1], center=center,
            )  # fmt: skip
        out = torch.full((len(rows), 4, width), torch.nan, dtype=dtype, device=device)
        decode_attention(
            qkv.view(len(rows), 8, width)[:, :4], pages, case.tables, case.slots, counts, place=case.place,
            scale=case.scale, window=window, softcap=0.0, out=out, key_scale=case.scales[0], value_scale=case.scales[1],
            workspace=torch.full((1 << 20,), torch.nan, device=device), own=None if apart else own, tile=SMALL,
            splits=3,
        )  # fmt: skip
        found.append((out[:-1].double(), pages[:, case.place].float().nan_to_num()))
    (out, pages), (wanted, wanted_pages) = found
    # A number just between two may be kept as either where products and sums are joined otherwise.
    close = 4 * TOLERANCE[dtype] if stored is None else 0.01
    assert (out - wanted).norm() <= close * wanted.norm()
    assert (pages - wanted_pages).norm() <= (1e-6 if stored is None else 0.01) * wanted_pages.norm()


def test_padded_rows_are_left_alone(device: torch.device) -> None:
    """Length 0, and a slot that is not there."""
    case = Case(device, SINGLE, 4, 2, 64)
    lengths = case.ints([start + 1 for start, _ in SINGLE])
    padded = [1, 3]
    lengths[padded], case.slots[padded] = 0, -1
    size = gpu.decode_workspace_bytes(len(SINGLE), 4, 2, 64) // 4
    workspace = torch.full((size,), float("nan"), device=device)
    decode_attention(
        case.query, case.pages, case.tables, case.slots, lengths, place=case.place, scale=case.scale, window=0,
        softcap=0.0, out=case.out[..., :64], workspace=workspace, tile=SMALL, splits=3,
    )  # fmt: skip
    assert bool(case.out[padded].isnan().all())
    case.out[padded, :, :64] = case.expected()[padded].to(case.out)
    case.check()


def test_prefill_writes_only_rows_that_have_tiles(device: torch.device) -> None:
    case = Case(device, [(0, 4), (9, 20)], 4, 2, 64)
    arguments = [case.ints(x) for x in ([1, 1, 1], [16, 8, 0])]
    prefill_attention(
        case.query, case.pages, case.tables, *arguments, case.slots, case.ints([0, 9]), case.ints([4, 20]),
        case.ints([0, 4]), place=case.place, scale=case.scale, window=0, softcap=0.0, out=case.out[..., :64],
        tile=SMALL,
    )  # fmt: skip
    assert bool(case.out[:4].isnan().all())
    case.out[:4, :, :64] = case.expected()[:4].to(case.out)
    case.check()


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_decode_in_a_graph_follows_lengths(device: torch.device) -> None:
    case = Case(device, SINGLE, 8, 2, 128, torch.bfloat16)
    lengths = case.ints([1] * len(SINGLE))
    size = gpu.decode_workspace_bytes(len(SINGLE), 8, 2, 128) // 4
    workspace = torch.empty(size, device=device)

    def step() -> None:
        decode_attention(
            case.query, case.pages, case.tables, case.slots, lengths, place=case.place, scale=case.scale, window=0,
            softcap=0.0, out=case.out[..., :128], workspace=workspace,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.out.fill_(float("nan"))
    lengths.copy_(case.ints([start + 1 for start, _ in SINGLE]))
    graph.replay()
    case.check()


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 1000])
def test_long_contexts(device: torch.device, window: int) -> None:
    case = Case(device, [(9000, 1), (4095, 1), (1, 1)], 32, 8, 128, torch.bfloat16, window=window)
    case.decode(tile=None)
    case.check()
    case = Case(device, [(2000, 700), (0, 1030)], 32, 8, 128, torch.bfloat16, window=window)
    case.prefill(tile=None)
    case.check()


def test_tiles_cover_every_token_once_heaviest_first() -> None:
    counts, starts = numpy.array([5, 0, 1, 12]), numpy.array([0, 3, 100, 7])
    rows, firsts = tiles.prefill_tiles(counts, starts, 4)
    covered = sorted((int(row), first + i) for row, first in zip(rows, firsts, strict=True) for i in range(4))
    assert [pair for pair in covered if pair[1] < counts[pair[0]]] == [
        (row, token) for row, count in enumerate(counts) for token in range(count)
    ]
    seen = [starts[row] + min(first + 4, counts[row]) for row, first in zip(rows, firsts, strict=True)]
    assert seen == sorted(seen, reverse=True)
    assert rows.dtype == firsts.dtype == numpy.int32
    assert len(tiles.prefill_tiles(numpy.array([0]), numpy.array([5]), 4)[0]) == 0


def test_the_workspace_is_enough_for_every_number_of_rows() -> None:
    for heads, kv_heads, width in ((32, 8, 128), (9, 3, 64), (16, 1, 256)):
        largest = gpu.decode_workspace_bytes(300, heads, kv_heads, width)
        for rows in range(1, 301):
            assert rows * heads * gpu.decode_splits(rows, kv_heads) * (width + 1) * 4 <= largest
    assert gpu.decode_splits(1, 8) > 16
    assert gpu.decode_splits(4096, 8) == 1


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("window", [0, 30])
def test_pages_of_float8_expanded(device: torch.device, stored: torch.dtype, window: int) -> None:
    case = Case(device, [(0, 20), (70, 1), (0, 1), (40, 9)], 6, 3, 80, torch.bfloat16, window=window, stored=stored)
    found, firsts = case.expanded()
    wanted = torch.full_like(found, torch.nan)
    for (start, count), slot, first in zip(case.rows, case.slots.tolist(), firsts.tolist(), strict=True):
        for block in range(max(0, start - window + 1) // 16 if window else 0, -(-(start + count) // 16)):
            page = case.pages.view(torch.uint8)[case.tables[slot, block], case.place]
            wanted[first + block, 0] = page.cpu().view(stored).to(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
LARGE = [(start * 9, count * 9) for start, count in RAGGED]


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype"),
    [
        (4, 4, 128, torch.bfloat16),
        (16, 8, 128, torch.bfloat16),
        (32, 8, 128, torch.bfloat16),
        (32, 4, 128, torch.float16),
        (9, 3, 64, torch.bfloat16),
        (16, 1, 64, torch.float16),
    ],
    ids=str,
)
def test_prefill_for_hopper(device: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    case = Case(device, LARGE, heads, kv_heads, width, dtype)
    case.prefill_hopper()
    case.check()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("window", [1, 16, 100, 128, 300, 9999])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_prefill_for_hopper_in_windows(device: torch.device, window: int, block_tokens: int) -> None:
    rows = [*LARGE, (1500, 700), (0, 1030), (127, 129)]
    case = Case(device, rows, 8, 2, 128, torch.bfloat16, window=window, block_tokens=block_tokens)
    case.prefill_hopper()
    case.check()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_prefill_for_hopper_over_float8(device: torch.device, stored: torch.dtype, window: int) -> None:
    case = Case(device, LARGE, 16, 4, 128, torch.bfloat16, window=window, stored=stored)
    case.prefill_hopper()
    case.check()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_prefill_for_hopper_takes_more_tiles_than_there_are_programs(device: torch.device) -> None:
    """Each program goes through several tiles, of few keys and of many."""
    rows = [(0, 1200), (3000, 64), (0, 2), (1, 1), (900, 777), (128, 128), (0, 128), (0, 127), (0, 129)]
    case = Case(device, rows, 32, 8, 128, torch.bfloat16)
    case.prefill_hopper()
    case.check()
