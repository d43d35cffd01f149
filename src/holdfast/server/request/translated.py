"""Other APIs' conversations as messages of a chat, and errors about these told in the words of the API they came from.

Owns how messages are put together and where each came from. Knows no API: `anthropic` and `openai_responses` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import HoldfastError, UnsupportedOptionError

_PLACE = re.compile(r"messages\[(\d+)\](?:\.content(?:\[\d+\](?:\.text)?)?)?")


class ChatMessages:
    """Plain dicts, as a chat's body has them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places: list[str] = []

    def add(self, role: str, texts: list[str], place: str, **members: Any) -> None:
        """One text as it is, several as parts: a template knows how it puts them together."""
        content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
        self._append({"role": role, "content": content if texts else "", **members}, place)

    def add_user(self, texts: list[str], place: str) -> None:
        """The same, put together with what the user has said just before."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "user":
            self.add("user", texts, place)
            return
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"] += [{"type": "text", "text": text} for text in texts]

    def add_system(self, text: str, place: str) -> None:
        """Before all others; a further one is put behind the first, because many templates know but one."""
        if self.messages and self.messages[-1]["role"] == "system":
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self._append({"role": "system", "content": text}, place)

    def assistant(self, place: str, *, new: bool = False) -> dict[str, Any]:
        """The assistant's message at the end of the conversation; one is begun where there is none, or a `new` one is
        wanted."""
        if new or not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": ""}, place)
        return self.messages[-1]

    def say(self, text: str, place: str) -> None:
        """Words of the assistant, behind those it has said; behind its calls they are another message."""
        message = self.assistant(place)
        if "tool_calls" in message:
            message = self.assistant(place, new=True)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text

    def think(self, text: str, place: str) -> None:
        """Thoughts of the assistant, before what it says next."""
        message = self.assistant(place)
        if message["content"] or "tool_calls" in message:
            message = self.assistant(place, new=True)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any, place: str) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self.assistant(place).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _append(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self._places.append(place)

    def place(self, match: re.Match[str]) -> str:
        number = int(match[1])
        return self._places[number] if number < len(self._places) else match[0]


def not_here(place: str, kind: Any, why: str, fix: str) -> UnsupportedOptionError:
    """Of a part of a body that names its kind, which is none of those that can be done."""
    return UnsupportedOptionError(
        f"{place}: type {str(kind)[:50]!r} is not supported here: {why}", fix=fix, field=place
    )


@contextmanager
def told_as(messages: ChatMessages, names: Mapping[str, str]) -> Iterator[None]:
    """An error about a field of the chat names what the client has sent. `names`: of fields, here and there."""
    try:
        yield
    except HoldfastError as error:
        before = error.field
        if before is not None:
            head, dot, rest = _PLACE.sub(messages.place, before).partition(".")
            error.field = names.get(before) or names.get(head, head) + dot + rest
        error.message = _PLACE.sub(messages.place, error.message)
        if before in names and error.message.startswith(before or ""):
            error.message = f"{names[before or '']}{error.message.removeprefix(before or '')}"
        raise
