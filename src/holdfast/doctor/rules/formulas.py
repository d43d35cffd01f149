"""The small sums that stand in rules: numbers of the log in, a value for a flag out. Arithmetic, and no code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from string import Formatter

_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Not: operator.not_,
}  # fmt: skip


def _round_down(value: float, step: float) -> float:
    return math.floor(value / step + 1e-9) * step


def _round_up(value: float, step: float) -> float:
    return math.ceil(value / step - 1e-9) * step


def _hundredths(value: float) -> float:
    """Rounded down: a share of memory is never rounded into what is not there."""
    return math.floor(value * 100 + 1e-9) / 100


def _divides(count: float, most: float) -> float:
    """The largest power of two up to `most` that divides `count`, since heads of KV are split too and are as a rule
    such a number; where there is none, the largest divisor."""
    able = [size for size in range(int(most), 0, -1) if count % size == 0]
    return float(next((size for size in able if size > 1 and size & (size - 1) == 0), next(iter(able), 1)))


def _power(value: float) -> float:
    """The power of two at or below."""
    return float(2 ** int(math.log2(value))) if value >= 1 else 1.0


LORA_SIZES = (8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM's --max-lora-rank takes."""


def _lora_size(rank: float) -> float:
    """The least of them that holds an adapter of this rank."""
    return float(next(size for size in LORA_SIZES if size >= rank))


_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min, "max": max, "round_down": _round_down, "round_up": _round_up, "hundredths": _hundredths,
    "divides": _divides, "power": _power, "lora_size": _lora_size,
}  # fmt: skip


class Unknown(Exception):
    """A number that the log does not tell."""


def evaluate(expression: str, numbers: Mapping[str, float]) -> float | None:
    """None where a number in it is not known, or the sum has no answer."""
    try:
        return float(_value(_parsed(expression), numbers))
    except (Unknown, ZeroDivisionError, OverflowError, ValueError, StopIteration):
        return None


def holds(condition: str, numbers: Mapping[str, float]) -> bool:
    """What is not known does not hold; an empty condition does."""
    return not condition or bool(evaluate(condition, numbers))


@cache
def names(expression: str) -> frozenset[str]:
    """The numbers that a value is made of; those that are only asked after (`known`) too."""
    called = {id(one.func) for one in ast.walk(_parsed(expression)) if isinstance(one, ast.Call)}
    return frozenset(
        one.id for one in ast.walk(_parsed(expression)) if isinstance(one, ast.Name) and id(one) not in called
    )


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            if name not in numbers:
                raise Unknown(name)
            return numbers[name]
        case ast.BinOp(left=left, op=operation, right=right):
            return float(_OPERATORS[type(operation)](_value(left, numbers), _value(right, numbers)))
        case ast.UnaryOp(op=operation, operand=operand):
            return float(_OPERATORS[type(operation)](_value(operand, numbers)))
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            return float(_OPERATORS[type(operation)](_value(left, numbers), _value(right, numbers)))
        case ast.BoolOp(op=ast.And(), values=values):
            return float(all(_value(one, numbers) for one in values))
        case ast.BoolOp(op=ast.Or(), values=values):
            return float(any(_value(one, numbers) for one in values))
        case ast.Call(func=ast.Name(id="known"), args=[ast.Name(id=name)]):
            return float(name in numbers)
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
            return float(_FUNCTIONS[name](*(_value(one, numbers) for one in arguments)))
    raise ValueError(f"not a sum: {ast.unparse(node)}")


def written(value: float) -> str:
    """As a flag takes it."""
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


def filled(templates: tuple[str, ...], values: Mapping[str, object]) -> str:
    """The first template of which everything is known; the last, without what is not."""
    for template in templates:
        names = {name for _, name, _, _ in Formatter().parse(template) if name}
        if names <= values.keys():
            return template.format_map(dict(values))
    return ""
