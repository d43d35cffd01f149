"""The messages of a chat, checked one by one so that an error can name the place. Rendering is `text`'s business."""

from __future__ import annotations

from typing import Any

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.server.schema.fields import check_members, convert, honoured_fields, ignore_or_refuse
from holdfast.server.schema.requests import ContentPart, Message, ToolCall
from holdfast.text.tools.prompt import arguments_object

# "developer" is OpenAI's newer name of "system", "function" its older one of "tool"; few templates know either.
ROLES = {"developer": "system", "function": "tool"}
MAX_ROLE_CHARS = 64

_MESSAGE_FIELDS = honoured_fields(Message)
# What clients send back when they append an answer as they got it.
_QUIET = frozenset({"refusal", "audio", "annotations", "id"})
_TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"
}  # fmt: skip
"""Types of parts, and the member that has their text."""
_HARMLESS = frozenset({"cache_control", "annotations", "logprobs", "id"})
"""Of other APIs: how long a prefix may be kept (here they all are, as long as there is room); and what an answer had
beside its text."""
MAX_CALLS = 128
"""Of one message in the history."""
MAX_PARTS = 8192
"""Of the contents of all messages together."""


def read_messages(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain dicts, as chat templates take them."""
    if not raw:
        raise RequestError("messages: at least one message is needed", field="messages")
    parts = sum(len(one["content"]) for one in raw if isinstance(one.get("content"), list))
    if parts > MAX_PARTS:
        raise RequestError(f"messages have {parts} content parts; at most {MAX_PARTS}", field="messages")
    return [_read_message(message, f"messages[{position}]") for position, message in enumerate(raw)]


def _read_message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    kept = {}
    for name, value in raw.items():
        if name in _MESSAGE_FIELDS:
            kept[name] = value
        elif name == "audio" and value:
            raise UnsupportedOptionError(f"{where}.audio is not supported", field=f"{where}.audio")
        elif value is not None and name not in _QUIET:
            ignore_or_refuse(f"{where}.{name}", _MESSAGE_FIELDS)
    try:
        message: Message = convert(kept, Message)
    except RequestError as error:
        field = f"{where}.{error.field}" if error.field else where
        raise RequestError(f"{where}.{error.message}", field=field) from None
    # As in vLLM a role of any other name is the template's to know.
    role = ROLES.get(message.role, message.role)
    if not 0 < len(role) <= MAX_ROLE_CHARS:
        raise RequestError(
            f"{where}.role has {len(role)} characters", needed=f"1 to {MAX_ROLE_CHARS}", field=f"{where}.role"
        )
    content = message.content
    if isinstance(content, list):
        rendered: Any = _read_parts(content, raw["content"], f"{where}.content")
    else:
        rendered = content or ""
    checked = {"role": role, "content": rendered}
    if message.name is not None:
        checked["name"] = message.name
    _read_calls(message, checked, where)
    return checked


def _read_calls(message: Message, checked: dict[str, Any], where: str) -> None:
    """What belongs to an assistant's message, or to that of a tool, alone."""
    role = checked["role"]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    calls = message.tool_calls or []
    if message.function_call is not None and not calls:
        calls = [ToolCall(function=message.function_call)]
    for name, given, home in (
        ("tool_calls", calls, "assistant"),
        ("reasoning_content", reasoning, "assistant"),
        ("tool_call_id", message.tool_call_id, "tool"),
    ):
        if given and role != home:
            ignore_or_refuse(f"{where}.{name}")
    if len(calls) > MAX_CALLS:
        raise RequestError(
            f"{where}.tool_calls has {len(calls)} calls; at most {MAX_CALLS}", field=f"{where}.tool_calls"
        )
    if reasoning and role == "assistant":
        checked["reasoning_content"] = reasoning
    if message.tool_call_id is not None and role == "tool":
        checked["tool_call_id"] = message.tool_call_id
    if calls and role == "assistant":
        checked["tool_calls"] = [
            {
                "id": call.id or f"call_{place}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_object(call.function.arguments)},
            }
            for place, call in enumerate(calls)
        ]


def _read_parts(parts: list[str | ContentPart], raw: list[Any], where: str) -> list[dict[str, str]]:
    return [
        {"type": "text", "text": part if isinstance(part, str) else _read_part(part, raw[position], where, position)}
        for position, part in enumerate(parts)
    ]


def _read_part(part: ContentPart, raw: dict[str, Any], where: str, position: int) -> str:
    place = f"{where}[{position}]"
    member = _TEXT_PARTS.get(part.type)
    if member is None:
        raise UnsupportedOptionError(
            f"{place}: content type {part.type[:50]!r} is not supported: this server accepts only text",
            needed=f"parts of type {', '.join(_TEXT_PARTS)}",
            fix="remove the part, or describe it in text",
            field=place,
        )
    check_members(raw, ContentPart, place, beside=_HARMLESS)
    text: str | None = getattr(part, member)
    if text is None:
        raise RequestError(f"{place}.{member} is missing", field=f"{place}.{member}")
    return text
