"""How bad words are spelled in tokens: at the start of a text, after a space, and after a newline. Knows no requests
and no sampling."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import RequestError
from holdfast.records.sampling import MAX_BAD_SPELLINGS, MAX_BAD_WORD_TOKENS
from holdfast.text.tokenizer.tokenizer import Tokenizer
from holdfast.units import shorten


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """All that is needed of each. vLLM leaves out the one after a space where it has another length, and so lets a word
    through that is one token after a space and two at a start; and the one that SentencePiece writes after a newline,
    where no mark stands before the word."""
    spellings = [spelling for word in words for spelling in _spell(word, tokenizer)]
    if len(spellings) > MAX_BAD_SPELLINGS:
        raise RequestError(
            f"bad_words: {len(words)} words have {len(spellings)} tokenizations",
            needed=f"at most {MAX_BAD_SPELLINGS}",
            found=str(len(spellings)),
            fix="send fewer words",
            field="bad_words",
        )
    return spellings


def _spell(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    bare = word.lstrip()
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
    newline, lined = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n" + bare))
    # Where the newline has become part of a token of the word, that is a spelling as well.
    after_newline = lined[len(newline) :] if lined[: len(newline)] == newline else lined
    found = sorted((plain, spaced, after_newline), key=len)
    kept: list[list[int]] = []
    for spelling in found:
        if not spelling:
            raise _beyond(word, spelling)
        # What ends in another spelling is never written either.
        if not any(spelling[-len(other) :] == other for other in kept):
            kept.append(spelling)
    for spelling in kept:
        if len(spelling) > MAX_BAD_WORD_TOKENS:
            raise _beyond(word, spelling)
    return kept


def _beyond(word: str, spelling: list[int]) -> RequestError:
    return RequestError(
        f"bad_words: {shorten(repr(word))} has {len(spelling)} tokens",
        needed=f"from 1 to {MAX_BAD_WORD_TOKENS} tokens",
        found=str(len(spelling)),
        field="bad_words",
    )
