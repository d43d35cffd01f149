"""Prompts cut to so many tokens: which are kept, what the tokenizer adds, and how much of a long text is looked at."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from holdfast.errors import RequestError
from holdfast.server.request.parse import split_prompts, truncation_of
from holdfast.server.request.workers.tokenize_pool import Truncation
from holdfast.server.schema.requests import CompletionBody

BOS, EOS = 1000, 1001


class Words:
    """A token a word; a mark before the text and one behind it."""

    def __init__(self, *, ends: bool = True) -> None:
        self.seen_chars = 0
        self._ends = ends

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.seen_chars = max(self.seen_chars, len(text))
        ids = [int(word) for word in text.split()]
        return [BOS, *ids, *([EOS] if self._ends else [])] if add_special_tokens else ids


def encode(cut: Truncation, text: str, *, special: bool, ends: bool = True) -> list[int]:
    return cut.encode(cast(Any, Words(ends=ends)), text, add_special_tokens=special)


@pytest.mark.parametrize("side", ["left", "right"])
def test_as_many_as_are_wanted_are_kept_of_the_other_side(side):
    chance = random.Random(7)
    for _ in range(50):
        ids = [chance.randrange(1000) for _ in range(chance.randrange(1, 400))]
        keep = chance.randrange(3, 60)
        text = " ".join(map(str, ids))
        plain = encode(Truncation(keep, side), text, special=False)
        assert plain == (ids[-keep:] if side == "left" else ids[:keep])
        for ends in (True, False):
            added = 1 + ends
            full = encode(Truncation(keep, side), text, special=True, ends=ends)
            inner = (
                ids if len(ids) + added <= keep else ids[-(keep - added) :] if side == "left" else ids[: keep - added]
            )
            assert full == [BOS, *inner, *([EOS] if ends else [])]


def test_fewer_than_the_tokenizer_adds():
    assert encode(Truncation(1), "5 6 7", special=True) == [EOS]
    assert encode(Truncation(0), "5 6 7", special=True) == []
    assert encode(Truncation(0, "right"), "5 6 7", special=False) == []


def test_of_a_long_text_little_is_tokenized():
    words = Words()
    assert Truncation(4).encode(cast(Any, words), "12345 " * 100_000, add_special_tokens=True)[1:-1] == [12345] * 2
    assert words.seen_chars < 1000
    sparse = "7 " + " " * 5000 + "8"
    assert encode(Truncation(2), sparse, special=False) == [7, 8]


def body(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt="x", **fields)


def test_how_many_that_are():
    assert truncation_of(body(), 100, 16) is None
    assert truncation_of(body(truncate_prompt_tokens=5), 100, 16) == Truncation(5, "left")
    assert truncation_of(body(truncate_prompt_tokens=-1), 100, 16) == Truncation(84, "left")
    assert truncation_of(body(truncate_prompt_tokens=-1, truncation_side="right"), 100, None) == Truncation(99, "right")
    with pytest.raises(RequestError) as caught:
        truncation_of(body(truncate_prompt_tokens=85), 100, 16)
    assert caught.value.field == "truncate_prompt_tokens"


def test_ids_are_cut_before_they_are_counted():
    assert split_prompts([1, 2, 3], 2, truncation=Truncation(2)) == (None, [[2, 3]])
    assert split_prompts([[1, 2, 3], [4]], 2, truncation=Truncation(2, "right")) == (None, [[1, 2], [4]])
