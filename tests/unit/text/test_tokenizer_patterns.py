"""Which regular expressions of tokenizers are run: all that models were published with, and none that takes forever."""

from __future__ import annotations

import base64

import pytest
from tokenizers import Regex, pre_tokenizers

from holdfast.errors import CheckpointError
from holdfast.text.tokenizer import pretokenizers
from holdfast.text.tokenizer.files.regex_cost import check_pattern
from holdfast.text.tokenizer.files.regex_syntax import PatternError, parse_pattern
from holdfast.text.tokenizer.files.step_growth import MAX_GROWTH, check_steps

_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_HAN_CUT = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    + _MARKS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "llama 3": pretokenizers._LLAMA3,
    "qwen 2": pretokenizers._QWEN2,
    "tekken": pretokenizers._by_case("", r"\p{N}"),
    "gpt-4o": pretokenizers._by_case(pretokenizers._SUFFIXES + "?", r"\p{N}{1,3}"),
    "cl100k, possessive": r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*",
    "loops within loops": _MARKS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|\s*[\r\n]|\s+(?!\S)|\s+",
    "digits from the right": r"\d{1,3}(?=(?:\d{3})*\b)",
    "digits from the right, named": r"(?=(\d{3})+(?!\d))",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "without Chinese": _HAN_CUT,
    "clip": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "blanks": r" {2,}",
    "lines": r"(?:\r?\n)+(?!\r?\n)",
    **{f"by default, {place}": pattern for place, pattern in enumerate(pretokenizers._FORMAT_DEFAULT)},
    **{f"deepseek coder, {place}": pattern for place, pattern in enumerate(pretokenizers._DEEPSEEK_CODER)},
    **{f"deepseek 3, {place}": pattern for place, pattern in enumerate(pretokenizers._DEEPSEEK_V3)},
}
FOREVER = [
    "(a+)+!",
    "(a|a)*!",
    "(a*)*!",
    "(?:a|ab|b)*!",
    r"(\w+\s?)*!",
    "(?:[a-m]|[k-z])*!",
    r"(?:\p{L}|\w)+!",
    "(?:[ꙁ-ꙃ]|[ꙃ-ꙅ])*!",
    r"(?:\p{Cham}|\p{Mc})*!",
    r"(?:\x{41}|[\u0040-\u0042])*!",
    "(?i:(?:a|A)*!)",
    "(?:x[a-z]{7}y|x[a-y]{7}y)*!",
    "(?:a{1,3})*!",
    "(?:a?){25}a{25}",
    "a?" * 30 + "a" * 30,
    "(?:a|a)" * 25 + "!",
    ".*.*.*.*!",
    r"(?:.*|\w*){4}!",
    "(?:(?=(a+)+!)a)*",
    "(?:a+){20}!",
]
HARMLESS = ["(?:[a-c]|[d-f])+!", "(?:ab|cd)*!", "(?:ab)+!", ".*.*.*!", "(?:a|b)*a?!", "(?:[a-z][0-9]+)*!", r"(?:\R)+"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_are_taken(name: str) -> None:
    check_pattern(PUBLISHED[name])
    Regex(PUBLISHED[name])


@pytest.mark.parametrize("pattern", FOREVER)
def test_patterns_that_take_forever_are_refused(pattern: str) -> None:
    Regex(pattern)  # The library would take it.
    with pytest.raises(PatternError):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", HARMLESS)
def test_patterns_that_only_look_so_are_taken(pattern: str) -> None:
    check_pattern(pattern)
    text = ("ab" * 12 + "a1") * 2 + "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)  # It would give up after 10 million steps.


@pytest.mark.parametrize(
    "pattern",
    ["(a)\\1", "(?<n>a)\\g<n>", "(?~a)", "(?(1)a|b)", "(", "a)", "[a", "a\\", "*a", "\\X", "(?x) a", "a{3,1}"],
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        parse_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [
        ("", 0),
        ("a", 1),
        ("a|bc", 1),
        (" {2,}", 2),
        ("(?:ab){3}c?", 6),
        ("a(?=bcd)", 1),
        ("x*", 0),
        ("[]a]b", 2),
        (r"[\]\[]", 1),
        ("a{,3}", 0),
        ("a{b}", 4),
        (r"\p{L}\x{1F600}", 2),
        ("(?<name>ab)(?i)c", 3),
        ("[[:alpha:]&&[^a]]b", 2),
    ],
)
def test_the_fewest_characters_of_a_match(pattern: str, shortest: int) -> None:
    assert check_pattern(pattern) == shortest
    Regex(pattern)


def charsmap(longest: int) -> str:
    return base64.b64encode(b"\4\0\0\0" + bytes(4) + b"a\0" + b"b" * longest + b"\0").decode()


def test_a_table_of_characters_counts_as_its_longest_text() -> None:
    check_steps({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(MAX_GROWTH)}})
    with pytest.raises(CheckpointError) as caught:
        check_steps({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(MAX_GROWTH + 1)}})
    assert caught.value.code == "HF235"


def test_the_steps_of_published_tokenizers_are_taken() -> None:
    """mT5's, which are counted to grow most of all."""
    replace = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    check_steps(
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Precompiled", "precompiled_charsmap": charsmap(33)},
                    {"type": "Strip"},
                    replace,
                ],
            },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
            "decoder": metaspace,
        }
    )
