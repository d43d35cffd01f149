"""Bodies of Anthropic's API as they come in and go out, typed. What they mean is told in `read` and `shape`.

Members of blocks and tools that are not declared are passed over, as everywhere in this API.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.server.schema.requests import Small

HARMLESS_MEMBERS = {
    "metadata": "the caller's own bookkeeping",
    "cache_control": "the prefix cache finds what was said before by itself",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "there is one place",
    "user_profile_id": "the caller's own bookkeeping",
    "diagnostics": "the caller's own bookkeeping",
    "anthropic_version": "of other clouds, where no header says it",
    "anthropic_beta": "of other clouds, where no header says it",
    "betas": "of other clouds, where no header says it",
}
"""Name, and why it makes no difference to an answer."""


class SystemBlock(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Small | None = None
    """Of thoughts alone; here max_tokens limits thoughts and answer together."""


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What makes a prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older place of `output_config.format`."""
    mcp_servers: list[dict[str, Any]] | None = None
    container: str | dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Small
    """The most that is wanted: with less room in the context the answer is that much shorter."""
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Small | None = None


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Without those that the prefix cache had."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorObject
    request_id: str | None = None
