"""Answers of a benchmark that nobody gave, with the times that a test wants."""

from __future__ import annotations

from array import array

import msgspec

from holdfast.bench.client.answers import TimedAnswer

TOKENS, GAP_S, TTFT_S = 10, 0.02, 0.1


def answer(sent_s: float, *, ttft_s: float = TTFT_S, gap_s: float = GAP_S, **changes: object) -> TimedAnswer:
    made = TimedAnswer(
        number=0,
        intended_s=sent_s,
        sent_s=sent_s,
        first_s=sent_s + ttft_s,
        end_s=sent_s + ttft_s + (TOKENS - 1) * gap_s,
        gaps=array("f", [gap_s] * (TOKENS - 1)).tobytes(),
        prompt_tokens=20,
        output_tokens=TOKENS,
        counted=True,
    )
    return msgspec.structs.replace(made, **changes)
