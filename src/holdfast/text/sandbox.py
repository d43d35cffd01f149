"""The Jinja environment chat templates run in: what one rendering may cost, counted where it is spent.

Owns the limits and the places where they are checked. Does not know messages, prompts or what a refusal looks like
to a client: whatever goes too far raises SecurityError.

    steps     blocks entered, loop turns, calls, filters, operators: bounds time, together with the thread's own clock
    size      no value longer than any prompt, looked at before it is made where an argument says how long it gets
    weight    what a nested value is when it is written out: lists that hold one list twice, thirty times over, are
              short until they are printed, compared or hashed
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from holdfast.text.growth import check_method, formatted_chars, is_number, refuse_numbers

MAX_VALUE_CHARS = 32_000_000
"""Of one value, and of the prompt: far above any context window; below what would hurt the process."""
MAX_MADE_CHARS = 8 * MAX_VALUE_CHARS
"""Of all values one rendering makes together."""
MAX_ITEMS = 1_000_000
MAX_REPEATED = 1_000_000
"""Characters or items one `*` in a template may make."""
MAX_NUMBER_BITS = 4096
MAX_STEPS = 1_000_000
MAX_CPU_S = 5.0
"""Of the thread's own time, so that a busy machine refuses nobody; real templates need milliseconds."""
_STEPS_A_LOOK = 16
"""At the clock, which costs more than a step."""

_CONTAINERS = (list, tuple, dict, set, frozenset)
_REMOVED_FILTERS = ("urlize", "xmlattr", "wordwrap", "pprint", "striptags")
"""For web pages; their cost is not bounded by what goes in."""
_LIGHT_FILTERS = frozenset(
    {
        "length", "count", "first", "last", "list", "default", "d", "map", "select", "reject", "selectattr",
        "rejectattr", "items", "attr", "reverse",
    }
)  # fmt: skip
"""They neither write a nested value out nor compare it."""
_COMPARING_TESTS = (
    "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">=", "in",
)  # fmt: skip


class Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._made_chars = MAX_MADE_CHARS
        self._until_look = _STEPS_A_LOOK
        self._end_s = time.thread_time() + MAX_CPU_S

    def step(self, count: int = 1) -> None:
        self._steps -= count
        self._until_look -= count
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps in one rendering")
        if self._until_look < 0:
            self._until_look = _STEPS_A_LOOK
            if time.thread_time() > self._end_s:
                raise SecurityError(f"more than {MAX_CPU_S:g} s in one rendering")

    def made(self, value: Any) -> Any:
        """Charges a new value by its own length; its items were charged when they were made."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.room_for(len(value))
            self._made_chars -= len(value)
            if self._made_chars < 0:
                raise SecurityError(f"more than {MAX_MADE_CHARS} characters made in one rendering")
        return value

    def room_for(self, chars: float) -> None:
        if chars > MAX_VALUE_CHARS:
            raise SecurityError(f"a value of more than {MAX_VALUE_CHARS} characters")

    def weigh(self, *values: Any) -> int:
        """Characters of nested values written out, where each place counts, however often it is the same thing."""
        chars = items = 0
        waiting: list[Any] = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str | bytes):
                chars += len(value)
            elif isinstance(value, _CONTAINERS):
                items += len(value)
                if items <= MAX_ITEMS:
                    waiting.extend(value)
                    waiting.extend(value.values() if isinstance(value, dict) else ())
            if items > MAX_ITEMS:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items, all of them counted")
            self.room_for(chars)
        self.step(items // _STEPS_A_LOOK)
        return chars + 8 * items


class _Running(threading.local):
    budget: Budget


_running = _Running()


@contextmanager
def rendering() -> Iterator[Budget]:
    """Around each rendering; a template runs in one thread from beginning to end."""
    _running.budget = Budget()
    try:
        yield _running.budget
    finally:
        del _running.budget


class _CountingGenerator(CodeGenerator):
    """Python for a template, with a word to the environment wherever work is done without one."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._weighed(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._weighed(node.expr, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        # Hashed wherever it is a key: no deeper than can be written out.
        self.write("environment.weighed(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._weighed(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _weighed(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.weighed(")
        self.visit(node, frame)
        self.write(")")


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
        raise SecurityError(f"{name!r} is not a name a namespace may hold")


class Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_shown)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _guarded_filter(name, function)
        self.filters["_counted"] = _counted
        for name in _COMPARING_TESTS:
            self.tests[name] = _weighing_test(cast(Callable[..., bool], self.tests[name]))
        del self.globals["lipsum"]
        self.globals["namespace"] = GuardedNamespace

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _guarded_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.test is not None:
                # Items that the condition drops never reach the loop's body, where turns are counted.
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    # ---- called by the generated code

    def step(self) -> None:
        _running.budget.step()

    def weighed(self, value: Any) -> Any:
        _running.budget.step()
        if isinstance(value, _CONTAINERS):
            _running.budget.weigh(value)
        return value

    def sliced(self, value: Any) -> Any:
        _running.budget.step()
        return _running.budget.made(value)

    def join_parts(self, parts: tuple[Any, ...]) -> str:
        budget = _running.budget
        budget.step()
        budget.room_for(budget.weigh(*parts))
        joined: str = budget.made("".join(map(str, parts)))
        return joined

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro or a `set` block wrote."""
        whole = list(parts)
        _running.budget.room_for(sum(map(len, whole)))
        joined: str = _running.budget.made("".join(whole))
        return joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _running.budget
        budget.step()
        if operator == "**":
            digits = left.bit_length() if isinstance(left, int) else 1
            if not isinstance(right, int | float) or abs(right) * digits > MAX_NUMBER_BITS:
                raise SecurityError(f"a power beyond {MAX_NUMBER_BITS} bits")
        elif operator == "*":
            _check_product(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            budget.room_for(formatted_chars(left, budget.weigh(right), right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.room_for(len(left) + len(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.weighed(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern, inner = value.__self__, wrapped

        def bounded(*arguments: Any, **named: Any) -> str:
            budget = _running.budget
            if re.search(r":[^{}]*\{", pattern):
                raise SecurityError("a format that takes its width from an argument")
            weight = budget.weigh(arguments, named)
            budget.room_for(formatted_chars(pattern, weight, (), mark="{"))
            return inner(*arguments, **named)

        return bounded

    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        budget = _running.budget
        budget.step()
        owner = getattr(obj, "__self__", None)
        given = (*arguments, *named.values())
        if not isinstance(obj, Macro) and any(isinstance(value, _CONTAINERS) for value in given):
            budget.weigh(owner, given)
        if isinstance(owner, str | bytes | int | float):
            # A list, so that looking at the items does not use them up.
            if obj.__name__ == "join" and given:
                arguments = given = ([*given[0]],)
            budget.room_for(check_method(owner, obj.__name__, given))
        return budget.made(super().call(context, obj, *arguments, **named))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
            raise SecurityError(f"a product beyond {MAX_NUMBER_BITS} bits")
        return
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > MAX_REPEATED:
            raise SecurityError(f"a repetition beyond {MAX_REPEATED} items")


@pass_context
def _shown(context: Context, value: Any) -> str:
    """Every `{{ value }}`, also inside macros, whose text is gathered before anybody sees it."""
    budget = _running.budget
    budget.step()
    if isinstance(value, _CONTAINERS):
        budget.weigh(value)
    text: str = budget.made(str(value))
    return text


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _running.budget.step()
        yield item


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Taking the context also keeps Jinja from running a filter while it compiles, where nothing is counted.
    first = _PassArg.from_obj(function)
    light = name in _LIGHT_FILTERS

    @pass_context
    def guarded(context: Context, value: Any, *arguments: Any, **named: Any) -> Any:
        budget = _running.budget
        budget.step()
        given = (*arguments, *named.values())
        if not light:
            weight = budget.weigh(value, given)
            if name == "join" and not hasattr(value, "__len__"):
                value = [*value]
                weight = budget.weigh(value, given)
            budget.room_for(_filtered_chars(name, value, weight, given))
        wanted = {
            _PassArg.context: context,
            _PassArg.eval_context: context.eval_ctx,
            _PassArg.environment: context.environment,
        }
        before = () if first is None else (wanted[first],)
        return budget.made(function(*before, value, *arguments, **named))

    return guarded


def _filtered_chars(name: str, value: Any, weight: int, given: tuple[Any, ...]) -> float:
    """At least as long as what the filter makes."""
    if name in ("center", "indent", "batch", "slice", "truncate", "round"):
        refuse_numbers(given)
    if name == "indent":
        width = given[0] if given else 4
        return weight + (str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else width)
    if name == "join":
        return weight + len(value) * max((len(part) for part in given if isinstance(part, str)), default=0)
    if name == "replace" and len(given) > 1:
        return check_method(str(value), "replace", (str(given[0]), str(given[1])))
    if name == "format":
        return formatted_chars(str(value), weight, given)
    if name == "sum" and not all(part is None or isinstance(part, str) or is_number(part) for part in given):
        raise SecurityError("a sum of lists")
    return weight


def _weighing_test(test: Callable[..., bool]) -> Callable[..., bool]:
    def weighing(*values: Any) -> bool:
        _running.budget.step()
        _running.budget.weigh(*values)
        return test(*values)

    return weighing
