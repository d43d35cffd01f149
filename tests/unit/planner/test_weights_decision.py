"""What the decision on quantized weights says of sizes is what lies in memory."""

from __future__ import annotations

import pytest

from holdfast.footprint.cpu import expands
from holdfast.units import MIB


@pytest.mark.parametrize(("fast", "expanded"), [(True, False), (False, True)])
def test_both_sizes_are_said_and_which_is_which(fast: bool, expanded: bool) -> None:
    found, reason = expands(2 * MIB, 8 * MIB, dtype="float32", fast_blocks=fast, budget_bytes=1024 * MIB)
    assert found is expanded
    assert reason.endswith("2.00 MiB; expanded to float32 8.00 MiB")
    assert "fewer bytes" not in reason
