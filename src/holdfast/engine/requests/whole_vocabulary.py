"""prompt_logprobs: -1 in Python: whether it may be asked for, and of how many tokens. A server has its own limits
(`server.request.logprob_budget`), since many clients share its memory."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import RequestError
from holdfast.footprint.cpu import WHOLE_VOCABULARY_ENTRIES
from holdfast.records import SamplingParams
from holdfast.records.sampling import MAX_LOGPROBS, WHOLE_VOCABULARY

FIELD = "prompt_logprobs"


def is_whole(params: SamplingParams) -> bool:
    return params.prompt_logprobs == WHOLE_VOCABULARY


def with_whole_vocabulary(
    params: SamplingParams, prompt: Sequence[int], vocabulary: int, max_logprobs: int
) -> SamplingParams:
    """With the number of tokens in place of -1. `max_logprobs`: the engine's setting."""
    asked = params.prompt_logprobs
    if asked is None or 0 <= asked <= MAX_LOGPROBS:
        return params
    if asked != WHOLE_VOCABULARY or max_logprobs != WHOLE_VOCABULARY:
        raise RequestError(
            f"{FIELD} is {asked}",
            needed=f"from 0 to {MAX_LOGPROBS}; -1, the whole vocabulary, with max_logprobs=-1 and on a CPU",
            found=str(asked),
            fix="LLM(max_logprobs=-1)" if asked == WHOLE_VOCABULARY else f"{FIELD}={MAX_LOGPROBS}",
            field=FIELD,
        )
    entries = len(prompt) * (vocabulary + 1)
    if entries > WHOLE_VOCABULARY_ENTRIES:
        raise RequestError(
            f"{FIELD} of the whole vocabulary are {entries:,} numbers of {len(prompt):,} tokens",
            needed=f"at most {WHOLE_VOCABULARY_ENTRIES:,}",
            found=f"{entries:,}",
            fix=f"prompts of at most {WHOLE_VOCABULARY_ENTRIES // (vocabulary + 1)} tokens, or {FIELD}={MAX_LOGPROBS}",
            field=FIELD,
        )
    return params.replace(prompt_logprobs=vocabulary)
