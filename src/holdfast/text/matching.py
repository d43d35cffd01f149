"""llguidance behind one door: vocabularies, grammars compiled within limits, matchers, masks of tokens.

Knows bytes of tokens and nothing of requests. Compiling runs on a thread with a deep stack: the library descends by
recursion, and a schema of some ten thousand bytes would otherwise end the process.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from holdfast.errors import GrammarError, RequestError
from holdfast.records.structured import StructuredOutputsParams, Vocabulary
from holdfast.text.grammar import grammar_of
from holdfast.text.tokenizer import Tokenizer
from holdfast.units import shorten

if TYPE_CHECKING:
    import numpy
    import numpy.typing

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Of addresses; memory is taken only for what is used. A chain of references as long as a schema may be needed some
60 MiB."""
MAX_STATES = 8000
"""Of a grammar's lexer."""
COMPILED_KEPT = 8
"""Each may take some megabytes."""
CHECKED_KEPT = 256
INVALID, BEYOND_LIMITS = "HF361", "HF362"
_LISTING = re.compile(r"\n *\d+ \||\n?<non-verbose/>")
"""Where what a library says turns to the source itself."""
_LIMITED = ("too many", "too large", "too complex", "fuel", "limit", "too deep", "max is", "TooComplex")


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    if tokenizer.pieces is None:
        raise RequestError(
            "the tokens of this model's tokenizer have no bytes of their own: no answer can be held to a form",
            field="structured_outputs",
        )
    spell = tokenizer.pieces.spell
    return Vocabulary([spell(token) for token in range(tokenizer.ids_end)], _special(tokenizer))


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    named = ((tokenizer.convert_ids_to_tokens(token), token) for token in tokenizer.all_special_ids)
    return {name: token for name, token in named if name is not None}


class _Tokens:
    """As llguidance wants to see a tokenizer. What a grammar forces is cut into the longest tokens there are."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_ids[0]
        self._cut: Callable[[str], list[int]] = lambda text: []
        self.library = LLTokenizer(self, n_vocab=len(tokens), eos_token=list(eos_ids))  # type: ignore[arg-type]
        self._cut = self.library.greedy_tokenize
        self.tokens = ()  # The library has its own copy.

    def __call__(self, text: str) -> list[int]:
        return self._cut(text)


class Matcher:
    """One answer as it grows."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.library = matcher

    def consume(self, token: int) -> bool:
        """False: the token is not one that may follow; the matcher is of no use any more."""
        return self.library.consume_token(token)

    def consume_all(self, tokens: list[int]) -> bool:
        return self.library.consume_tokens(tokens) if tokens else True

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def error(self) -> GrammarError | None:
        said = self.library.get_error()
        return _refusal(said, "structured_outputs") if said else None


class Grammars:
    """Compiles for one vocabulary; safe to use from several threads. The `kept` used last stay compiled."""

    def __init__(
        self, vocabulary: Vocabulary, eos_ids: Sequence[int], vocab_size: int, *, kept: int = COMPILED_KEPT
    ) -> None:
        self._kept = kept
        self._special = {name: token for name, token in vocabulary.special.items() if token < vocab_size}
        tokens = vocabulary.tokens[:vocab_size]
        tokens += [b""] * (vocab_size - len(tokens))  # An embedding may have more rows than there are tokens.
        self._tokens = _Tokens(tokens, list(self._special.values()), eos_ids)
        self._limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        key = msgspec.json.encode(params)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                return Matcher(known.deep_copy())
        made = on_deep_stack(lambda: self._compile(params))
        with self._lock:
            self._compiled[key] = made
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return Matcher(made.deep_copy())

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        grammar = grammar_of(params, self._special.get)
        made = LLMatcher(self._tokens.library, grammar, log_level=0, limits=self._limits)
        if made.is_error():
            raise _refusal(made.get_error(), params.kind)
        return made


class FormChecker:
    """Whether what is asked for can be compiled, with a vocabulary of single bytes: small, and the same grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = _special(tokenizer)
        tokens, free = [b""] * (tokenizer.ids_end + 257), 0
        for name, token in special.items():
            tokens[token] = name.encode()
        for byte in range(256):
            while tokens[free]:
                free += 1
            tokens[free] = bytes([byte])
        ends = [len(tokens) - 1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
        self._grammars = Grammars(Vocabulary(tokens, special), ends, len(tokens), kept=0)
        self.packed = msgspec.msgpack.encode(vocabulary_of(tokenizer))
        """What an engine process is taught."""
        self._checked: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, params: StructuredOutputsParams) -> None:
        key = msgspec.json.encode(params)
        with self._lock:
            if key in self._checked:
                self._checked.move_to_end(key)
                known = self._checked[key]
                if known is not None:
                    raise _again(known)
                return
        problem = self._problem(params)
        with self._lock:
            self._checked[key] = problem
            while len(self._checked) > CHECKED_KEPT:
                self._checked.popitem(last=False)
        if problem is not None:
            raise problem

    def _problem(self, params: StructuredOutputsParams) -> GrammarError | None:
        try:
            matcher = self._grammars.matcher(params)
        except GrammarError as error:
            return error
        # What can be read may still begin with nothing, or be too much for the first step already.
        matcher.library.compute_bitmask()
        said = matcher.library.get_error()
        return _refusal(said, params.kind) if said else None


_CHECKERS: WeakKeyDictionary[Tokenizer, FormChecker] = WeakKeyDictionary()
_MAKING = threading.Lock()


def check_form(params: StructuredOutputsParams, tokenizer: Tokenizer) -> None:
    """Raises GrammarError for what is invalid, unsupported or too large. May take a second: not for an event loop,
    unless the same was asked before."""
    _checker(tokenizer).check(params)


def packed_vocabulary(tokenizer: Tokenizer) -> bytes:
    """As `Vocabulary` travels; at hand once a form was checked."""
    return _checker(tokenizer).packed


def _checker(tokenizer: Tokenizer) -> FormChecker:
    with _MAKING:
        known = _CHECKERS.get(tokenizer)
        if known is None:
            known = _CHECKERS[tokenizer] = FormChecker(tokenizer)
        return known


class MaskFiller:
    """Masks of many matchers at once, on threads of the library's own."""

    def __init__(self, threads: int) -> None:
        self._executor = LLExecutor(threads)

    def fill(self, matchers: Sequence[Matcher], words: numpy.typing.NDArray[numpy.int32]) -> None:
        """Row i of `words` [rows, vocabulary / 32] for matcher i."""
        numbered = [(matcher.library, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, words.ctypes.data, words.shape[1] * 4, words.shape[0])


_STARTING = threading.Lock()


def on_deep_stack(work: Callable[[], T]) -> T:
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="grammar-compile", daemon=True)
    with _STARTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _again(error: GrammarError) -> GrammarError:
    """A new one: what is raised collects where it has been."""
    return GrammarError(error.message, code=error.code, needed=error.needed, fix=error.fix, field=error.field)


def _refusal(said: str, kind: str) -> GrammarError:
    first = " ".join(_LISTING.split(said)[0].split())
    limited = any(mark in said for mark in _LIMITED)
    return GrammarError(
        f"{kind}: {shorten(first, 300)}",
        code=BEYOND_LIMITS if limited else INVALID,
        fix="a simpler one" if limited else None,
        field=kind,
    )
