"""A GPU's page tables of pinned memory, by which the budget of VRAM is smaller than it would be without it."""

from __future__ import annotations

from holdfast.footprint.streamed import page_tables_bytes
from holdfast.units import GIB, MIB


def test_eight_bytes_a_page_in_whole_tables() -> None:
    assert page_tables_bytes(0) == 0
    assert page_tables_bytes(4096) == page_tables_bytes(GIB) == 2 * MIB
    assert page_tables_bytes(GIB + 4096) == 4 * MIB
    assert page_tables_bytes(int(18.65 * GIB)) == 38 * MIB
