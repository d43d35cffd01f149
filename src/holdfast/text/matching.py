"""llguidance behind one door: vocabularies, grammars compiled within limits, matchers, masks of tokens.

Knows bytes of tokens and nothing of requests. Compiling runs on a thread with a deep stack: the library descends by
recursion, and a schema of some ten thousand bytes would otherwise end the process.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from holdfast.errors import GrammarError, RequestError
from holdfast.records.structured import StructuredOutputsParams, Vocabulary
from holdfast.text.grammar import grammar_of
from holdfast.text.tokenizer import Tokenizer
from holdfast.text.walking import LIMITS, Walker
from holdfast.units import shorten

if TYPE_CHECKING:
    import numpy
    import numpy.typing

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Of addresses; memory is taken only for what is used. A chain of references as long as a schema may be needed some
60 MiB."""
MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Of those that fill masks together."""
COMPILED_KEPT = 8
COMPILED_KEPT_BYTES = 256 << 10
"""Of forms as they are written: what is compiled takes some sixty times as much."""
CHECKED_KEPT = 256
LOOKED_AT_BYTES = 4 << 10
"""Of a form, as it is written, that a text is held against while nothing else goes on."""
STEPS_TRIED, STEPS_CHECKED = 4, 16
"""With all tokens, where masks are filled; and with some of them, where requests come in."""
TOKENS_CHECKED = 2048
"""So many of a vocabulary, the longest and some of all others, are as good as all to see what explodes."""
FORCED_CHARS = 4096
"""Of what a grammar forces, that are cut into tokens: a mask needs the first token alone, and no other thread runs
meanwhile."""
NOTHING_FITS = "nothing can be written that has this form"
INVALID, BEYOND_LIMITS = "HF361", "HF362"
_LISTING = re.compile(r"\n *\d+ \||\n?<non-verbose/>")
"""Where what a library says turns to the source itself."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""In a grammar that was made of what was asked for."""
_ADVICE = re.compile(r"\. Enable '\w+' option.*")
"""Of the library, about what no field here has."""
_LIMITED = ("too many", "Too many", "too large", "too complex", "fuel", "limit", "too deep", "max is", "TooComplex")


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

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int], slices: list[str] | None
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_ids[0]
        self._cut: Callable[[str], list[int]] = lambda text: []
        given: Any = self
        # Nothing else of the process runs meanwhile.
        self.library = LLTokenizer(given, n_vocab=len(tokens), eos_token=list(eos_ids), slices=slices)
        self._cut = self.library.greedy_tokenize
        self.tokens = ()  # The library has its own copy.

    def __call__(self, text: str) -> list[int]:
        return self._cut(text[:FORCED_CHARS])


class Matcher:
    """One answer as it grows."""

    def __init__(self, matcher: LLMatcher, kin: int = 0) -> None:
        """`kin`: the same for all copies of one that was compiled."""
        self.library, self.kin = matcher, kin

    def consume(self, token: int) -> bool:
        """False: the token is not one that may follow; the matcher is of no use any more."""
        return self.library.consume_token(token)

    def consume_all(self, tokens: list[int]) -> bool:
        return self.library.consume_tokens(tokens) if tokens else True

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return self.library.is_stopped() and not self.library.is_error()

    def fill(self, words: numpy.typing.NDArray[numpy.int32]) -> None:
        """A bit for each token that may follow; lets other threads go on meanwhile."""
        self.library.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    @property
    def error(self) -> GrammarError | None:
        said = self.library.get_error()
        return _refusal(said, "structured_outputs") if said else None


class MaskPool:
    """Fills masks of many answers at once, on threads of the library's own and without Python between them."""

    def __init__(self) -> None:
        self._library = LLExecutor(MASK_THREADS)

    def fill(self, matchers: Sequence[Matcher], words: numpy.typing.NDArray[numpy.int32]) -> None:
        """words [matchers, words of a mask], contiguous. Lets other threads go on meanwhile."""
        # Each thread has neighbours: kin, which lock each other out, on one of them.
        order = sorted(range(len(matchers)), key=lambda row: matchers[row].kin)
        wanted = [(matchers[row].library, row) for row in order]
        self._library.unsafe_compute_mask_ptr(wanted, words.ctypes.data, words.strides[0], len(words))


class _Compiled:
    """One grammar, as often as it pays: copies of the same lock each other out while masks are filled."""

    def __init__(self, first: LLMatcher) -> None:
        self.originals = [first]
        self.copies = 0

    @property
    def pays(self) -> bool:
        """To compile it once more, for more threads to have one each."""
        return self.copies >= 2 * len(self.originals) and len(self.originals) < MASK_THREADS

    def copy(self) -> Matcher:
        self.copies += 1
        original = self.originals[self.copies % len(self.originals)]
        return Matcher(original.deep_copy(), id(original))


class Grammars:
    """Compiles for one vocabulary; safe to use from several threads. The `kept` used last stay compiled. `steps`: how
    far each is tried out."""

    def __init__(
        self, vocabulary: Vocabulary, eos_ids: Sequence[int], vocab_size: int, *, kept: int = COMPILED_KEPT,
        steps: int = STEPS_TRIED,
    ) -> None:  # fmt: skip
        self._kept, self._steps = kept, steps
        self._special = {name: token for name, token in vocabulary.special.items() if token < vocab_size}
        tokens = vocabulary.tokens[:vocab_size]
        tokens += [b""] * (vocab_size - len(tokens))  # An embedding may have more rows than there are tokens.
        # Tokens that are often allowed together are looked at together, which pays where masks are many.
        slices = None if kept else list[str]()
        self._tokens = _Tokens(tokens, list(self._special.values()), eos_ids, slices)
        self._walker = Walker(tokens, eos_ids)
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        key = msgspec.json.encode(params)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
                if not known.pays:
                    return known.copy()
        made = on_deep_stack(lambda: self._compile(params))
        with self._lock:
            known = self._compiled.get(key)
            if known is None:
                known = self._compiled[key] = _Compiled(made)
            elif known.pays:
                known.originals.append(made)
            written = sum(len(one) * len(compiled.originals) for one, compiled in self._compiled.items())
            while self._compiled and (len(self._compiled) > self._kept or written > COMPILED_KEPT_BYTES):
                oldest, dropped = self._compiled.popitem(last=False)
                written -= len(oldest) * len(dropped.originals)
            return known.copy()

    def cut(self, text: str) -> list[int]:
        """Into the longest tokens there are."""
        return self._tokens.library.greedy_tokenize(text)

    def untried(self, params: StructuredOutputsParams) -> LLMatcher:
        """Of a form that was tried out as a part of another, or with a matcher that is in error."""
        grammar = grammar_of(params, self._special.get)
        return LLMatcher(self._tokens.library, grammar, log_level=0, limits=LIMITS)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        made = self.untried(params)
        said = made.get_error() or self._walker.why_not(made.deep_copy(), self._steps)
        if said:
            raise _refusal(said, params.kind, params.asked_as)
        return made


class FormChecker:
    """Whether what is asked for can be compiled and begun, with the single bytes and some tokens of a vocabulary:
    small, and the same grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = vocabulary_of(tokenizer)
        tokens, free = _some(vocabulary), 0
        for byte in range(256):
            while tokens[free]:
                free += 1
            tokens[free] = bytes([byte])
        ends = [len(tokens) - 1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
        some = Vocabulary(tokens, vocabulary.special)
        self._grammars = Grammars(some, ends, len(tokens), kept=0, steps=STEPS_CHECKED)
        self.packed = msgspec.msgpack.encode(vocabulary)
        """What an engine process is taught."""
        self._checked: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._looked_at: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, params: StructuredOutputsParams) -> None:
        key = hashlib.sha256(msgspec.json.encode(params)).digest()
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

    def accepts(self, text: str, params: StructuredOutputsParams) -> bool:
        key = msgspec.json.encode(params)
        if len(key) > LOOKED_AT_BYTES:
            return False
        with self._lock:
            known = self._looked_at.pop(key, None)
        if known is None:
            try:
                known = on_deep_stack(lambda: self._grammars.untried(params))
            except GrammarError:
                return False
        with self._lock:
            self._looked_at[key] = known
            while len(self._looked_at) > COMPILED_KEPT:
                self._looked_at.popitem(last=False)
            matcher = known.deep_copy()
        return Matcher(matcher).consume_all(self._grammars.cut(text)) and matcher.is_accepting()

    def _problem(self, params: StructuredOutputsParams) -> GrammarError | None:
        try:
            self._grammars.matcher(params)
        except GrammarError as error:
            return error
        return None


def _some(vocabulary: Vocabulary) -> list[bytes]:
    """With the ids they have, special ones among them; nothing where the others are, and room for all bytes behind."""
    tokens = vocabulary.tokens
    longest = sorted(range(len(tokens)), key=lambda token: len(tokens[token]))[-TOKENS_CHECKED // 2 :]
    chosen = {*longest, *range(0, len(tokens), max(len(tokens) * 2 // TOKENS_CHECKED, 1)), *vocabulary.special.values()}
    return [spelled if token in chosen else b"" for token, spelled in enumerate(tokens)] + [b""] * 257


_CHECKERS: WeakKeyDictionary[Tokenizer, FormChecker] = WeakKeyDictionary()
_MAKING = threading.Lock()


def check_form(params: StructuredOutputsParams, tokenizer: Tokenizer) -> None:
    """Raises GrammarError for what is invalid, unsupported or too large. May take a second: not for an event loop,
    unless the same was asked before."""
    _checker(tokenizer).check(params)


def has_form(text: str, params: StructuredOutputsParams, tokenizer: Tokenizer) -> bool:
    """Whether a text that is there has the form, members of objects in the order of the schema; for forms that were
    checked as a part of another. Takes milliseconds: long ones are not looked at, and no text has them."""
    return _checker(tokenizer).accepts(text, params)


def packed_vocabulary(tokenizer: Tokenizer) -> bytes:
    """As `Vocabulary` travels; at hand once a form was checked."""
    return _checker(tokenizer).packed


def _checker(tokenizer: Tokenizer) -> FormChecker:
    with _MAKING:
        known = _CHECKERS.get(tokenizer)
        if known is None:
            known = _CHECKERS[tokenizer] = FormChecker(tokenizer)
        return known


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
        fix="a simpler one" if limited else None,
        field=named,
    )
