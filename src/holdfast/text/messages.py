"""Chat messages made plain: JSON types only, content as text where a template wants text.

Owns what a message may contain. Knows no templates and no HTTP; what is not supported is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.text.templates.budget import MAX_NUMBER_BITS

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


MAX_DEPTH = 64
"""Lists and objects inside one another: more than any tool's schema has, far from the interpreter's own end."""


def plain(value: Any, field: str = "messages", depth: int = 0) -> Any:
    """A deep copy of JSON types alone: a template gets no object whose methods could do something."""
    if value is None or type(value) in (str, float, bool):
        return value
    if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
        raise RequestError(
            f"{field} contains a number of {value.bit_length()} bits", needed=f"at most {MAX_NUMBER_BITS}", field=field
        )
    if type(value) is int:
        return value
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{field} contains lists and objects nested more than {MAX_DEPTH} deep",
            needed=f"at most {MAX_DEPTH} levels",
            field=field,
        )

    def inner(item: Any) -> Any:
        return plain(item, field, depth + 1)

    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {inner(key): inner(item) for key, item in value.items()}
    if isinstance(value, list):
        return [inner(item) for item in value]
    if isinstance(value, tuple):
        return tuple(inner(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: inner(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return inner(value.model_dump())
    return f"<{type(value).__name__}>"


def join_text_parts(messages: Sequence[Mapping[str, Any]], *, keep_parts: bool) -> list[dict[str, Any]]:
    """A plain copy of the messages; content given as parts is checked, and joined with newlines unless kept."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list with at least one message", field="messages")
    chat: list[dict[str, Any]] = []
    for index, given in enumerate(messages):
        message = plain(given)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] is not a message",
                needed='an object with a role: {"role": "user", "content": "..."}',
                field=f"messages[{index}]",
            )
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [_text_of(part, f"messages[{index}].content[{place}]") for place, part in enumerate(content)]
            if keep_parts:
                message["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                message["content"] = "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"messages[{index}].content is neither a string nor a list of parts", field=f"messages[{index}].content"
            )
        chat.append(message)
    return chat


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise UnsupportedOptionError(
            f"{place} is of type {kind}; this server accepts only text",
            needed="parts of type text",
            found=str(kind),
            fix=f"leave the {kind} part out",
            field=place,
        )
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if not isinstance(text, str):
        raise RequestError(f"{place} has no text", needed="a string in text", field=place)
    return text
