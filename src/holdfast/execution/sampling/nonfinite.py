"""Rows for which nothing can be sampled because their logits are infinite or no numbers. Knows neither what made them
so nor how they were computed: an adapter or weights too large for the numbers that are computed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import NotFiniteError
from holdfast.records import Failure, Row, StepFailure, TokenLogprobs

NO_TOKEN = -1
"""What a sampler says for such a row."""


def broken_rows(rows: Sequence[Row], tokens: Sequence[int]) -> list[StepFailure]:
    """`tokens`: of the rows that sample, in their order."""
    if NO_TOKEN not in tokens:
        return []
    error = NotFiniteError(
        "the model computed NaN or infinite values for this request",
        needed="weights (and LoRA adapter, if any) whose values do not overflow the compute dtype",
        fix="leave the LoRA adapter out, or use a wider --dtype",
    )
    sampling = [row.slot for row in rows if row.samples]
    failure = Failure.of(error)
    # It shows where a token is sampled, and may have begun in any chunk before.
    return [
        StepFailure(slot=slot, failure=failure, earlier_too=True)
        for slot, token in zip(sampling, tokens, strict=True)
        if token < 0
    ]


def tell_of_others(
    rows: Sequence[Row], told: Sequence[list[TokenLogprobs]], failures: Sequence[StepFailure]
) -> list[list[TokenLogprobs]]:
    """`told` of the rows that score, in their order, without what was found for those that failed."""
    failed = {failure.slot for failure in failures}
    scoring = [row.slot for row in rows if row.scored]
    return [[] if slot in failed else list(entries) for slot, entries in zip(scoring, told, strict=True)]
