"""How one request wants its tokens chosen: vLLM's names, checked when made. Scripts may change theirs afterwards, as in
vLLM: whoever takes one checks a copy of it (`checked`) and keeps that."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import msgspec

from holdfast.errors import RequestError, UnknownParameterError, UnsupportedOptionError
from holdfast.records.beams import RequestOutputKind
from holdfast.records.structured import StructuredOutputsParams
from holdfast.units import shorten

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing logits by it would overflow float32."""

LEAST_PENALTY = 0.0001
"""By less logits would be divided into what is no number any more."""
MAX_LOGPROBS = 20
WHOLE_VOCABULARY = -1
"""Of prompt_logprobs: as many as there are tokens; whether that may be asked for is the engine's to say."""
SCORED_ENTRIES = 2**18
"""Log-probabilities of a prompt that one row of a step tells, where a token has more than 20 of them; of one token at
least."""
LOGPROBS_NEEDED = f"from 0 to {MAX_LOGPROBS}; -1, the whole vocabulary, is more than memory is planned for"
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 15
"""Of one spelling of a bad word."""
MAX_BAD_SPELLINGS = 2 * MAX_BAD_WORDS
"""Of all words together: a GPU keeps room for as many."""
MAX_STOP_IDS = 1000
"""With the model's own ends no more than biases: a GPU keeps room for as many of both."""

NOT_YET = {"logits_processors": "code out of a request is never run"}


REFUSED = {
    "use_beam_search": "LLM.beam_search does it, with BeamSearchParams",
    "best_of": "all n completions are returned; the caller chooses the best",
    "truncate_prompt_tokens": "prompts are never truncated",
}
"""vLLM's names; what asks for nothing (False, None, 1) is passed over."""
_WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_REAL = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class _Spelling(type(msgspec.Struct)):  # type: ignore[misc]
    """A misspelt name never reaches the Struct, whose own TypeError could not say which name was meant."""

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        for name, reason in REFUSED.items():
            asked = named.pop(name, None)
            if asked is not None and asked is not False and (asked is True or asked != 1):
                raise UnsupportedOptionError(f"{name} is not supported: {reason}", fix=f"leave {name} out", field=name)
        _refuse_unknown(named)
        return super().__call__(*positional, **named)


class SamplingParams(msgspec.Struct, metaclass=_Spelling, kw_only=True, omit_defaults=True):
    n: int = 1
    """Answers to the same prompt."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """Together with the position in the answer, all that the random numbers depend on."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as far as the context goes."""
    min_tokens: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one."""
    logprob_token_ids: list[int] | None = None
    """With logprobs: which tokens to report beside the chosen one, in place of the likeliest."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first. What is wanted of a prompt is not taken from the cache."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    spaces_between_special_tokens: bool = True
    """Where special tokens are shown: False writes those that follow each other without a space between."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    """Nothing else is ever sampled."""
    bad_words: list[str] | None = None
    """Never written in the answer, neither at its start nor after a space or a newline: the last token of one is not
    sampled where those before it stand."""

    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must look like; as a dict of its fields too."""
    guided_decoding: StructuredOutputsParams | None = None
    """Its older name; what is given under it is kept under the newer one."""

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of an engine that is stepped has: all so far, what is new, or nothing before the end. LLM gives
    whole answers."""
    extra_args: dict[str, Any] | None = None
    """For custom code in vLLM, of which there is none here: kept, and read by nobody."""

    # Known names whose work is not there yet: set to anything but their default, they are refused by name.
    logits_processors: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._refuse_unsupported()
        self.structured_outputs = self._form()
        self.guided_decoding = None
        self._check_kinds()
        for name, value in self._numbers():
            setattr(self, name, value)
        if self.top_k == -1:
            self.top_k = 0
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert not isinstance(self.stop, str)
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    def replace(self, **changes: Any) -> SamplingParams:
        _refuse_unknown(changes)
        return msgspec.structs.replace(self, **changes)

    def clone(self) -> SamplingParams:
        """Another of the same, which shares no list with this one."""
        return copy.deepcopy(self)

    def checked(self) -> SamplingParams:
        """A copy, checked again: values may have been set since it was made."""
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        return SamplingParams(**copy.deepcopy(named))

    def _refuse_unsupported(self) -> None:
        for name, reason in NOT_YET.items():
            if getattr(self, name) not in (None, [], {}):
                raise UnsupportedOptionError(f"{name} is not supported: {reason}", fix=f"leave {name} out", field=name)

    def _form(self) -> StructuredOutputsParams | None:
        given = [
            (name, value)
            for name in ("structured_outputs", "guided_decoding")
            if (value := getattr(self, name)) is not None
        ]
        if len(given) > 1:
            raise RequestError(
                "guided_decoding is the older name of structured_outputs, and both are given",
                fix="leave guided_decoding out",
                field="guided_decoding",
            )
        for name, value in given:
            if isinstance(value, StructuredOutputsParams):
                return value
            if not isinstance(value, Mapping):
                raise _wrong_kind(name, "StructuredOutputsParams, or a dict of its fields", value)
            try:
                return StructuredOutputsParams(**value)
            except TypeError as error:
                raise RequestError(f"{name}: {error}", field=name) from None
        return None

    def _check_kinds(self) -> None:
        """A text is a sequence too: taken for a list, its letters would be the entries."""

        def listed(name: str, of: str) -> list[Any]:
            value = getattr(self, name)
            if value is None:
                return []
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
                raise _wrong_kind(name, f"a list of {of}", value)
            return list(value)

        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            listed(name, "token ids")
        for name in ("stop", "bad_words"):
            for entry in listed(name, "strings"):
                if not isinstance(entry, str):
                    raise _wrong_kind(name, "a list of strings", entry)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise _wrong_kind("logit_bias", "a dict from token ids to numbers", self.logit_bias)

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Numbers as Python's own, whoever made them (numpy's are encoded by nobody); what is none is refused."""
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise _wrong_kind(name, "a whole number", value)
            yield name, int(value)
        for name in _REAL:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise _wrong_kind(name, "a number", value)
            yield name, float(value)
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise _wrong_kind(name, "True or False", value)
        if self.logit_bias is not None:
            try:
                yield "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()}
            except (TypeError, ValueError):
                raise _wrong_kind("logit_bias", "a dict from token ids to numbers", self.logit_bias) from None

    def _check(self) -> None:
        def need(good: bool, field: str, needed: str) -> None:
            if not good:
                found = shorten(repr(value) if isinstance(value := getattr(self, field), str) else value)
                raise RequestError(f"{field} is {found}; it must be {needed}", needed=needed, found=found, field=field)

        need(1 <= self.n <= 128, "n", "from 1 to 128")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2")
        need(LEAST_PENALTY <= self.repetition_penalty <= 10, "repetition_penalty", f"from {LEAST_PENALTY} to 10")
        need(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "from 0 to 100")
        need(0 < self.top_p <= 1, "top_p", "above 0, at most 1")
        need(self.top_k >= 0, "top_k", "-1 or 0 (off), or a positive number")
        need(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "0 or more")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        need(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", LOGPROBS_NEEDED)
        need(
            not self.logprob_token_ids or len(self.logprob_token_ids) <= MAX_LOGPROBS,
            "logprob_token_ids",
            f"at most {MAX_LOGPROBS} ids",
        )
        need(
            not self.logprob_token_ids or self.logprobs is not None,
            "logprob_token_ids",
            "left out, or sent with logprobs",
        )
        need(
            self.prompt_logprobs is None or self.prompt_logprobs >= WHOLE_VOCABULARY,
            "prompt_logprobs",
            f"from 0 to {MAX_LOGPROBS}, or -1: the whole vocabulary",
        )
        need(len(self.stop_strings) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        need(
            all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop_strings),
            "stop",
            f"strings of 1 to {MAX_STOP_CHARS} characters",
        )
        need(self.detokenize or not self.stop_strings, "stop", "empty when detokenize is off: stop strings need text")
        need(len(self.stop_ids) <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS} ids")
        need(len(self.logit_bias or {}) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} entries")
        allowed, words = self.allowed_token_ids, self.bad_words or []
        need(
            allowed is None or 1 <= len(allowed) <= MAX_ALLOWED_IDS,
            "allowed_token_ids",
            f"from 1 to {MAX_ALLOWED_IDS} ids, or left out",
        )
        need(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        need(
            all(word.strip() and len(word) <= MAX_STOP_CHARS for word in words),
            "bad_words",
            f"words of 1 to {MAX_STOP_CHARS} characters",
        )
        need(
            all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values()),
            "logit_bias",
            "biases from -100 to 100",
        )


def _wrong_kind(field: str, needed: str, value: object) -> RequestError:
    found = f"{shorten(repr(value))} ({type(value).__name__})"
    return RequestError(
        f"{field} must be {needed}; found {found}",
        needed=needed,
        found=found,
        fix=f"{field}=[{shorten(repr(value))}]" if isinstance(value, str) and field in ("stop", "bad_words") else None,
        field=field,
    )


def _refuse_unknown(names: Iterable[str]) -> None:
    known = SamplingParams.__struct_fields__
    for name in names:
        if name not in known:
            shown, near = shorten(name), difflib.get_close_matches(name, known, n=1)
            raise UnknownParameterError(
                f"SamplingParams has no parameter {shown!r}",
                fix=f"did you mean {near[0]}?" if near else "known: " + ", ".join(n for n in known if n not in NOT_YET),
                field=shown,
            )
