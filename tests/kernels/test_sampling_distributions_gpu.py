"""Draws of the sampling kernels against chances in float64: very many on a GPU, some in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from distributions import CASES, OUTPUT, PROMPT, VOCABULARY, p_value, reference, some_logits

from holdfast.execution.triton_kernels.sampling import adjust, launch
from holdfast.execution.triton_kernels.sampling.slots import SlotParams

BATCHES, ROWS_A_CASE = (300, 80) if torch.cuda.is_available() else (1, 2)


def test_draws_follow_their_chances(device: torch.device) -> None:
    """All options beside each other in every batch: rows of a step are of many requests."""
    cases = list(CASES.values()) * ROWS_A_CASE
    count, length = len(cases), len(PROMPT) + len(OUTPUT)
    params = SlotParams(count, VOCABULARY, device, count)
    lanes = adjust.Lanes.allocate(count, VOCABULARY, device)
    workspace = launch.Workspace.allocate(count, VOCABULARY, device)
    known = torch.zeros((count, length + 1), dtype=torch.int32, device=device)
    known[:, :length] = torch.tensor(PROMPT + OUTPUT, dtype=torch.int32)
    slots = torch.arange(count, dtype=torch.int32, device=device)
    lengths = torch.full((count,), length, dtype=torch.int32, device=device)
    logits = some_logits().to(device).repeat(count, 1)
    drawn: dict[str, list[int]] = {name: [] for name in CASES}
    for batch in range(BATCHES):
        for slot, case in enumerate(cases):
            assert params.write(slot, case.params(batch * count + slot), len(PROMPT), case.ends, case.bad_words)
        params.upload()
        adjusted = adjust.adjust_rows(logits, slots, lengths, params, known, lanes)
        out = torch.zeros(count, dtype=torch.int32, device=device)
        launch.sample_rows(logits, slots, lengths, params, known, out, workspace, adjusted=adjusted)
        for place, name in enumerate(CASES):
            drawn[name] += out[place :: len(CASES)].tolist()
    for name, case in CASES.items():
        assert len(drawn[name]) == BATCHES * ROWS_A_CASE
        assert p_value(drawn[name], reference(some_logits(), case)) > 1e-4, name
