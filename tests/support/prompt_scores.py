"""What is told of a prompt, held against log_softmax of somebody else's logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from holdfast.records import TokenLogprobs


def assert_scores(
    logits: torch.Tensor, prompt: Sequence[int], told: Sequence[TokenLogprobs], count: int, *, tolerance: float = 2e-4
) -> None:
    """`logits` [tokens, vocabulary] of the prompt; `count`: the likeliest that were asked for beside each token."""
    assert len(told) == len(prompt) - 1
    expected = logits.double().log_softmax(-1)
    for place, entry in enumerate(told):
        row, token = expected[place], prompt[place + 1]
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == len(entry.logprobs) == 1 + count
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=tolerance)
        assert entry.logprobs[1:] == pytest.approx(row.topk(count).values.tolist(), abs=tolerance)
        assert len(set(entry.token_ids[1:])) == count
        # Two logits may be as close as their errors are.
        least, most = (int((row > row[token] + slack).sum()) + 1 for slack in (tolerance, -tolerance))
        assert least <= entry.rank <= most
