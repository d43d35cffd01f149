"""Jinja's filters and tests, each with the bound it runs under. Knows nothing of messages and of compiling.

A filter or test that is not named here is not there: an upgrade of Jinja that adds one makes nothing reachable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import _PassArg
from markupsafe import Markup

from holdfast.text.templates.budget import CONTAINERS, MAX_LISTED_CHARS, MAX_SPREAD, MAX_WRITTEN, Budget, budget
from holdfast.text.templates.methods import MAX_MAPPED_CHARS, MAX_SCANNED_CHARS, Given, call_method
from holdfast.text.templates.string_limits import formatted_chars, is_number, refuse_numbers

MAX_WORDS_CHARS = 50_000
"""Of a text that is taken apart into words."""
MAX_NUMBER_CHARS = 1000
"""Of a text that is read as a number."""
MAX_SORTED = 20_000
MAX_SUMMED = 100_000
MAX_ATTRIBUTE_CHARS = 200
"""Of the name of an attribute, which may be a path."""
MAX_GROUP = 10_000
"""Of `batch` and `slice`."""
MAX_PRECISION = 100

Filter = Callable[..., Any]
FilterBound = Callable[[Budget, Any, Given], Any]
"""Raises for what is too much, charges the rest, and returns the value that the filter is to be given."""

_ITEMS: Any = (str, range, *CONTAINERS)


def _text_chars(budget: Budget, value: Any, most: int, what: str) -> int:
    chars = len(value) if isinstance(value, str) else budget.written(value)
    budget.limit(chars, most, what)
    return chars


def _items(budget: Budget, value: Any, most: int) -> Any:
    """A value of which the number of items is known and not too many."""
    if isinstance(value, _ITEMS):
        budget.limit(len(value), min(most, MAX_LISTED_CHARS) if isinstance(value, str) else most, "items")
        budget.step(len(value) // 4)
        return value
    return budget.listed(value, most) if hasattr(value, "__iter__") else value


def _constant(budget: Budget, value: Any, given: Given) -> Any:
    """Takes the same short time whatever it is given."""
    return value


def _lazy(budget: Budget, value: Any, given: Given) -> Any:
    """Does its work when its items are asked for; each is charged then."""
    _check_names(budget, given[:1])
    return value


def _check_names(budget: Budget, names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str):
            budget.limit(len(name), MAX_ATTRIBUTE_CHARS, "characters in an attribute name")


def _groups(budget: Budget, value: Any, given: Given) -> Any:
    refuse_numbers(given, MAX_GROUP)
    return _items(budget, value, MAX_SUMMED)


def _lists(budget: Budget, value: Any, given: Given) -> Any:
    return _items(budget, value, MAX_WRITTEN)


def _copies(budget: Budget, value: Any, given: Given) -> Any:
    budget.written(value, *given)
    return value


def _maps(budget: Budget, value: Any, given: Given) -> Any:
    budget.work(8 * _text_chars(budget, value, MAX_MAPPED_CHARS, "characters to convert"))
    return value


def _scans(budget: Budget, value: Any, given: Given) -> Any:
    budget.work(2 * _text_chars(budget, value, MAX_SCANNED_CHARS, "characters to scan"))
    budget.written(*given)
    return value


def _words(budget: Budget, value: Any, given: Given) -> Any:
    budget.work(16 * _text_chars(budget, value, MAX_WORDS_CHARS, "characters to split into words"))
    budget.written(*given)
    return value


def _pads(budget: Budget, value: Any, given: Given) -> Any:
    refuse_numbers(given)
    return _copies(budget, value, given)


def _indents(budget: Budget, value: Any, given: Given) -> Any:
    refuse_numbers(given)
    value = _scans(budget, value, given)
    width = given[0] if given else 4
    wide = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    budget.room_for(budget.written(value) + (str(value).count("\n") + 1) * wide)
    return value


def _formats(budget: Budget, value: Any, given: Given) -> Any:
    budget.room_for(formatted_chars(str(_scans(budget, value, ())), budget.written(*given), given))
    return value


def _reads_number(budget: Budget, value: Any, given: Given) -> Any:
    if isinstance(value, str):
        budget.limit(len(value), MAX_NUMBER_CHARS, "characters in a number")
    return value


def _rounds(budget: Budget, value: Any, given: Given) -> Any:
    refuse_numbers(given, MAX_PRECISION)
    return _reads_number(budget, value, ())


def _sums(budget: Budget, value: Any, given: Given) -> Any:
    if not all(part is None or isinstance(part, str) or is_number(part) for part in given):
        raise SecurityError("a sum of lists")
    _check_names(budget, given)
    return _items(budget, value, MAX_SUMMED)


def _sorts(budget: Budget, value: Any, given: Given) -> Any:
    _check_names(budget, given)
    items = _items(budget, value, MAX_SORTED)
    budget.work(8 * budget.written(items))
    return items


def _urls(budget: Budget, value: Any, given: Given) -> Any:
    budget.work(16 * _text_chars(budget, value, MAX_WORDS_CHARS, "characters in a URL"))
    return value


FILTERS: Mapping[str, FilterBound] = MappingProxyType(
    dict.fromkeys(("length", "count", "first", "last", "random", "default", "d", "items", "abs"), _constant)
    | dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr", "attr"), _lazy)
    | dict.fromkeys(("batch", "slice"), _groups)
    | dict.fromkeys(("list", "reverse"), _lists)
    | dict.fromkeys(("string", "safe"), _copies)
    | dict.fromkeys(("upper", "lower", "capitalize"), _maps)
    | dict.fromkeys(("e", "escape", "forceescape"), _scans)
    | dict.fromkeys(("title", "wordcount"), _words)
    | dict.fromkeys(("center", "truncate"), _pads)
    | dict.fromkeys(("int", "float", "filesizeformat"), _reads_number)
    | dict.fromkeys(("sort", "dictsort", "groupby", "unique", "min", "max"), _sorts)
    | {"indent": _indents, "format": _formats, "round": _rounds, "sum": _sums, "urlencode": _urls}
)
REMOVED_FILTERS = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
"""For web pages; their cost is not bounded by what goes in."""
REPLACED_FILTERS = frozenset({"join", "replace", "tojson", "trim"})
"""They are there in another make: these three work a slice at a time, and `template` has a JSON of its own."""

_LAZY_RESULTS = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "items", "unique"})


def guarded_filter(function: Filter, bound: FilterBound, *, lazy: bool = False) -> Filter:
    first = _PassArg.from_obj(function)

    @pass_context
    def guarded(context: Context, value: Any, *arguments: Any, **named: Any) -> Any:
        running = budget()
        running.step()
        _check_names(running, (named.get("attribute"),))
        value = bound(running, value, (*arguments, *named.values()))
        wanted = {
            _PassArg.context: context,
            _PassArg.eval_context: context.eval_ctx,
            _PassArg.environment: context.environment,
        }
        before = () if first is None else (wanted[first],)
        made = function(*before, value, *arguments, **named)
        return counted(running, made) if lazy else running.made(made)

    return guarded


def bounded_filters(known: Mapping[str, Filter]) -> dict[str, Filter]:
    """Of those that Jinja has."""
    own: dict[str, Filter] = {"join": _join, "replace": _replace, "trim": _trim}
    own |= {"_counted": _counted, "_spread": _spread}  # For the compiler; a template that uses them gains nothing.
    return own | {
        name: guarded_filter(known[name], bound, lazy=name in _LAZY_RESULTS)
        for name, bound in FILTERS.items()
        if name in known
    }


def counted(running: Budget, items: Any) -> Iterator[Any]:
    for item in items:
        running.step()
        yield item


@pass_context
def _counted(context: Context, items: Any) -> Iterator[Any]:
    """Around what a loop with a condition goes over: items it drops never reach the body, where turns are counted."""
    return counted(budget(), items)


@pass_context
def _spread(context: Context, items: Any) -> Any:
    """Around what becomes the arguments of a call."""
    return items if isinstance(items, dict) and len(items) <= MAX_SPREAD else budget().listed(items, MAX_SPREAD)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    """As Jinja's, but each item becomes text by itself."""
    running = budget()
    running.step()
    if attribute is not None:
        value = context.environment.call_filter("map", value, [], {"attribute": attribute}, context=context)
    texts = []
    for item in running.listed(value):
        running.step()
        running.written(item)
        texts.append(str(item))
    separator = _plain_text(running, d)
    running.room_for(sum(map(len, texts)) + len(separator) * len(texts))
    joined: str = running.made(separator.join(texts))
    return joined


def _plain_text(running: Budget, value: Any) -> str:
    running.written(value)
    return str(value)


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    running = budget()
    running.step()
    text, before, behind = (_plain_text(running, value) for value in (s, old, new))
    given = (before, behind) if count is None else (before, behind, count)
    replaced: str = running.made(call_method(running, text.replace, given, {}))
    return replaced


@pass_context
def _trim(context: Context, value: Any, chars: str | None = None) -> str:
    running = budget()
    running.step()
    text = value if isinstance(value, Markup) else _plain_text(running, value)
    trimmed: str = running.made(call_method(running, text.strip, (chars,), {}))
    return trimmed


# ---- tests

_FREE_TESTS = (
    *("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "string", "mapping", "number"),
    *("sequence", "iterable", "callable", "sameas", "escaped", "filter", "test"),
)
_NUMBER_TESTS = ("odd", "even", "divisibleby")
_TEXT_TESTS = ("lower", "upper")
_COMPARING_TESTS = MappingProxyType(
    dict.fromkeys(("==", "eq", "equalto"), "eq")
    | dict.fromkeys(("!=", "ne"), "ne")
    | dict.fromkeys(("<", "lt", "lessthan"), "lt")
    | dict.fromkeys(("<=", "le"), "lteq")
    | dict.fromkeys((">", "gt", "greaterthan"), "gt")
    | dict.fromkeys((">=", "ge"), "gteq")
    | {"in": "in"}
)
"""With the names that operators have in Jinja."""
TESTS = frozenset({*_FREE_TESTS, *_NUMBER_TESTS, *_TEXT_TESTS, *_COMPARING_TESTS})

Compare = Callable[[str, Any, Any], bool]


def bounded_tests(known: Mapping[str, Any], compare: Compare) -> dict[str, Callable[..., bool]]:
    """Of those that Jinja has. `compare`: an operator, by Jinja's name for it, and its operands."""
    made = {name: known[name] for name in _FREE_TESTS if name in known}
    made |= {name: _number_test(known[name]) for name in _NUMBER_TESTS}
    made |= {name: _text_test(known[name]) for name in _TEXT_TESTS}
    return made | {name: _comparing_test(operator, compare) for name, operator in _COMPARING_TESTS.items()}


def _number_test(test: Callable[..., bool]) -> Callable[..., bool]:
    def bounded(*values: Any) -> bool:
        budget().step()
        if not all(map(is_number, values)):
            raise TypeError("a numeric test needs numbers")  # A text would be formatted by its `%`.
        return test(*values)

    return bounded


def _text_test(test: Callable[..., bool]) -> Callable[..., bool]:
    def bounded(value: Any) -> bool:
        _scans(budget(), value, ())
        return test(value)

    return bounded


def _comparing_test(operator: str, compare: Compare) -> Callable[..., bool]:
    def bounded(left: Any, right: Any) -> bool:
        return compare(operator, left, right)

    return bounded
