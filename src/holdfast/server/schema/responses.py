"""The responses of the two endpoints that generate, typed: for /openapi.json, and for tests.

Responses are written piece by piece in `response/serialize.py`, which never builds these types. What can only be null
is what vLLM has and this server does not: clients in typed languages expect the member.
"""

from __future__ import annotations

import msgspec

from holdfast.server.schema.requests import AssistantMessage, ChatLogprobs, Usage


class PromptLogprob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a token of the prompt, by token id; null for the first."""


class ChatChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None
    """With return_token_ids."""
    routed_experts: None


class ChatAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    """With return_token_ids."""
    prompt_logprobs: PromptLogprobs | None
    prompt_text: str | None
    """With return_prompt_text."""
    service_tier: None
    system_fingerprint: str
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class CompletionLogprobs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    routed_experts: None


class CompletionAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None
    system_fingerprint: str
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None
