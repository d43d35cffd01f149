"""Bodies of /v1/responses as they come in and go out, typed. What they mean is told in `read`, `items` and `shape`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.server.schema.requests import RequestId, Small, StreamOptions

PASSED = frozenset(
    {
        "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "enable_thinking", "frequency_penalty",
        "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens",
        "presence_penalty", "priority", "repetition_penalty", "seed", "skip_special_tokens", "stop", "stop_token_ids",
        "structured_outputs", "top_k",
    }
)  # fmt: skip
"""Fields of a chat that are taken here too, with the same meaning, as in vLLM."""


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """A hint to OpenAI's own models."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    """Thoughts are given whole, so that there is nothing to sum up."""
    generate_summary: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Small | None = None
    max_tool_calls: Small | None = None
    """Of hosted tools, which do not exist here."""
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Small | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    request_id: RequestId | None = None
    """vLLM's; ids of responses are made here, since whoever knows one may read it."""


class CachedDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: None = None


class InputTokens(msgspec.Struct, kw_only=True):
    """Of a request that is counted and not answered."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
