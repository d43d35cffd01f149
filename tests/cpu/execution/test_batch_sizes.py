"""Sizes that steps are padded to."""

from __future__ import annotations

import pytest

from holdfast.execution.gpu.batch_sizes import padded, padded_sizes
from holdfast.execution.gpu.sampling import Work
from holdfast.footprint.gpu import KINDS_OF_WORK


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 256, 2048, 8192, 10_000])
def test_every_number_of_rows_has_a_size(most: int) -> None:
    sizes = padded_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = padded(rows, most)
        assert rows <= size <= most
        assert size in sizes
        if rows >= 64:
            assert size - rows <= rows / (8 if rows >= 256 else 4)
    assert len(sizes) < 130


def test_graphs_are_planned_for_every_kind_of_work() -> None:
    assert len(Work) == KINDS_OF_WORK
    assert [KINDS_OF_WORK * len(padded_sizes(most)) for most in (256, 1024)] == [69, 141]
