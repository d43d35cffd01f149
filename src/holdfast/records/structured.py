"""What an answer must look like: vLLM's names, checked when made, bounded in size. What a schema or grammar means is
`text`'s to say."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.units import shorten

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of them is asked for."""

MAX_SCHEMA_BYTES = 128 << 10
LARGE_BYTES = 16 << 10
"""Of a grammar as JSON: one that is larger may take seconds to compile, and no smaller one waits for it."""
MAX_DEPTH = 64
"""Of a schema's lists and objects in each other."""
MAX_REGEX_CHARS = 16 << 10
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 << 10
"""Of all of them together."""

LEAST_WHOLE, MOST_WHOLE = -(1 << 63), (1 << 64) - 1
MOST_AS_FLOAT = 10**300
"""Of a bound."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_BLANK = re.compile(
    r"(?:[ \t\r\n]|\\[nrts ]|\\x(?:20|0[9aAdD])|\\u00(?:20|0[9aAdD])|\[(?!\^)|\]|\((?:\?:)?|[)|?*+]|\{\d+(?:,\d*)?\})+"
)
"""A regular expression of JSON's white space and nothing else."""
_BACKENDS = frozenset({"auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer"})
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
OPTIONS = (*_SWITCHES, "whitespace_pattern", "backend")


def is_backend(name: str) -> bool:
    """Whether it is one of vLLM's; options may stand behind a colon (xgrammar:no-fallback)."""
    return isinstance(name, str) and name.partition(":")[0] in _BACKENDS


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, its text, or a class with model_json_schema (pydantic's); kept as the schema itself."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark as llguidance takes it, or GBNF or EBNF, told apart by how it is written."""
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    """Between the parts of JSON."""
    disable_any_whitespace: bool = False
    """JSON without any white space between its parts."""
    disable_additional_properties: bool = False
    """A schema's objects have the properties it names and no others, unless it says so itself."""
    disable_fallback: bool = False
    """There is one backend here, and none to fall back to."""
    backend: str | None = None
    """Of older vLLM, which has several; here one makes what any of them is asked for."""
    asked_as: str | None = None
    """The field in which a client wrote it: errors call it so."""

    def __post_init__(self) -> None:
        settle = msgspec.structs.force_setattr
        asked = [name for name in KINDS if _is_asked(getattr(self, name))]
        if len(asked) != 1:
            raise RequestError(
                f"structured_outputs asks for {', '.join(asked) if asked else 'nothing'}",
                needed=f"exactly one of {', '.join(KINDS)}",
                field="structured_outputs",
            )
        if self.json is not None:
            settle(self, "json", _schema(self.json))
        if self.structural_tag is not None:
            settle(self, "structural_tag", _object("structural_tag", self.structural_tag))
        if self.choice is not None:
            settle(self, "choice", _choices(self.choice))
        self._check_texts()
        for name in ("json_object", *_SWITCHES):
            if not isinstance(value := getattr(self, name), bool) and not (name == "json_object" and value is None):
                raise _wrong(name, "True or False", value)
        if self.backend is not None and not is_backend(self.backend):
            raise UnsupportedOptionError(
                f"structured outputs are not made with {shorten(str(self.backend))!r} here",
                fix="leave backend out",
                field="backend",
            )

    def _check_texts(self) -> None:
        for name, most in (
            ("regex", MAX_REGEX_CHARS),
            ("grammar", MAX_GRAMMAR_CHARS),
            ("whitespace_pattern", MAX_REGEX_CHARS),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise _wrong(name, "text", value)
            if len(value) > most:
                raise _too_large(name, f"{len(value)} characters", f"at most {most} characters")
        if self.whitespace_pattern is None:
            return
        if not _BLANK.fullmatch(self.whitespace_pattern):
            raise RequestError(
                "whitespace_pattern allows more than white space: what is written would be no JSON",
                needed=r"blanks, \n, \r, \t, \s, and classes, groups and repetitions of them",
                found=shorten(self.whitespace_pattern),
                field="whitespace_pattern",
            )
        if self.kind not in ("json", "json_object"):
            raise RequestError("whitespace_pattern goes with JSON alone", found=self.kind, field="whitespace_pattern")
        if self.disable_any_whitespace:
            raise RequestError(
                "whitespace_pattern and disable_any_whitespace exclude each other", field="whitespace_pattern"
            )

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if _is_asked(getattr(self, name)))


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """What an engine must know of tokens for structured output."""

    tokens: list[bytes]
    """By id; empty where there is none."""
    special: dict[str, int]
    """Special tokens by name: no text of an answer is ever one of them."""


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def _is_asked(value: object) -> bool:
    return value is not None and value is not False


def _schema(given: Any) -> dict[str, Any] | bool:
    """As plain JSON, whoever made it: what travels to the engine is what was checked."""
    if callable(made := getattr(given, "model_json_schema", None)):
        given = made()
    return given if isinstance(given, bool) else _object("json", given)


def _object(field: str, given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        _check_size(field, len(given))
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(given, Mapping):
        raise _wrong(field, "a JSON object, as a dict or as text", given)
    try:
        encoded = msgspec.json.encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{field} holds something that JSON has not: {error}", field=field) from None
    _check_size(field, len(encoded))
    plain: dict[str, Any] = msgspec.json.decode(encoded)
    if _deeper_than(plain, MAX_DEPTH):
        raise _too_large(field, f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH} levels of lists and objects")
    _settle_numbers(field, plain)
    return plain


def _settle_numbers(field: str, value: Any) -> None:
    """Whole numbers of more than 64 bits are what no message to the engine holds: bounds become floats, others are
    refused. No deeper than MAX_DEPTH, which was looked at before."""
    for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(one, dict | list):
            _settle_numbers(field, one)
        elif isinstance(one, int) and not LEAST_WHOLE <= one <= MOST_WHOLE:
            if key not in _BOUNDS or abs(one) > MOST_AS_FLOAT:
                raise RequestError(
                    f"{field} holds a whole number of more than 64 bits",
                    needed=f"{LEAST_WHOLE} to {MOST_WHOLE}",
                    found=f"at {shorten(str(key))}",
                    field=field,
                )
            value[key] = float(one)


def _deeper_than(value: Any, levels: int) -> bool:
    """Level by level: how deep it is must not decide how deep this goes."""
    here = [value]
    for _ in range(levels + 1):
        here = [
            child
            for one in here
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not here:
            return False
    return True


def _choices(given: Any) -> list[str]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Collection):
        raise _wrong("choice", "a list of texts, not empty", given)
    choices = list(given)
    for one in choices or [None]:
        if not isinstance(one, str):
            raise _wrong("choice", "a list of texts, not empty", given)
        if not one:
            raise RequestError("choice holds an empty text, which nobody could choose", field="choice")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICE_CHARS:
        found = f"{len(choices)} of them, {sum(map(len, choices))} characters"
        raise _too_large("choice", found, f"at most {MAX_CHOICES}, and {MAX_CHOICE_CHARS} characters in all")
    return choices


def _check_size(field: str, size: int) -> None:
    if size > MAX_SCHEMA_BYTES:
        raise _too_large(field, f"{size} bytes", f"at most {MAX_SCHEMA_BYTES} bytes")


def _too_large(field: str, found: str, needed: str) -> RequestError:
    return RequestError(f"{field} is too large: {found}", needed=needed, found=found, field=field)


def _wrong(field: str, needed: str, value: object) -> RequestError:
    found = f"{shorten(value)} ({type(value).__name__})"
    return RequestError(f"{field} must be {needed}; found {found}", needed=needed, found=found, field=field)
