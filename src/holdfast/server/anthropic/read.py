"""From a body of Anthropic's API to a chat: its system prompt, blocks, tools and switches in OpenAI's words.

Owns what becomes of each of its fields and blocks; what cannot be done is refused by name. A chat's own rules are
`request.parse`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.anthropic.schema import (
    HARMLESS_MEMBERS,
    AnthropicToolChoice,
    CountBody,
    CountedTokens,
    MessagesBody,
)
from holdfast.server.http.middleware import Record
from holdfast.server.request.chat import chat_prompt
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import GenerationRequest, chat_request, served_model, tokenizer_of
from holdfast.server.request.translated import ChatMessages, check_counts, not_here, told_as
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.ignored import IGNORED
from holdfast.server.schema.requests import ChatBody
from holdfast.server.settings import ServerSettings

BILLING = "x-anthropic-billing-header:"
"""A block of Claude Code's system prompt that begins so tells Anthropic whom to bill. It differs from request to
request, and with it in front no prefix would ever be found in the cache."""

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "prompt": "messages",
}
_TEXT_ONLY = "this server accepts only text"
_ERROR_MARKS = ("error", "<tool_use_error>")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def read_message_request(
    raw: bytes,
    engine: Engine,
    settings: ServerSettings,
    *,
    workers: TemplateWorkers,
    pool: TokenizePool,
    request_id: str | None = None,
) -> GenerationRequest:
    given = _known(decode_object(raw))
    body: MessagesBody = convert(check_fields(given, honoured_fields(MessagesBody)), MessagesBody)
    chat, messages = _chat_of(body)
    wanted = {
        "max_tokens": min(body.max_tokens, engine.info.max_model_len),
        "stream": body.stream,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    with told_as(messages, _NAMES):
        ask = await chat_request(
            {**chat, **wanted}, len(raw), engine, settings, workers=workers, pool=pool, prefix="msg"
        )
    return replace(ask, answer_id=ask.engine_id.replace("-", "_", 1))


class TokenCount:
    """/v1/messages/count_tokens."""

    def __init__(self, engine: Engine, settings: ServerSettings, workers: TemplateWorkers, pool: TokenizePool) -> None:
        self._engine = engine
        self._settings = settings
        self._workers = workers
        self._pool = pool

    async def count(self, raw: bytes, record: Record) -> CountedTokens:
        given = _known(decode_object(raw))
        # Whoever counts may send all of a request; what makes no prompt does not matter.
        prompt_fields = honoured_fields(CountBody)
        beside = honoured_fields(MessagesBody) - prompt_fields
        kept = {name: value for name, value in given.items() if name not in beside}
        chat, messages = _chat_of(convert(check_fields(kept, prompt_fields), CountBody))
        with told_as(messages, _NAMES):
            chat.pop("response_format", None)
            body: ChatBody = convert({name: value for name, value in chat.items() if value is not None}, ChatBody)
            served_model(body.model, self._settings)
            prompt = await chat_prompt(
                *(body, chat.get("tools"), tokenizer_of(self._engine, "messages"), self._engine, self._settings),
                *(len(raw), self._workers, self._pool),
            )
        return CountedTokens(input_tokens=len(prompt.ids))


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in HARMLESS_MEMBERS}


def _chat_of(body: CountBody) -> tuple[dict[str, Any], ChatMessages]:
    """A chat's body but for sampling."""
    for name, why in (("mcp_servers", "no server is connected to from here"), ("container", "no code is run here")):
        if getattr(body, name):
            raise unsupported(name, why)
    if body.context_management:
        IGNORED.get().add("context_management", why="nothing is cleared from a prompt; one that is too long is refused")
    check_counts(body.messages, "messages", "content")
    messages = ChatMessages()
    system = _system(body)
    if system:
        messages.add_system(system, "system")
    for position, message in enumerate(body.messages):
        _read_message(message, messages, f"messages[{position}]")
    chat: dict[str, Any] = {"model": body.model, "messages": messages.messages}
    last = messages.messages[-1] if messages.messages else None
    if last is not None and last["role"] == "assistant" and "tool_calls" not in last:
        # The beginning of the answer, which it goes on from.
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(body.tools)]
    chat |= _choice(body.tool_choice)
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.type != "disabled"
    config = body.output_config
    if config is not None and config.effort is not None:
        chat["reasoning_effort"] = config.effort
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        chat["response_format"] = _format(form)
    return chat, messages


def _system(body: CountBody) -> str:
    if body.system is None or isinstance(body.system, str):
        return body.system or ""
    return "\n\n".join(block.text for block in body.system if not block.text.startswith(BILLING))


def _choice(given: AnthropicToolChoice | None) -> dict[str, Any]:
    if given is None:
        return {}
    choice: Any = CHOICES.get(given.type)
    if given.type == "tool":
        if given.name is None:
            raise RequestError("tool_choice.name is missing", needed="name", field="tool_choice.name")
        choice = {"type": "function", "function": {"name": given.name}}
    return {"tool_choice": choice, **({"parallel_tool_calls": False} if given.disable_parallel_tool_use else {})}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        raise RequestError(
            "output_config.format.type must be json_schema", needed="json_schema", field="output_config.format.type"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema")}}


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in (None, "custom"):
        why = "tools that Anthropic runs or defines do not exist on this server"
        raise not_here(where, kind, why, f"leave {where} out, or send a tool with name, description and input_schema")
    for name in ("name", "input_schema"):
        if name not in given:
            raise RequestError(f"{where}.{name} is missing", needed=name, field=f"{where}.{name}")
    function = {"name": given["name"], "description": given.get("description"), "parameters": given["input_schema"]}
    return {"type": "function", "function": {**function, "strict": given.get("strict")}}


def _read_message(given: dict[str, Any], messages: ChatMessages, where: str) -> None:
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user or assistant", needed="user or assistant", field=f"{where}.role")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a text or a list of blocks", field=f"{where}.content")
    if role == "assistant":
        messages.assistant(where)
        for position, block in enumerate(content):
            _read_of_assistant(block, messages, f"{where}.content[{position}]")
        return
    if role == "system":
        messages.add(role, [_text(block, f"{where}.content[{number}]") for number, block in enumerate(content)], where)
        return
    texts: list[str] = []
    for position, block in enumerate(content):
        place = f"{where}.content[{position}]"
        if block.get("type") != "tool_result":
            texts.append(_text(block, place))
            continue
        if texts:
            messages.add_user(texts, where)
            texts = []
        messages.add("tool", [_result(block, place)], place, tool_call_id=_string(block, "tool_use_id", place))
    if texts or not content:
        messages.add_user(texts, where)


def _read_of_assistant(block: dict[str, Any], messages: ChatMessages, place: str) -> None:
    kind = block.get("type")
    if kind == "tool_use":
        name, call_id = _string(block, "name", place), _string(block, "id", place)
        messages.call(call_id, name, block.get("input") or {}, place)
    elif kind == "thinking":
        messages.think(_string(block, "thinking", place), place)
    elif kind != "redacted_thinking":  # Which nobody but Anthropic can read.
        messages.say(_text(block, place), place)


def _result(block: dict[str, Any], place: str) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and all(isinstance(one, dict) for one in content):
        text = "\n".join(_text(one, f"{place}.content[{number}]") for number, one in enumerate(content))
    else:
        raise RequestError(f"{place}.content must be a text or a list of blocks", field=f"{place}.content")
    # Templates know no results that are errors.
    failed = block.get("is_error") is True and not text.lower().startswith(_ERROR_MARKS)
    return f"Error: {text}" if failed else text


def _text(block: dict[str, Any], place: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise not_here(place, kind, _TEXT_ONLY, "remove the block, or describe what it shows in text")
    return _string(block, "text", place)


def _string(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} must be a text", needed="a string", field=f"{place}.{name}")
    return value
