"""How a request ends: refused before it waits, with the numbers, or told of as it grows, with its times. Changes
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.errors import ContextLengthError, HoldfastError, RequestError
from holdfast.kvcache import KVCache
from holdfast.records import EngineOutput, Failure, FinishReason, Request, RequestTiming, TokenLogprobs, Verdict
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.sequence import Sequence

AdvanceGrammar = Callable[[str, int], Verdict | Failure]
"""Gives a token to the grammar of this request's answer, and says what it means for it."""


def validate(request: Request, limits: SchedulerLimits, kv: KVCache) -> RequestError | None:
    """None: the request can finish, alone at least."""
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        return RequestError("the prompt is empty", needed="at least one token", field="prompt")
    if prompt >= limits.max_model_len:
        return ContextLengthError(
            f"the prompt has {prompt} tokens; the context length is {limits.max_model_len}, one of them for the output",
            needed=f"a prompt of at most {limits.max_model_len - 1} tokens",
            found=f"{prompt} tokens",
            fix="shorten the prompt or raise max_model_len",
            field="prompt",
        )
    longest = min(prompt + request.max_tokens, limits.max_model_len)
    # One token at a time holds least; the last token of an answer is never computed.
    pages = kv.layout.peak_blocks(longest - 1, 1)
    if pages > kv.blocks_total:
        return ContextLengthError(
            f"{longest} tokens (prompt and output) need {pages} KV blocks; the KV cache has {kv.blocks_total}",
            needed=f"{pages} blocks of {kv.layout.block_tokens} tokens",
            found=f"{kv.blocks_total} blocks",
            fix="lower max_tokens, shorten the prompt, or give the KV cache more memory",
            field="max_tokens",
        )
    return None


def refused(request: Request, error: HoldfastError, now_s: float) -> EngineOutput:
    """The only news there will be of a request that was not taken."""
    failure = Failure.of(error)
    timing = RequestTiming(arrival_s=request.arrival_s, scheduled_s=now_s, first_token_s=now_s, finished_s=now_s)
    return EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, failure=failure, timing=timing)


def make_output(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    reason: FinishReason | None,
    stop_id: int | None,
    now_s: float | None,
    failure: Failure | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    embedding: bytes | None = None,
    complete: bool = False,
    prompt_computed: int = 0,
) -> EngineOutput:
    """What a sequence gained, and whether that ended it; with its times where `now_s` is given."""
    timing = None
    if now_s is not None:
        timing = RequestTiming(
            arrival_s=sequence.request.arrival_s,
            scheduled_s=now_s if sequence.scheduled_s is None else sequence.scheduled_s,
            first_token_s=now_s if sequence.first_token_s is None else sequence.first_token_s,
            finished_s=now_s,
        )
    return EngineOutput(
        request_id=sequence.request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_computed=prompt_computed,
        embedding=embedding,
        finish_reason=reason,
        stop_token_id=stop_id,
        cached_tokens=sequence.cached_tokens,
        fetched_tokens=sequence.fetched_tokens,
        timing=timing,
        failure=failure,
        complete=complete,
    )


def told_of_prompt(sequence: Sequence, prompt_logprobs: list[TokenLogprobs] | None) -> Iterator[EngineOutput]:
    """After a step that computed a part of its prompt and sampled nothing."""
    computed = sequence.computed if sequence.request.progress and sequence.computed < sequence.prompt_length else 0
    if prompt_logprobs is not None or computed:
        yield make_output(
            sequence, [], None, None, None, None, prompt_logprobs=prompt_logprobs, prompt_computed=computed
        )
