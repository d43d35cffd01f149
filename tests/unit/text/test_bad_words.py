"""Bad words in real kinds of vocabularies: however a text with one is written, a spelling of it stands there."""

import pytest
from tokenizer_goldens import small

from holdfast.text.tokenizer.bad_words import spell_bad_words

NAMES = ("sentencepiece with prefix", "sentencepiece without prefix", "smollm", "qwen2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", ["the", "foo", "their house", "naïve"])
@pytest.mark.parametrize("before", ["", "in ", "line\n", "line\n\n", "a  ", "a\n  ", "("])
def test_no_place_is_left_for_a_word(name: str, word: str, before: str) -> None:
    tokenizer = small(name)
    written = tokenizer.encode(before + word, add_special_tokens=False)
    spellings = spell_bad_words([word], tokenizer)
    assert any(written[-len(spelling) :] == spelling for spelling in spellings)


@pytest.mark.parametrize("name", NAMES)
def test_a_word_needs_no_more_than_two_spellings(name: str) -> None:
    """For 128 words there is room for twice as many."""
    for word in ("the", "foo", "their house", "naïve"):
        assert len(spell_bad_words([word], small(name))) <= 2


def test_sentencepiece_spells_a_word_with_its_mark_and_without() -> None:
    tokenizer = small("sentencepiece with prefix")
    assert tokenizer.pieces is not None
    spelled = [
        [tokenizer.pieces.bytes_of(token) for token in spelling] for spelling in spell_bad_words(["the"], tokenizer)
    ]
    assert sorted(spelled) == [[b" the"], [b"the"]]
