"""The CPU attention against the plain one: ragged batches, windows, pieces, page types, over random tables."""

from __future__ import annotations

import numpy
import pytest
import torch

from holdfast.execution import native
from holdfast.execution.kv_pool import KVPool
from holdfast.execution.ops import AttentionShape, StepRows, cpu_attention, ops_for
from holdfast.kvcache.groups import KVGroup, KVLayout

CPU = torch.device("cpu")
BLOCKS, TOKENS, PLACES, LONGEST = 300, 4, 2, 150


def random_rows(source: numpy.random.Generator, rows: int) -> StepRows:
    single = rows // 2
    ends = source.integers(1, LONGEST, rows)
    counts = numpy.where(numpy.arange(rows) < single, 1, source.integers(1, ends + 1))
    counts[single:] = numpy.maximum(counts[single:], 1)
    starts = ends - counts
    starts[:single] = -numpy.sort(-starts[:single])
    return StepRows(starts=starts, counts=counts, firsts=numpy.cumsum(counts) - counts, single=single)


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (1, 0.0), (7, 0.0), (40, 0.0), (None, 1.5), (40, 1.5)])
@pytest.mark.parametrize("gather_bytes", [8 << 20, 4096], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float8_e4m3fn, 1e-5)]
)
def test_equals_the_plain_form(
    window: int | None,
    softcap: float,
    gather_bytes: int,
    kv_dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_attention, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(cpu_attention, "MASKED_QUERIES", 16)
    source = numpy.random.default_rng(window or 0)
    torch.manual_seed(0)
    shape = AttentionShape(
        heads=6,
        kv_heads=2,
        head_dim=16,
        scale=0.25,
        block_tokens=TOKENS,
        places=PLACES,
        dtype=torch.float32,
        softcap=softcap,
    )
    group = KVGroup(0, (0, 1), window)
    layout = KVLayout(
        groups=(group,),
        block_tokens=TOKENS,
        layers_per_page=PLACES,
        kv_heads=2,
        head_dim=16,
        element_bytes=kv_dtype.itemsize,
    )
    kv = KVPool(layout, BLOCKS, CPU, kv_dtype)
    kv.pages[1:] = torch.randn(kv.pages[1:].shape).to(kv_dtype)
    forms = [ops_for(CPU, reference=True), ops_for(CPU)]
    if native.available():
        forms.append(ops_for(CPU, compiled=True))
    backends = [form.make_attention(shape, CPU) for form in forms]
    for rows in (1, 2, 9):
        batch = random_rows(source, rows)
        tables = source.integers(1, BLOCKS, (rows, LONGEST // TOKENS + 1))
        total = int(batch.counts.sum())
        query, key, value = (torch.randn(total, heads, 16) for heads in (6, 2, 2))
        if kv_dtype.itemsize == 1:  # Writing leaves them so.
            key, value = key.to(kv_dtype).float(), value.to(kv_dtype).float()
        place_own_keys(kv, batch, tables, key, value)
        outputs = []
        for backend in backends:
            out = torch.full_like(query, float("nan"))
            backend.run(query, key, value, kv, 1, backend.plan(batch, group, tables), out)
            outputs.append(out)
        for out in outputs[1:]:
            torch.testing.assert_close(out, outputs[0], atol=tolerance, rtol=tolerance)


def place_own_keys(kv: KVPool, batch: StepRows, tables: numpy.ndarray, key: torch.Tensor, value: torch.Tensor) -> None:
    """As a step does before it attends; each row gets pages of its own for what it writes."""
    own = iter(range(1, BLOCKS))
    for row, (start, count, first) in enumerate(zip(batch.starts, batch.counts, batch.firsts, strict=True)):
        for block in range(start // TOKENS, (start + count - 1) // TOKENS + 1):
            tables[row, block] = next(own)
        for index in range(count):
            page, offset = tables[row, (start + index) // TOKENS], (start + index) % TOKENS
            kv.pages[page, 1, 0, offset] = key[first + index]
            kv.pages[page, 1, 1, offset] = value[first + index]


def test_padding_of_a_bucket_is_bounded() -> None:
    """Rows of very different contexts are not padded to the longest."""
    shape = AttentionShape(heads=2, kv_heads=1, head_dim=8, scale=1.0, block_tokens=16, places=1, dtype=torch.float32)
    starts = numpy.array([1599, 1590, 400, 390, 16, 3])
    rows = StepRows(starts=starts, counts=numpy.ones(6, dtype=numpy.int64), firsts=numpy.arange(6), single=6)
    plan = cpu_attention.CpuAttention(shape, CPU).plan(rows, KVGroup(0, (0,), None), numpy.ones((6, 100), dtype=int))
    gathered = sum(len(piece.index) // 2 for bucket in plan.buckets for piece in bucket.pieces)
    needed = int((starts // 16 + 1).sum())
    assert len(plan.buckets) < 6
    assert gathered <= needed / cpu_attention.SIMILAR
