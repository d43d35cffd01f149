"""The bodies that come in and go out, typed. Owns shapes and defaults; meaning is given in `request/parse.py` and
`response/serialize.py`.

Everything a client may leave out is None, because a model's own generation config may have another default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
RequestId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")]
Small = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""Fits the engine's integers; whether the value makes sense is SamplingParams' to say."""


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
"""Texts or token ids, one or several: more than one kind of list is read by hand."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI's padding against eavesdroppers: ignored, and told so where it is asked for."""


class Common(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Small | None = None
    max_tokens: Small | None = None
    min_tokens: Small | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Small | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    spaces_between_special_tokens: bool | None = None
    logprob_token_ids: list[TokenId] | None = None
    """With logprobs: the tokens to report in place of the likeliest."""
    prompt_logprobs: Small | None = None
    use_beam_search: bool = False
    """n is how many beams there are."""
    length_penalty: Annotated[float, msgspec.Meta(ge=-10, le=10)] = 1.0
    """Of beam search; without effect elsewhere."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    """The most tokens of a prompt; -1: as many as the context has beside max_tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt that is too long loses tokens; left out: at its beginning, as in vLLM."""
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens as token_id:5."""
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    """OpenAI's: text, json_object, json_schema; vLLM's structural_tag."""
    structured_outputs: dict[str, Any] | None = None
    """The fields of StructuredOutputsParams."""
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    grammar: str | None = None
    """llama.cpp's, as are its grammars (GBNF)."""
    json_schema: dict[str, Any] | str | bool | None = None
    priority: Small = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None
    """Becomes part of the answer's id; it need not be unique."""
    timings_per_token: bool | None = None
    """llama.cpp's: its `timings` in every event and in the body."""
    return_progress: bool | None = None
    """llama.cpp's: `prompt_progress` in a stream, after each step that computes a part of the prompt."""
    verbose: bool | None = None
    """llama.cpp's: `__verbose`, with the prompt as the template has rendered it."""


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    """In place of `text`, of a part that is a refusal."""
    thinking: str | None = None
    """The same of thoughts."""


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = "{}"
    """JSON as text, which is how OpenAI's clients send it, or the object itself."""


class ToolCall(msgspec.Struct, kw_only=True):
    """Of an assistant's message, as it was answered."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """Of a stream; some clients send it back."""


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name for the same."""
    function_call: CalledFunction | None = None
    """OpenAI's name of old for one call; read as one in `tool_calls`."""


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; left out: there are none."""
    strict: bool | None = None
    """Whether arguments must match the schema also where the model is free to call or not."""


class ToolDefinition(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Common, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Small | None = None
    logprobs: bool = False
    top_logprobs: Small | None = None
    echo: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the template, as in vLLM; also whether it enables thinking, unless that is said too."""
    enable_thinking: bool | None = None
    """The variable of this name, which many send beside chat_template_kwargs instead of in it."""
    documents: list[dict[str, Any]] | None = None
    """For templates that show some; others make nothing of them."""
    return_prompt_text: bool | None = None


class CompletionBody(Common, kw_only=True):
    prompt: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)]
    echo: bool = False
    logprobs: Small | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: None = None
    """Tokens of thoughts are not counted apart."""


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AnsweredFunction(msgspec.Struct):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: AnsweredFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """As in vLLM what there is nothing of is null, but for calls: clients take an empty list for some."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name for the same."""
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
