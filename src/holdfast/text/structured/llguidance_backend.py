"""llguidance behind one door: vocabularies, grammars compiled within limits, matchers, masks of tokens.

Knows bytes of tokens and nothing of requests. What is compiled here may still take any time and memory, and the library
may end the process: `worker` is where it runs.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from holdfast.errors import GrammarError
from holdfast.records.structured import StructuredOutputsParams, Vocabulary
from holdfast.text.structured.grammar_probe import LIMITS, GrammarProbe
from holdfast.text.structured.syntax.grammar import grammar_of
from holdfast.units import shorten

COMPILED_KEPT = 8
COMPILED_KEPT_BYTES = 256 << 10
"""Of grammars as they are written: what is compiled takes some sixty times as much."""
STEPS_PROBED = 16
FORCED_CHARS = 4096
"""Of what a grammar forces, that are cut into tokens: a mask needs the first token alone."""
NOTHING_FITS = "the grammar matches no output"
INVALID, BEYOND_LIMITS = "HF361", "HF362"
_LISTING = re.compile(r"\n *\d+ \||\n?<non-verbose/>")
"""Where what a library says turns to the source itself."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""In a grammar that was made of what was asked for."""
_ADVICE = re.compile(r"\. Enable '\w+' option.*")
"""Of the library, about what no field here has."""
_LIMITED = ("too many", "Too many", "too large", "too complex", "fuel", "limit", "too deep", "max is", "TooComplex")


class _Tokens:
    """As llguidance wants to see a tokenizer. What a grammar forces is cut into the longest tokens there are."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_ids[0]
        self._cut: Callable[[str], list[int]] = lambda text: []
        given: Any = self
        self.library = LLTokenizer(given, n_vocab=len(tokens), eos_token=list(eos_ids))
        self._cut = self.library.greedy_tokenize
        self.tokens = ()  # The library has its own copy.

    def __call__(self, text: str) -> list[int]:
        return self._cut(text[:FORCED_CHARS])


class Matcher:
    """One answer as it grows."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self.library, self._mask_bytes = matcher, mask_bytes

    def consume(self, token: int) -> bool:
        """False: the token is not one that may follow; the matcher is of no use any more."""
        return self.library.consume_token(token)

    def consume_all(self, tokens: list[int]) -> bool:
        return self.library.consume_tokens(tokens) if tokens else True

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return self.library.is_stopped() and not self.library.is_error()

    def mask(self) -> bytes:
        """A bit for each token that may follow, in words of 32."""
        return self.library.compute_bitmask()[: self._mask_bytes]  # The library may add a word.

    @property
    def error(self) -> GrammarError | None:
        said = self.library.get_error()
        return _refusal(said, "structured_outputs") if said else None


@dataclass(frozen=True, slots=True)
class Checked:
    matcher: LLMatcher
    slowest_s: float


class Grammars:
    """Compiles for one vocabulary. The `kept` used last stay compiled."""

    def __init__(
        self, vocabulary: Vocabulary, eos_ids: Sequence[int], vocab_size: int, *, kept: int = COMPILED_KEPT
    ) -> None:
        self._kept, self._mask_bytes = kept, -(-vocab_size // 32) * 4
        self._special = {name: token for name, token in vocabulary.special.items() if token < vocab_size}
        tokens = vocabulary.tokens[:vocab_size]
        tokens += [b""] * (vocab_size - len(tokens))  # An embedding may have more rows than there are tokens.
        self._tokens = _Tokens(tokens, list(self._special.values()), eos_ids)
        self._probe = GrammarProbe(tokens, eos_ids)
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        key = msgspec.json.encode(params)
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._compile(params)
        self._compiled.move_to_end(key)
        while self._compiled and (
            len(self._compiled) > self._kept or sum(map(len, self._compiled)) > COMPILED_KEPT_BYTES
        ):
            self._compiled.popitem(last=False)
        return Matcher(known.deep_copy(), self._mask_bytes)

    def check(self, params: StructuredOutputsParams) -> Checked:
        """Compiles and tries it out; raises GrammarError for what is invalid, unsupported or too large."""
        made = self._compile(params)
        probed = self._probe.probe(made.deep_copy(), STEPS_PROBED)
        if probed.error:
            raise _refusal(probed.error, params.kind, params.asked_as)
        return Checked(made, probed.slowest_s)

    def accepts(self, text: str, params: StructuredOutputsParams) -> bool:
        """Whether the grammar matches the whole of a text."""
        matcher = self.matcher(params)
        return matcher.consume_all(self._tokens.library.greedy_tokenize(text)) and matcher.library.is_accepting()

    def forget(self) -> None:
        """Gives back what is compiled for nobody."""
        self._compiled.clear()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        grammar = grammar_of(params, self._special.get)
        made = LLMatcher(self._tokens.library, grammar, log_level=0, limits=LIMITS)
        said = made.get_error()
        if said:
            raise _refusal(said, params.kind, params.asked_as)
        return made


def _refusal(said: str, kind: str, asked_as: str | None = None) -> GrammarError:
    """`asked_as`: how the client called it."""
    first = " ".join(_LISTING.split(said)[0].split())
    if kind != "grammar" or asked_as is not None:
        first = _PLACE.sub("", first)
    first = NOTHING_FITS if "NoExtensionBias" in said else _ADVICE.sub("", first)
    limited = any(mark in said for mark in _LIMITED)
    named = asked_as or kind
    return GrammarError(
        f"{named}: {shorten(first, 300)}",
        code=BEYOND_LIMITS if limited else INVALID,
        fix="use a simpler grammar" if limited else None,
        field=named,
    )
