"""How bad words are spelled in tokens: at the start of a text, and after a space. Knows no requests and no sampling."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import RequestError
from holdfast.records.sampling import MAX_BAD_WORD_TOKENS
from holdfast.text.tokenizer import Tokenizer
from holdfast.units import shorten


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Both spellings of each. vLLM leaves out the one after a space where it has another length, and so lets a word
    through that is one token after a space and two at a start."""
    spellings: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        for spelling in (plain, spaced):
            if not 1 <= len(spelling) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: {shorten(repr(word))} is spelled in {len(spelling)} tokens",
                    needed=f"from 1 to {MAX_BAD_WORD_TOKENS} tokens",
                    found=str(len(spelling)),
                    field="bad_words",
                )
        spellings += [plain] if plain == spaced else [plain, spaced]
    return spellings
