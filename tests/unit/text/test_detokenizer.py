"""Streams of ids: whole characters only, exactly decode()'s text, cut exactly at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from holdfast.text.output.detokenizer import Detokenizer
from holdfast.text.tokenizer.tokenizer import Tokenizer

SHARED = settings(
    deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ID = st.integers(0, 280)


def push_all(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    """In groups of the given sizes, the rest one by one, then the flush."""
    deltas, start = [], 0
    for size in cuts:
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
    deltas += [detokenizer.push([token]) for token in ids[start:]]
    return [*deltas, detokenizer.flush()]


def first_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The plain definition: read character by character until a stop is complete; the longest of those that are."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@SHARED
@given(ids=st.lists(ID, max_size=60), cuts=st.lists(st.integers(0, 5), max_size=10), skip=st.booleans())
def test_deltas_add_up_to_decode_even_for_invalid_utf8(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    deltas = push_all(Detokenizer(byte_level, skip_special_tokens=skip), ids, cuts)
    assert "".join(deltas) == byte_level.decode(ids, skip_special_tokens=skip)


@SHARED
@given(text=st.text(), skip=st.booleans())
def test_sentencepiece_deltas_add_up_to_decode(sentencepiece: Tokenizer, text: str, skip: bool) -> None:
    ids = sentencepiece.encode(text)
    deltas = push_all(Detokenizer(sentencepiece, skip_special_tokens=skip), ids)
    assert "".join(deltas) == sentencepiece.decode(ids, skip_special_tokens=skip)


@SHARED
@given(
    ids=st.lists(ID, max_size=60),
    stops=st.lists(st.text("abcho l\ufffd", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_text_is_cut_at_the_first_stop(byte_level: Tokenizer, ids: list[int], stops: list[str], include: bool) -> None:
    detokenizer = Detokenizer(byte_level, stop=stops, include_stop=include)
    text = "".join(push_all(detokenizer, ids))
    assert (text, detokenizer.stopped_by) == first_stop(byte_level.decode(ids, True), stops, include)


@SHARED
@given(text=st.text("abc", max_size=40), stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_shown_text_never_has_to_be_taken_back(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(byte_level, stop=stops)
    final, _ = first_stop(text, stops, False)
    shown = ""
    for token in byte_level.encode(text):
        shown += detokenizer.push([token])
        assert final.startswith(shown)


def test_no_half_character_is_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀é")
    assert len(ids) == 7
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "", "😀", "", "é"]


def test_half_a_character_at_the_end_becomes_a_replacement(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push(byte_level.encode("😀")[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_hidden_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hello<|im_end|>")
    assert "".join(push_all(Detokenizer(byte_level), ids)) == "hello"
    assert "".join(push_all(Detokenizer(byte_level, skip_special_tokens=False), ids)) == "<|im_start|>hello<|im_end|>"


def test_ids_without_a_token_add_nothing(byte_level: Tokenizer) -> None:
    assert Detokenizer(byte_level).push([10_000, *byte_level.encode("hello")]) == "hello"


def test_stop_spanning_tokens_and_inside_one_token(byte_level: Tokenizer) -> None:
    spanning = Detokenizer(byte_level, stop=["o w"])
    ids = byte_level.encode("hello world")
    assert len(ids) == 2
    assert spanning.push(ids[:1]) == "hell"
    assert spanning.push(ids[1:]) == ""
    assert (spanning.stopped_by, spanning.tokens_used) == ("o w", 2)
    inside = Detokenizer(byte_level, stop=["ll"])
    assert inside.push(ids) == "he"
    assert (inside.stopped_by, inside.tokens_used) == ("ll", 1)
    assert inside.push(ids) == ""
    assert inside.flush() == ""
    assert inside.tokens_used == 1


def test_include_stop_cuts_behind_it(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=["ll"], include_stop=True)
    assert detokenizer.push(byte_level.encode("hello world")) == "hell"


def test_the_stop_complete_first_wins(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=["abcx", "bc"])
    assert detokenizer.push(byte_level.encode("abcx")) == "a"
    assert detokenizer.stopped_by == "bc"


def test_held_text_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=["hello!"])
    assert detokenizer.push(byte_level.encode("hello")) == ""
    assert detokenizer.flush() == "hello"
    assert detokenizer.stopped_by is None


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, ""), (1, "ax"), (2, "ax"), (3, "axay"), (4, "axay"), (5, "axaya")]
)
def test_stops_within_min_tokens_are_passed_over(byte_level: Tokenizer, min_tokens: int, shown: str) -> None:
    detokenizer = Detokenizer(byte_level, stop=["a"], min_tokens=min_tokens)
    assert "".join(push_all(detokenizer, byte_level.encode("axaya"))) == shown
    assert detokenizer.stopped_by == (None if min_tokens == 5 else "a")


def test_stop_that_begins_within_min_tokens_counts_when_it_ends_behind(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=["xy"], min_tokens=1)
    assert "".join(push_all(detokenizer, byte_level.encode("xyz"))) == ""
    assert detokenizer.stopped_by == "xy"


def test_leading_space_depends_on_what_stands_before(sentencepiece: Tokenizer) -> None:
    world = sentencepiece.convert_tokens_to_ids("▁world")
    assert isinstance(world, int)
    assert Detokenizer(sentencepiece).push([world, world]) == "world world"
    after_text = Detokenizer(sentencepiece, prompt_tail=sentencepiece.encode("hello"))
    assert after_text.push([world]) == " world"
    after_bos = Detokenizer(sentencepiece, prompt_tail=[1])
    assert after_bos.push([world]) == "world"


def test_character_begun_by_the_prompt_is_completed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello 😀")
    detokenizer = Detokenizer(byte_level, prompt_tail=ids[:-1])
    assert detokenizer.push(ids[-1:]) == "😀"


def test_byte_fallback_shows_characters_as_they_complete(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("é😀", add_special_tokens=False)[1:]
    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.push([token]) for token in ids] == ["", "é", "", "", "", "😀"]


def test_broken_byte_runs_keep_their_good_characters(sentencepiece: Tokenizer) -> None:
    byte = {value: sentencepiece.convert_tokens_to_ids(f"<0x{value:02X}>") for value in (0xC3, 0xA9, 0xFF)}
    detokenizer = Detokenizer(sentencepiece)
    assert detokenizer.push([byte[0xC3], byte[0xA9], byte[0xFF]]) == "é\ufffd"


def test_special_tokens_in_a_row_are_written_without_a_space_where_none_is_wanted() -> None:
    """Decoders that join words by spaces would put one before every token."""
    words = ["hello", "[SEP]", "[CLS]"]
    backend = Backend(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[SEP]"))
    backend.add_special_tokens(["[SEP]", "[CLS]"])
    tokenizer = Tokenizer(backend)
    ids = [0, 1, 2, 1, 0, 2]

    def shown(**options: bool) -> str:
        return "".join(push_all(Detokenizer(tokenizer, **options), ids))

    assert shown(skip_special_tokens=False) == "hello [SEP] [CLS] [SEP] hello [CLS]"
    unspaced = shown(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert unspaced == "hello [SEP][CLS][SEP] hello [CLS]"
    assert shown(spaces_between_special_tokens=False) == shown() == "hello hello"


def test_other_decoders_stream_too() -> None:
    words = ["▁hello", "▁world", "▁", "x"]
    backend = Backend(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces is None
    ids = [0, 1, 3, 1, 0] * 20
    deltas = push_all(Detokenizer(tokenizer, stop=["never"]), ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas[1].startswith(" worl")
