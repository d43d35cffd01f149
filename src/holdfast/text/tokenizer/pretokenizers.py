"""How byte-level vocabularies cut text before they merge, by the names that GGUF headers use for it.

Owns the table from `tokenizer.ggml.pre` to a scheme, each the cutting of the family's own tokenizer.json. Knows neither
vocabularies nor files. A name that is not here is refused by whoever asks: a wrong cut gives wrong ids, and no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(suffixes: str, digits: str) -> str:
    """Words end where lower case turns to upper: camelCase is two."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{_UPPER}*{_LOWER}+{suffixes}|{before}{_UPPER}+{_LOWER}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_FORMAT_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""What the format's own tools cut by, one after the other, where a header says "default" or nothing."""
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelScheme:
    """How one family of byte-level vocabularies cuts text before merging."""

    split: Callable[[], Any]
    whole_pieces: bool = False
    """A piece that is itself a token is taken whole, whatever its merges say."""
    nfc: bool = False
    add_bos: bool = False
    """Where the header does not say."""


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _cut(*patterns: str) -> Callable[[], Any]:
    """Each pattern cuts further what those before it left."""

    def split() -> Any:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return split


_SCHEMES: dict[tuple[str, ...], ByteLevelScheme] = {
    ("default",): ByteLevelScheme(split=_cut(*_FORMAT_DEFAULT)),
    ("gpt-2", "phi-2", "mellum", "trillion", "granite-docling", "a.x-4.0"): ByteLevelScheme(split=_gpt2_split),
    # SmolLM 1 and 2; StarCoder 2; Granite 3; Minerva.
    ("smollm", "starcoder", "refact", "minerva-7b", "command-r"): ByteLevelScheme(split=_digits_split),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"): ByteLevelScheme(
        split=_cut(_LLAMA3), whole_pieces=True, add_bos=True
    ),
    # Phi-4, OLMo 2 and Granite 4 say dbrx; SmolLM3 says smaug-bpe.
    ("dbrx", "smaug-bpe"): ByteLevelScheme(split=_cut(_LLAMA3)),
    # Qwen 2, 2.5 and 3.
    ("qwen2",): ByteLevelScheme(split=_cut(_QWEN2), nfc=True),
    ("deepseek-r1-qwen", "megrez"): ByteLevelScheme(split=_cut(_QWEN2)),
    # Mistral from Nemo on.
    ("tekken",): ByteLevelScheme(split=_cut(_by_case("", r"\p{N}")), whole_pieces=True, add_bos=True),
    # Phi-4-mini.
    ("gpt-4o", "llama4"): ByteLevelScheme(split=_cut(_by_case(_SUFFIXES + "?", r"\p{N}{1,3}"))),
    ("deepseek-coder",): ByteLevelScheme(split=_cut(*_DEEPSEEK_CODER)),
    ("deepseek-v3",): ByteLevelScheme(split=_cut(*_DEEPSEEK_V3)),
}
BYTE_LEVEL_SCHEMES: dict[str, ByteLevelScheme] = {name: scheme for names, scheme in _SCHEMES.items() for name in names}
