"""Other APIs' conversations as messages of a chat, and errors about these told in the words of the API they came from.

Owns how messages are put together and where each came from. Knows no API: `anthropic` and `openai_responses` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.errors import HoldfastError, RequestError, UnsupportedOptionError
from holdfast.server.request.chat import MAX_MESSAGES
from holdfast.server.request.messages import MAX_PARTS

_PLACE = re.compile(r"messages\[(\d+)\](?:\.content(?:\[\d+\](?:\.text)?)?)?")


class ChatMessages:
    """Plain dicts, as a chat's body has them. Texts that become one are kept apart until all are there: thousands of
    blocks that were each put behind a growing text would hold the event loop for minutes."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._places: list[str] = []
        self._texts: list[str] = []
        """Of the last message: what its content is joined of, with `_between` between them."""
        self._between = ""
        self._thoughts: list[str] = []
        """Of the last message too."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._join()
        return self._messages

    def add(self, role: str, texts: list[str], place: str, **members: Any) -> None:
        """One text as it is, several as parts: a template knows how it puts them together."""
        content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
        self._append({"role": role, "content": content if texts else "", **members}, place)

    def add_user(self, texts: list[str], place: str) -> None:
        """The same, put together with what the user has said just before."""
        if self._last_role != "user":
            self.add("user", texts, place)
            return
        last = self._messages[-1]
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"] += [{"type": "text", "text": text} for text in texts]

    def add_system(self, text: str, place: str) -> None:
        """Before all others; a further one is put behind the first, because many templates know but one."""
        if self._last_role != "system":
            self._append({"role": "system", "content": ""}, place)
            self._between = "\n\n"
        self._texts.append(text)

    def assistant(self, place: str, *, new: bool = False) -> dict[str, Any]:
        """The assistant's message at the end of the conversation; one is begun where there is none, or a `new` one is
        wanted."""
        if new or self._last_role != "assistant":
            self._append({"role": "assistant", "content": ""}, place)
            self._between = "\n"
        return self._messages[-1]

    def say(self, text: str, place: str) -> None:
        """Words of the assistant, behind those it has said; behind its calls they are another message."""
        if "tool_calls" in self.assistant(place):
            self.assistant(place, new=True)
        if text or self._texts:
            self._texts.append(text)

    def think(self, text: str, place: str) -> None:
        """Thoughts of the assistant, before what it says next."""
        if "tool_calls" in self.assistant(place) or self._texts:
            self.assistant(place, new=True)
        self._thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: Any, place: str) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self.assistant(place).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    @property
    def _last_role(self) -> str | None:
        return self._messages[-1]["role"] if self._messages else None

    def _append(self, message: dict[str, Any], place: str) -> None:
        self._join()
        self._texts, self._thoughts = [], []
        self._messages.append(message)
        self._places.append(place)

    def _join(self) -> None:
        if self._texts:
            self._messages[-1]["content"] = self._between.join(self._texts)
        if self._thoughts:
            self._messages[-1]["reasoning_content"] = "".join(self._thoughts)

    def place(self, match: re.Match[str]) -> str:
        number = int(match[1])
        return self._places[number] if number < len(self._places) else match[0]


def check_counts(conversation: Sequence[Mapping[str, Any]], field: str, *members: str) -> None:
    """A chat's own bounds, before anything is translated: many become one message, which a chat would count as one.
    `members`: of one in the conversation, which may be lists of parts; so may the same members of a part."""
    parts = [part for one in conversation for part in _parts_of(one, members)]
    count = len(parts) + sum(1 for part in parts if isinstance(part, dict) for _ in _parts_of(part, members))
    for found, most, what in (
        (len(conversation), MAX_MESSAGES, "messages or items"),
        (count, MAX_PARTS, "content parts"),
    ):
        if found > most:
            raise RequestError(
                f"{field}: too many {what} in one request", needed=f"at most {most}", found=str(found), field=field
            )


def _parts_of(one: Mapping[str, Any], members: tuple[str, ...]) -> Iterator[Any]:
    for name in members:
        value = one.get(name)
        if isinstance(value, list):
            yield from value


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
