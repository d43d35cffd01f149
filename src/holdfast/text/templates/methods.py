"""Which attributes of which values a chat template may reach, and what each method may be given.

Whatever is not named here is refused: an upgrade of Python or Jinja that adds a method makes nothing reachable.

Every method is bounded by one of these:

    copies     as fast as memory: the limit on any value is enough
    scans      looks at each character once, at a few nanoseconds each: a limit on the text, or a slice at a time
    maps       changes each character by a table, up to 40 ns each: a smaller limit
    searches   for a word: forwards linear, backwards the product of the lengths
    grows      makes a text whose length the arguments say: checked before it is made
    compares   nested values: a limit on their weight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import _GroupTuple
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.utils import Cycler, Joiner
from markupsafe import Markup

from holdfast.text.templates import string_slices
from holdfast.text.templates.budget import Budget
from holdfast.text.templates.string_limits import padded_chars, refuse_numbers, replaced_chars, untabbed_chars

MAX_SCANNED_CHARS = 500_000
MAX_MAPPED_CHARS = 250_000
MAX_BACKWARDS = 20_000_000
"""Characters of a text times those of the word that is searched in it backwards."""
MAX_STRIPPED_KINDS = 1000
"""Characters that may be named to be stripped."""

Given = tuple[Any, ...]
Bound = Callable[[Budget, Any, Given], None]
"""Raises for what is too much, and charges the rest. Of the method's owner and its arguments."""


def _copies(budget: Budget, text: str, given: Given) -> None:
    budget.work(len(text))
    budget.written(*given)


def _scans(budget: Budget, text: str, given: Given) -> None:
    refuse_numbers(given)
    budget.limit(len(text), MAX_SCANNED_CHARS, "characters to scan")
    budget.work(2 * len(text))


def _maps(budget: Budget, text: str, given: Given) -> None:
    budget.limit(len(text), MAX_MAPPED_CHARS, "characters to convert")
    budget.work(8 * len(text))


def _searches(budget: Budget, text: str, given: Given) -> None:
    """Forwards Python's search is linear whatever is searched for; long texts are searched in slices instead."""
    budget.limit(len(text), MAX_SCANNED_CHARS, "characters to search")
    budget.work(2 * len(text))


def _searches_backwards(budget: Budget, text: str, given: Given) -> None:
    word = given[0] if given and isinstance(given[0], str) else " "
    _searches(budget, text, given)
    budget.limit(len(text) * len(word), MAX_BACKWARDS, "character comparisons")
    budget.work(len(text) * len(word) // 4)


def _replaces(budget: Budget, text: str, given: Given) -> None:
    _searches(budget, text, given)
    if len(given) > 1 and isinstance(given[0], str) and isinstance(given[1], str):
        budget.room_for(replaced_chars(text, given[0], given[1]))


def _pads(budget: Budget, text: str, given: Given) -> None:
    budget.room_for(padded_chars(text, given))


def _untabs(budget: Budget, text: str, given: Given) -> None:
    _scans(budget, text, given)
    budget.room_for(untabbed_chars(text, given))


def _joins(budget: Budget, text: str, given: Given) -> None:
    """Of a list: what is none was made one before."""
    if given and isinstance(given[0], list | tuple):
        budget.step(len(given[0]))
        chars = sum(len(item) for item in given[0] if isinstance(item, str))
        budget.room_for(chars + len(text) * len(given[0]))


def _compares(budget: Budget, value: Any, given: Given) -> None:
    budget.compared(value, given)


def _looks_up(budget: Budget, value: Any, given: Given) -> None:
    budget.written(*given)


def _copies_items(budget: Budget, value: Any, given: Given) -> None:
    budget.step(len(value) // 4)


def _free(budget: Budget, value: Any, given: Given) -> None:
    """Takes the same short time whatever it is given: numbers are small, and views are not copies."""
    refuse_numbers(given)


STRING_METHODS: Mapping[str, Bound] = MappingProxyType(
    dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _copies)
    | dict.fromkeys(("capitalize", "casefold", "lower", "upper", "swapcase", "title"), _maps)
    | dict.fromkeys(("find", "index", "count", "partition", "split"), _searches)
    | dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _searches_backwards)
    | dict.fromkeys(("ljust", "rjust", "center", "zfill"), _pads)
    | dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"), _scans)
    | dict.fromkeys(("isnumeric", "isprintable", "isspace", "istitle", "isupper", "splitlines"), _scans)
    | dict.fromkeys(("strip", "lstrip", "rstrip"), _scans)
    | {"replace": _replaces, "expandtabs": _untabs, "join": _joins}
)
WRAPPED_STRING_METHODS = frozenset({"format", "format_map"})
"""Where a template looks them up it gets a function of `sandbox.wrap_str_format` instead."""
REFUSED_STRING_METHODS = frozenset({"encode", "maketrans", "translate"}) | WRAPPED_STRING_METHODS
"""No prompt needs them: bytes, whose methods would each need a bound too, and a table for each character."""
REFUSED_MARKUP_METHODS = frozenset({"escape", "striptags", "unescape"})
"""Those that a text marked as safe has more."""

_NUMBER_METHODS = dict.fromkeys(("conjugate", "as_integer_ratio", "is_integer"), _free)
_INT_METHODS = _NUMBER_METHODS | dict.fromkeys(("bit_length", "bit_count"), _free)
_SEARCHABLE = dict.fromkeys(("count", "index"), _compares)
_NUMBER_PARTS = ("real", "imag")
_INT_PARTS = (*_NUMBER_PARTS, "numerator", "denominator")
_LOOP_PARTS = (
    *("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem"),
    *("nextitem", "cycle", "changed"),
)

METHODS: Mapping[type, Mapping[str, Bound]] = MappingProxyType(
    {
        str: STRING_METHODS,
        Markup: STRING_METHODS,
        int: _INT_METHODS,
        bool: _INT_METHODS,
        float: _NUMBER_METHODS | {"hex": _free},
        list: _SEARCHABLE | {"copy": _copies_items},
        tuple: _SEARCHABLE,
        _GroupTuple: _SEARCHABLE,
        dict: dict.fromkeys(("items", "keys", "values"), _free) | {"get": _looks_up, "copy": _copies_items},
        # What loops and helpers of Jinja keep are values that were charged when they were made.
        LoopContext: {"cycle": _free, "changed": _compares},
        Cycler: {"next": _free, "reset": _free},
    }
)
"""By the exact type of their owner."""

REFUSED_METHODS: Mapping[type, frozenset[str]] = MappingProxyType(
    {
        str: REFUSED_STRING_METHODS,
        Markup: REFUSED_STRING_METHODS | REFUSED_MARKUP_METHODS,
        int: frozenset({"to_bytes", "from_bytes"}),
        bool: frozenset({"to_bytes", "from_bytes"}),
        float: frozenset({"fromhex", "from_number"}),
        list: frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}),
        tuple: frozenset(),
        _GroupTuple: frozenset(),
        dict: frozenset({"clear", "fromkeys", "pop", "popitem", "setdefault", "update"}),
        LoopContext: frozenset(),
        Cycler: frozenset(),
    }
)
"""All others that these types have."""

PARTS: Mapping[type, frozenset[str]] = MappingProxyType(
    {
        int: frozenset(_INT_PARTS),
        bool: frozenset(_INT_PARTS),
        float: frozenset(_NUMBER_PARTS),
        range: frozenset({"start", "stop", "step"}),
        _GroupTuple: frozenset({"grouper", "list"}),
        LoopContext: frozenset(_LOOP_PARTS),
        Cycler: frozenset({"current", "items", "pos"}),
        Joiner: frozenset({"sep", "used"}),
        Macro: frozenset({"name", "arguments", "catch_kwargs", "catch_varargs", "caller", "explicit_caller"}),
        BlockReference: frozenset({"name", "super"}),
    }
)
"""Attributes that are no methods."""

ATTRIBUTES: Mapping[type, frozenset[str]] = MappingProxyType(
    {kind: frozenset(METHODS.get(kind, {})) | PARTS.get(kind, frozenset()) for kind in {*METHODS, *PARTS}}
)


def call_method(budget: Budget, method: Callable[..., Any], given: Given, named: dict[str, Any]) -> Any:
    """Of a value's own: refused, done in slices, or done at once."""
    owner, name = method.__self__, method.__name__  # type: ignore[attr-defined]
    bound = METHODS.get(type(owner), {}).get(name)
    if bound is None:
        raise SecurityError(f"{name}() of a {type(owner).__name__} is not allowed in templates")
    if type(owner) is Markup:
        budget.weigh(owner, given, most=MAX_SCANNED_CHARS)
    if isinstance(owner, str):
        if name == "join" and given and not isinstance(given[0], list | tuple):
            given = (budget.listed(given[0]), *given[1:])
        if name in ("strip", "lstrip", "rstrip"):
            return _stripped(budget, owner, name, method, given)
        if len(owner) > MAX_SCANNED_CHARS and type(owner) is str and name in string_slices.SEARCHES:
            return _searched(budget, owner, name, given, named)
    bound(budget, owner, (*given, *named.values()))
    return method(*given, **named)


def _stripped(budget: Budget, text: str, name: str, method: Callable[..., Any], given: Given) -> Any:
    kinds = given[0] if given and isinstance(given[0], str) else None
    budget.limit(len(kinds or ""), MAX_STRIPPED_KINDS, "characters to strip")
    if len(text) * len(kinds or " ") <= string_slices.SLICE_CHARS or type(text) is not str:
        _scans(budget, text, ())
        return method(*given)
    return string_slices.strip(budget, text, kinds, name)


def _searched(budget: Budget, text: str, name: str, given: Given, named: dict[str, Any]) -> Any:
    word = given[0] if given else named.get("sep")
    texts, numbers = _SLICED[name]
    kinds = tuple(type(value) for value in (*given, *named.values()))
    if not isinstance(word, str) or not word or kinds not in ((str,) * texts, (*(str,) * texts, *(int,) * numbers)):
        raise SecurityError(f"{name}() of more than {MAX_SCANNED_CHARS} characters with these arguments")
    backwards = name in ("rfind", "rindex", "rpartition", "rsplit")
    budget.limit(len(word), string_slices.MAX_WORD_CHARS * (1 if backwards else 64), "characters in a search string")
    return string_slices.SEARCHES[name](budget, text, *given, **named)


_SLICED = dict.fromkeys(string_slices.SEARCHES, (1, 0)) | {"split": (1, 1), "rsplit": (1, 1), "replace": (2, 1)}
"""How many texts these methods take, and how many numbers behind them, where they work a slice at a time."""
