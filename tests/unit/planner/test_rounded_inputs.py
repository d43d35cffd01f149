"""Where inputs are rounded, with the reason, and what their workspaces take in a plan."""

from __future__ import annotations

import pytest

from holdfast.footprint.rounded import gpu_lacks, rounding_of, workspace_bytes
from holdfast.footprint.scaled_layouts import ScaledLayout

FP8 = ScaledLayout(codes="fp8", inputs="fp8")
INT8 = ScaledLayout(codes="int8", inputs="int8")


@pytest.mark.parametrize(
    ("layout", "capability", "inputs", "reason"),
    [
        (FP8, (8, 0), "plain", "compute capability 8.0 has no FP8 arithmetic"),
        (FP8, (8, 6), "plain", "decoded in the kernel"),
        (FP8, (8, 9), "fp8", "asks for inputs in fp8"),
        (FP8, (9, 0), "fp8", "asks for inputs in fp8"),
        (FP8, (12, 0), "fp8", "asks for inputs in fp8"),
        (INT8, (8, 0), "int8", "asks for inputs in int8"),
        (ScaledLayout(codes="fp8"), (9, 0), "plain", "does not ask"),
    ],
)
def test_inputs_are_rounded_where_the_gpu_can(
    layout: ScaledLayout, capability: tuple[int, int], inputs: str, reason: str
) -> None:
    found = rounding_of(layout, capability)
    assert found.inputs == inputs
    assert reason in found.reason


def test_workspaces_grow_with_tokens_and_widths() -> None:
    """An 8B model's largest step: codes of 14,336 columns, a scale for each 128 of them, and sums of 4,096."""
    found = workspace_bytes(8192, 14336, 4096, 2) - workspace_bytes(0, 14336, 4096, 2)
    assert found == 8192 * (14336 + 112 * 4 + 4096 * 2)


@pytest.mark.parametrize(
    ("layout", "capability", "experts", "lacking"),
    [
        (ScaledLayout(codes="int8", zeros=True, group=128), (9, 0), False, None),
        (ScaledLayout(codes="int4", group=16), (9, 0), False, "groups of 16 columns"),
        (ScaledLayout(codes="int4", group=128, ordered=True), (9, 0), True, None),
        (ScaledLayout(codes="int8", inputs="int8", ordered=True), (9, 0), True, "an order of their own"),
        (ScaledLayout(codes="fp8", inputs="fp8", group=64, group_rows=64, input_group=64), (9, 0), False, "64 x 64"),
        (ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=128), (9, 0), False, "inputs scaled by row"),
        (ScaledLayout(codes="int8", inputs="int8", group=128, input_group=128), (9, 0), True, "1 x 128"),
        # Where inputs are not rounded, codes of any blocks are decoded.
        (ScaledLayout(codes="fp8", inputs="fp8", group=64, group_rows=64, input_group=64), (8, 0), False, None),
        (ScaledLayout(codes="int4", group=128, zeros=True, ordered=True), (8, 0), False, None),
        (ScaledLayout(codes="fp8", inputs="fp8", group=128, group_rows=1, input_group=128), (9, 0), True, None),
        (FP8, (9, 0), True, None),
        (INT8, (8, 0), False, None),
    ],
)
def test_what_no_kernel_takes_is_said_before_loading(
    layout: ScaledLayout, capability: tuple[int, int], experts: bool, lacking: str | None
) -> None:
    found = gpu_lacks(layout, capability, experts=experts)
    assert found is None if lacking is None else found is not None and lacking in found
