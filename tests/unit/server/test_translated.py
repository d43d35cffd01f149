"""Conversations of other APIs are put together in one pass, and bounded before they are."""

from __future__ import annotations

import pytest

from holdfast.errors import RequestError
from holdfast.server.anthropic.read import _read_message
from holdfast.server.openai_responses.items import to_messages
from holdfast.server.request.messages import MAX_PARTS
from holdfast.server.request.translated import ChatMessages, check_counts


class Piece(str):
    """A text that may be joined with others, and not be put behind them one by one."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise AssertionError("copied for one block")

    def __radd__(self, other: str) -> str:
        raise AssertionError("copied for one block")


def test_texts_that_become_one_message_are_joined_once():
    messages = ChatMessages()
    for number in "12":
        messages.add_system(Piece(number), "system")
    for number in "34":
        messages.think(Piece(number), "thoughts")
    for text in ("", "5", "6", ""):
        messages.say(Piece(text), "said")
    messages.call("c", "name", {}, "call")
    messages.say(Piece("7"), "behind")
    messages.think(Piece("8"), "again")
    call = {"id": "c", "type": "function", "function": {"name": "name", "arguments": {}}}
    expected = [
        {"role": "system", "content": "1\n\n2"},
        {"role": "assistant", "content": "5\n6\n", "reasoning_content": "34", "tool_calls": [call]},
        {"role": "assistant", "content": "7"},
        {"role": "assistant", "content": "", "reasoning_content": "8"},
    ]
    assert messages.messages == expected
    assert messages.messages == expected
    messages.say("9", "said")
    assert messages.messages[-1]["content"] == "9"


def test_blocks_of_an_assistant_make_one_message():
    messages = ChatMessages()
    blocks = [{"type": "text", "text": Piece("a")}] * 3
    _read_message({"role": "assistant", "content": blocks}, messages, "messages[0]")
    assert messages.messages == [{"role": "assistant", "content": "a\na\na"}]


TEXT = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "assistant", "content": ""}] * (MAX_PARTS + 1),
        [{"role": "assistant", "content": [TEXT] * (MAX_PARTS + 1)}],
        [{"role": "assistant", "content": [TEXT] * (MAX_PARTS // 2 + 1)}] * 2,
        [{"role": "user", "content": [{"type": "tool_result", "content": [TEXT] * MAX_PARTS}]}],
    ],
)
def test_too_many_are_refused_before_they_are_put_together(conversation):
    with pytest.raises(RequestError) as caught:
        check_counts(conversation, "messages", "content")
    assert (caught.value.field, caught.value.needed) == ("messages", f"at most {MAX_PARTS}")
    check_counts([{"role": "user", "content": [TEXT] * MAX_PARTS}] + [{"role": "user"}] * 10, "messages", "content")


def test_items_and_those_before_them_count_together():
    half = [{"type": "message", "role": "assistant", "content": "a"}] * (MAX_PARTS // 2)
    assert len(to_messages(None, half, half).messages) == 1
    with pytest.raises(RequestError, match="input: too many"):
        to_messages(None, [*half, half[0]], half)
