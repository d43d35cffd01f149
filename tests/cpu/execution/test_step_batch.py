"""A step's arrays: those of decodes alone are made another way, and must be the same ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch

from holdfast.execution.batch import RunnerLimits, SlotBuffers
from holdfast.kvcache.groups import KVGroup, KVLayout
from holdfast.records import Row, StepPlan

SLOTS, CONTEXT = 40, 96


class PlainBackend:
    """Keeps what a backend is asked to plan."""

    name = "plain"

    def plan(self, rows: Any, group: KVGroup, tables: Any) -> Any:
        return rows.starts, rows.counts, rows.firsts, rows.single, group.window, tables

    def run(self, *_: Any) -> None:
        raise AssertionError("nothing is computed here")


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 2, 32])
def test_decodes_alone_give_the_arrays_of_any_step(rows: int, block_tokens: int) -> None:
    random = numpy.random.default_rng(100 * rows + block_tokens)
    groups = (KVGroup(index=0, layers=(0, 2), window=None), KVGroup(index=1, layers=(1,), window=8))
    layout = KVLayout(
        groups=groups, block_tokens=block_tokens, layers_per_page=2, kv_heads=1, head_dim=8, element_bytes=4
    )
    limits = RunnerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=CONTEXT)
    buffers, backend = SlotBuffers(limits, layout, 500), PlainBackend()
    buffers.tokens[:] = random.integers(0, 500, buffers.tokens.shape)
    for table in buffers.tables:
        table[:] = random.integers(1, 400, table.shape)
    begun = 0
    for _ in range(20):
        # Few different lengths, so that some are equal, and some begin a page.
        starts = random.choice([0, 3, 15, 16, 31, 32, 33, 63, 64, 95], rows)
        slots = random.permutation(SLOTS)[:rows]
        plan = StepPlan(
            step_id=1, rows=[Row(int(slot), int(at), 1, True) for slot, at in zip(slots, starts, strict=True)]
        )
        found, wanted = buffers.form(plan, backend), buffers._form_any(plan, backend)
        begun += len(found.fresh_pages)
        for field in dataclasses.fields(found):
            assert alike(getattr(found, field.name), getattr(wanted, field.name)), field.name
    assert (begun > 0) == (block_tokens > 1)
