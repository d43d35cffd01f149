"""Compiled paged attention against float64, with NaN in every page and position that must not be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import numpy.typing
import pytest
import torch

from holdfast.execution import native

GUARD = 1234.5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass
class Case:
    """A pool where only what the rows may see holds numbers, and the float64 keys and values of every row."""

    pages: torch.Tensor
    tables: numpy.typing.NDArray[numpy.int32]
    slots: numpy.typing.NDArray[numpy.int32]
    keys: list[numpy.typing.NDArray[numpy.float64]]
    values: list[numpy.typing.NDArray[numpy.float64]]


def make_case(
    ends: list[int], counts: list[int], *, kv_heads: int, dim: int, block: int, window: int | None, dtype: torch.dtype
) -> Case:
    random = numpy.random.default_rng(sum(ends) + dim)
    width = max(-(-end // block) for end in ends) + 1
    total = 2 + sum(-(-end // block) for end in ends)
    pages = torch.full((total, 3, 2, block, kv_heads, dim), float("nan"), dtype=dtype)
    order = random.permutation(numpy.arange(1, total))
    slots = random.permutation(len(ends) + 2)[: len(ends)].astype(numpy.int32)
    # Entries nobody may follow point at a page of NaN.
    tables = numpy.full((len(ends) + 2, width), order[-1], dtype=numpy.int32)
    keys, values, used = [], [], 0
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        blocks = -(-end // block)
        tables[slots[row], :blocks] = order[used : used + blocks]
        used += blocks
        both = torch.from_numpy(random.standard_normal((2, end, kv_heads, dim)) * 2).to(dtype)
        earliest = 0 if window is None else max(0, end - count - window + 1)
        seen = numpy.arange(earliest, end)
        owned = torch.from_numpy(tables[slots[row]][seen // block]).long()
        # As whole numbers of the same bytes: not all short floats can be put by index.
        bits = (pages.view(BITS[dtype.itemsize]), both[:, earliest:].transpose(0, 1).view(BITS[dtype.itemsize]))
        bits[0][owned, 1, :, torch.from_numpy(seen % block)] = bits[1]
        keys.append(both[0].double().numpy())
        values.append(both[1].double().numpy())
    return Case(pages, tables, slots, keys, values)


def exact(
    query: torch.Tensor,
    keys: numpy.typing.NDArray[numpy.float64],
    values: numpy.typing.NDArray[numpy.float64],
    start: int,
    window: int | None,
    scale: float,
) -> numpy.typing.NDArray[numpy.float64]:
    wanted = numpy.empty(query.shape)
    group = query.shape[1] // keys.shape[1]
    behind = start + numpy.arange(len(query))[:, None] - numpy.arange(len(keys))  # Of a token, how far a key is.
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    for head in range(query.shape[1]):
        scores = query[:, head].double().numpy() @ keys[:, head // group].T * scale
        scores[hidden] = -numpy.inf
        weights = numpy.exp(scores - scores.max(1, keepdims=True))
        wanted[:, head] = weights @ values[:, head // group] / weights.sum(1, keepdims=True)
    return wanted


def check(
    ends: list[int],
    counts: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    block: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    case = make_case(ends, counts, kv_heads=kv_heads, dim=dim, block=block, window=window, dtype=dtype)
    tokens = sum(counts)
    firsts = (numpy.cumsum(counts) - counts).astype(numpy.int32)
    query = torch.randn(tokens, heads + 3, dim, generator=torch.Generator().manual_seed(tokens))[:, 1:-2]
    whole = torch.full((tokens + 2, heads + 2, dim), GUARD)
    out = whole[1:-1, 1:-1]
    out.fill_(float("nan"))
    rows = native.AttentionRows(
        case.tables,
        numpy.array(ends, dtype=numpy.int32),
        block_tokens=block,
        counts=numpy.array(counts, dtype=numpy.int32),
        firsts=firsts,
        slots=case.slots,
        window=window,
    )
    native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, dim**-0.5, out)
    for row, (end, count, first) in enumerate(zip(ends, counts, firsts, strict=True)):
        part = slice(int(first), int(first) + count)
        wanted = exact(query[part], case.keys[row], case.values[row], end - count, window, dim**-0.5)
        # Scores reach 20 and values 8: a score off by a few units in its last place moves the output this much.
        assert not bool(out[part].isnan().any())
        assert numpy.abs(out[part].numpy() - wanted).max() < 1e-5
    out.fill_(GUARD)
    assert bool((whole == GUARD).all())


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 4, 128), (9, 3, 20), (14, 2, 80), (5, 1, 4)])
def test_single_tokens(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    check(
        [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700],
        [1] * 12,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_is_read(dtype: torch.dtype) -> None:
    """A row that sees one key gives back its value."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    pages = torch.zeros((2, 1, 2, 1, 1, 256), dtype=dtype)
    pages[1, 0, 1, 0, 0] = codes
    rows = native.AttentionRows(numpy.ones((1, 1), numpy.int32), numpy.ones(1, numpy.int32), block_tokens=1)
    out = torch.full((1, 1, 256), 7.0)
    native.paged_attention(torch.ones(1, 1, 256), native.PoolPlace(pages, 0), rows, 1.0, out)
    finite = codes.float().isfinite()
    assert torch.equal(out[0, 0][finite], codes.float()[finite])
    assert not bool(out[0, 0][~finite].isfinite().any())


@pytest.mark.parametrize("window", [1, 5, 16, 100, 300])
def test_single_tokens_under_a_window(window: int) -> None:
    check([1, 4, 5, 6, 99, 100, 101, 350, 600], [1] * 9, window=window, block=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOAT8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 4, 128), (8, 1, 36)])
def test_rows_of_many_tokens(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    check([40, 3, 130, 90, 190], [40, 2, 1, 37, 190], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)


@pytest.mark.parametrize("window", [1, 7, 64, 90])
@pytest.mark.parametrize("block", [1, 8, 16, 32])
def test_rows_of_many_tokens_under_a_window(window: int, block: int) -> None:
    check([200, 65, 150], [170, 1, 40], window=window, block=block)


def test_a_row_does_not_depend_on_its_company_or_the_threads() -> None:
    ends, counts = [520, 700, 33], [1, 1, 20]
    case = make_case(ends, counts, kv_heads=2, dim=64, block=16, window=None, dtype=torch.float32)
    query = torch.randn(22, 6, 64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            native.use_own_threads(threads)
            results.append(torch.empty(22, 6, 64))
            rows = native.AttentionRows(
                case.tables,
                numpy.array(ends, numpy.int32),
                block_tokens=16,
                counts=numpy.array(counts, numpy.int32),
                firsts=numpy.array([0, 1, 2], numpy.int32),
                slots=case.slots,
            )
            native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, 0.125, results[-1])
    finally:
        native.share_torch_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    alone = torch.empty(1, 6, 64)
    row = native.AttentionRows(case.tables, numpy.array([700], numpy.int32), block_tokens=16, slots=case.slots[1:2])
    native.paged_attention(query[1:2], native.PoolPlace(case.pages, 1), row, 0.125, alone)
    assert torch.equal(alone, results[0][1:2])


def test_heads_taken_apart_for_many_threads_give_the_same() -> None:
    case = make_case([50], [1], kv_heads=5, dim=64, block=16, window=None, dtype=torch.float32)
    rows = native.AttentionRows(case.tables, numpy.array([50], numpy.int32), block_tokens=16, slots=case.slots)
    query, before, results = torch.randn(1, 10, 64), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            native.use_own_threads(threads)
            results.append(torch.empty(1, 10, 64))
            native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, 0.125, results[-1])
    finally:
        native.share_torch_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_a_prompt_cut_into_chunks_gives_the_same(window: int | None, dtype: torch.dtype) -> None:
    """Queries that stand together in a piece change with chunks and with threads."""
    case = make_case([330], [330], kv_heads=2, dim=64, block=16, window=None, dtype=dtype)
    query, whole, chunked = torch.randn(330, 6, 64), torch.empty(330, 6, 64), torch.empty(330, 6, 64)

    def attend(first: int, last: int, out: torch.Tensor) -> None:
        rows = native.AttentionRows(
            case.tables,
            numpy.array([last], numpy.int32),
            block_tokens=16,
            slots=case.slots,
            counts=numpy.array([last - first], numpy.int32),
            firsts=numpy.array([first], numpy.int32),
            window=window,
        )
        native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, 0.125, out)

    before = torch.get_num_threads()
    try:
        native.use_own_threads(1)
        attend(0, 330, whole)
        native.use_own_threads(3)
        for first, last in ((0, 37), (37, 39), (39, 100), (100, 330)):
            attend(first, last, chunked)
    finally:
        native.share_torch_threads(before)
    assert torch.equal(whole, chunked)


def test_rows_without_context_become_zero_and_nan_is_not_hidden() -> None:
    case = make_case([30, 30], [1, 1], kv_heads=2, dim=64, block=16, window=None, dtype=torch.float32)
    rows = native.AttentionRows(case.tables, numpy.array([0, 30], numpy.int32), block_tokens=16, slots=case.slots)
    query, out = torch.randn(2, 2, 64), torch.full((2, 2, 64), float("nan"))
    query[1, 1, 5] = float("nan")
    native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, 0.125, out)
    assert bool((out[0] == 0).all())
    assert bool(out[1, 0].isfinite().all())
    assert bool(out[1, 1].isnan().all())


def test_large_scores_do_not_overflow() -> None:
    case = make_case([200], [1], kv_heads=1, dim=64, block=16, window=None, dtype=torch.float32)
    rows = native.AttentionRows(case.tables, numpy.array([200], numpy.int32), block_tokens=16, slots=case.slots)
    query, out = torch.randn(1, 1, 64) * 500, torch.empty(1, 1, 64)
    native.paged_attention(query, native.PoolPlace(case.pages, 1), rows, 1.0, out)
    wanted = exact(query, case.keys[0], case.values[0], 199, None, 1.0)
    assert numpy.abs(out.numpy() - wanted).max() < 1e-4


def test_misuse_is_refused() -> None:
    tables, ends = numpy.zeros((2, 4), numpy.int32), numpy.array([5, 64], numpy.int32)
    with pytest.raises(ValueError, match="int32"):
        native.AttentionRows(tables.astype(numpy.int64), ends, block_tokens=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outside tables"):
        native.AttentionRows(tables, numpy.array([5, 65], numpy.int32), block_tokens=16)
    with pytest.raises(ValueError, match="slot"):
        native.AttentionRows(tables, ends, block_tokens=16, slots=numpy.array([0, 2], numpy.int32))
    with pytest.raises(ValueError, match="firsts"):
        native.AttentionRows(tables, ends, block_tokens=16, counts=numpy.array([1, 2], numpy.int32))
    with pytest.raises(ValueError, match="window"):
        native.AttentionRows(tables, ends, block_tokens=16, window=0)
    rows = native.AttentionRows(tables, ends, block_tokens=16)
    pages, query = torch.zeros(1, 2, 2, 16, 2, 64), torch.zeros(2, 4, 64)
    for wrong, place in ((pages.double(), 0), (pages, 2), (pages[..., :62].contiguous(), 0), (pages[..., :60], 0)):
        with pytest.raises(ValueError, match="pages"):
            native.PoolPlace(wrong, place)
    pool = native.PoolPlace(pages, 0)
    with pytest.raises(ValueError, match="do not fit"):
        native.paged_attention(query[..., :60].contiguous(), pool, rows, 1.0, torch.empty(2, 4, 60))
    with pytest.raises(ValueError, match="out must be like"):
        native.paged_attention(query[:1], pool, rows, 1.0, torch.empty(1, 4, 64))
