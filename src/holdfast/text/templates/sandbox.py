"""The Jinja environment chat templates run in: each operation is bounded by its operands and charged to a budget.

Owns operators, calls and attributes; filters, methods and what may be compiled have files of their own. Does not know
messages, prompts or what a refusal looks like to a client: whatever goes too far raises SecurityError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.lexer import Lexer
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from holdfast.text.templates import string_slices
from holdfast.text.templates.budget import CONTAINERS, MAX_NUMBER_BITS, VIEWS, Budget, budget
from holdfast.text.templates.compiler import BoundedLexer, CountingGenerator, check_tree
from holdfast.text.templates.filters import bounded_filters, bounded_tests, guarded_filter
from holdfast.text.templates.methods import ATTRIBUTES, MAX_SCANNED_CHARS, call_method
from holdfast.text.templates.string_limits import braced_chars, formatted_chars

MAX_REPEATED = 1_000_000
"""Characters or items one `*` in a template may make."""

GLOBALS = frozenset({"cycler", "dict", "joiner", "namespace"})
"""Of Jinja's own; `range` is made anew for each rendering."""
REMOVED_GLOBALS = frozenset({"lipsum", "range"})

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}
"""By Jinja's names."""
_CALLABLE = (Macro, LoopContext, BlockReference, Joiner, FunctionType, Undefined)
"""Besides methods. Functions are our own, given to templates as globals."""


class GuardedNamespace(Namespace):
    """Refuses names that begin with an underscore, through which a template could reach Python's internals."""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        given = dict(*arguments, **values)
        for name in given:
            _refuse_private(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is not allowed as a name in a namespace")


class Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Nothing is computed while compiling, where nothing is counted.
        super().__init__(**options, finalize=_shown, optimized=False)
        self.filters = bounded_filters(self.filters)
        self.tests: dict[str, Any] = bounded_tests(self.tests, self.compared)
        self.globals = {name: self.globals[name] for name in GLOBALS} | {"namespace": GuardedNamespace}
        self._lexer: Lexer = BoundedLexer(self)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """One that counts its work itself."""
        self.filters[name] = guarded_filter(function, lambda budget, value, given: value)

    @property
    def lexer(self) -> Lexer:
        return self._lexer

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        check_tree(tree)
        tree.set_environment(self)
        return tree

    # ---- called by the generated code

    def step(self, count: int) -> None:
        budget().step(count)

    def weighed(self, value: Any) -> Any:
        if isinstance(value, CONTAINERS):
            budget().written(value)
        return value

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        running = budget()
        if isinstance(value, str) and step is not None:
            running.work(len(value))
        return running.made(value[start:stop:step])

    def join_parts(self, parts: tuple[Any, ...]) -> str:
        running = budget()
        running.room_for(running.written(*parts))
        joined: str = running.made("".join(map(str, parts)))
        return joined

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro or a `set` block wrote."""
        whole = list(parts)
        running = budget()
        running.room_for(sum(map(len, whole)))
        joined: str = running.made("".join(whole))
        return joined

    def compared(self, name: str, left: Any, right: Any, *further: tuple[str, Callable[[], Any]]) -> bool:
        running = budget()
        running.step()
        if name in ("in", "notin"):
            result = _contains(running, right, left) == (name == "in")
        else:
            running.compared(left, right)
            result = _COMPARISONS[name](left, right)
        if not further or not result:
            return result
        (following, operand), *rest = further
        return self.compared(following, right, operand(), *rest)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        running = budget()
        running.step()
        if isinstance(left, VIEWS) or isinstance(right, VIEWS):
            raise SecurityError(f"{operator!r} between views of a dict")
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else (right,)
            running.room_for(formatted_chars(left, running.written(*values), right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            running.room_for(len(left) + len(right))
        if isinstance(left, Markup) or isinstance(right, Markup):
            running.limit(running.written(left, right), MAX_SCANNED_CHARS, "characters in a string marked as safe")
        return running.made(self.binop_table[operator](left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget().step()  # Filters look up the attribute of each item so.
        return super().getitem(obj, self.weighed(argument) if isinstance(argument, tuple) else argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return attr in ATTRIBUTES.get(type(obj), ())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern, inner = value.__self__, wrapped

        def bounded(*arguments: Any, **named: Any) -> str:
            running = budget()
            values = arguments[0].values() if value.__name__ == "format_map" and _is_dict(arguments) else arguments
            weight = running.written(*values, *named.values())
            if isinstance(pattern, Markup):
                running.limit(weight, MAX_SCANNED_CHARS, "characters in a string marked as safe")
            running.room_for(braced_chars(pattern, weight))
            return inner(*arguments, **named)

        return bounded

    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        running = budget()
        running.step()
        if isinstance(obj, BuiltinFunctionType | MethodType):
            for scope in ("_loop_vars", "_block_vars"):  # For callables that take the context.
                named.pop(scope, None)
            return running.made(call_method(running, obj, arguments, named))
        if obj is dict:
            arguments = tuple(self.weighed(_listed(running, value)) for value in arguments)
        elif not isinstance(obj, _CALLABLE) and obj not in (GuardedNamespace, Cycler, Joiner) and callable(obj):
            raise SecurityError(f"calling a {type(obj).__name__} is not allowed in templates")
        return running.made(super().call(context, obj, *arguments, **named))


def _is_dict(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments) and isinstance(arguments[0], dict)


def _listed(running: Budget, value: Any) -> Any:
    return value if isinstance(value, dict) or not hasattr(value, "__iter__") else running.listed(value)


def _contains(running: Budget, container: Any, value: Any) -> bool:
    if isinstance(container, str) and isinstance(value, str):
        if min(len(container), len(value)) > MAX_SCANNED_CHARS:
            raise SecurityError(f"a search for more than {MAX_SCANNED_CHARS} characters")
        if len(container) <= MAX_SCANNED_CHARS or not value or type(container) is not str:
            running.work(len(container))
            return value in container
        return string_slices.find(running, container, value) >= 0
    if isinstance(container, CONTAINERS):
        running.written(value)  # It is hashed, or compared with each.
        if not isinstance(container, dict):
            running.compared(container, value)
        return value in container
    if isinstance(container, Iterator):
        return any(_equal(running, item, value) for item in container)
    if isinstance(container, range):
        running.step(len(container) // 4)
    return value in container


def _equal(running: Budget, item: Any, value: Any) -> bool:
    running.step()
    running.compared(item, value)
    return item is value or bool(item == value)


def _check_power(base: Any, exponent: Any) -> None:
    if not isinstance(base, Undefined) and not isinstance(exponent, Undefined):
        bits = base.bit_length() if isinstance(base, int) else 1
        if not isinstance(exponent, int | float) or abs(exponent) * bits > MAX_NUMBER_BITS:
            raise SecurityError(f"a power of more than {MAX_NUMBER_BITS} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
            raise SecurityError(f"a product of more than {MAX_NUMBER_BITS} bits")
        return
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > MAX_REPEATED:
            raise SecurityError(f"a repetition of more than {MAX_REPEATED} items")


@pass_context
def _shown(context: Context, value: Any) -> str:
    """Every `{{ value }}`, also inside macros, whose text is gathered before anybody sees it."""
    running = budget()
    if type(value) is not str:
        if isinstance(value, CONTAINERS):
            running.written(value)
        value = str(value)
    text: str = running.made(value)
    return text
