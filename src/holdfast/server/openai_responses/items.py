"""Items of the Responses API as messages of a chat: what was said, thought, called and answered, in their order.

Owns what becomes of each kind of item; what cannot be shown to a model here is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.errors import RequestError
from holdfast.server.request.translated import ChatMessages, check_counts, not_here

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts, and the member that has their text."""
_LISTS = ("content", "summary", "output")
"""Members of items that may be lists of parts."""
_ROLES = ("user", "assistant", "system", "developer")


def to_messages(instructions: str | None, history: list[dict[str, Any]], given: list[dict[str, Any]]) -> ChatMessages:
    """`history`: items of earlier responses, which were read before."""
    check_counts([*history, *given], "input", *_LISTS)
    messages = ChatMessages()
    if instructions:
        messages.add_system(instructions, "instructions")
    for item in history:
        _read_item(item, messages, "previous_response_id")
    for position, item in enumerate(given):
        _read_item(item, messages, f"input[{position}]")
    return messages


def _read_item(item: dict[str, Any], messages: ChatMessages, place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _read_message(item, messages, place)
    elif kind == "function_call":
        call_id, name = _string(item, "call_id", place), _string(item, "name", place)
        messages.call(call_id, name, _string(item, "arguments", place), place)
    elif kind == "function_call_output":
        output = item.get("output")
        texts = [output] if isinstance(output, str) else _texts(output, f"{place}.output")
        messages.add("tool", ["\n".join(texts)], place, tool_call_id=_string(item, "call_id", place))
    elif kind == "reasoning":
        # Thoughts, or where a client has only kept what sums them up, that.
        thoughts = _texts_of(item.get("content")) or _texts_of(item.get("summary"))
        if thoughts:
            messages.think("".join(thoughts), place)
    else:
        raise not_here(place, kind, "only text, reasoning and calls of functions are items", f"leave {place} out")


def _read_message(item: dict[str, Any], messages: ChatMessages, place: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(_ROLES)}", field=f"{place}.role")
    texts = [content] if isinstance(content, str) else _texts(content, f"{place}.content")
    if role == "assistant":
        messages.say("".join(texts), place)
    elif role == "user":
        messages.add(role, texts, place)
    else:
        messages.add_system("\n\n".join(texts), place)


def _texts(parts: Any, place: str) -> list[str]:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError(f"{place} must be a text or a list of parts", field=place)
    return [_text(part, f"{place}[{number}]") for number, part in enumerate(parts)]


def _text(part: dict[str, Any], place: str) -> str:
    kind = str(part.get("type"))[:50]
    member = _TEXT_PARTS.get(kind)
    if member is None:
        raise not_here(place, kind, "this server accepts only text", "remove the part, or describe it in text")
    return _string(part, member, place)


def _texts_of(parts: Any) -> list[str]:
    """Of a list of parts those that have a text, whatever it is called."""
    listed: Iterable[Any] = parts if isinstance(parts, list) else ()
    return [part["text"] for part in listed if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _string(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} must be a text", needed="a string", field=f"{place}.{name}")
    return value
