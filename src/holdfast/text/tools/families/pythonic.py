"""Calls as Python writes them: [weather(city="Oslo"), add(a=1, b=2)], the way of Llama 3.2 and 4, and of OLMo 3 with a
line for each. Arguments are literals, read and never run, and are told as JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator
from typing import Any

from holdfast.text.tools.families.generic import GenericReader
from holdfast.text.tools.parser import MAX_NAME_CHARS, NotACall, Region, Step

START, END = "<|python_start|>", "<|python_end|>"
OLMO_OPEN, OLMO_CLOSE = "<function_calls>", "</function_calls>"

MAX_SOURCE_CHARS = 64 << 10
"""Of one call's arguments: they are parsed in one piece."""
_NAMED_VALUES = {"true": True, "false": False, "null": None}
"""JSON's, which models mix up with Python's."""


class PythonicReader(GenericReader):
    marks = (START,)

    def _read_calls(self) -> Region:
        character = yield from self._after_space()
        if character != "[":
            yield from self._json_calls(character)
            return
        character = yield from self._after_space()
        if character == "{":
            yield from self._call_list(character)
            return
        while character != "]":
            yield from self._python_call(character)
            character = yield from self._after_space()
            if character == ",":
                character = yield from self._after_space()
            elif character != "]":
                raise NotACall
        if self._mark:
            yield from self._one_of((END,), (yield from self._after_space()))

    def _python_call(self, character: str) -> Region:
        read = ""
        while character != "(":
            if len(read) > MAX_NAME_CHARS or not (character.isalnum() or character in "_-."):
                raise NotACall
            read += character
            character = yield
        name = self._checked(read)
        if name not in self._names:
            raise NotACall  # Behind a mark too: Python has other calls.
        self._whole_call(name, python_arguments((yield from self._to_parenthesis())))

    def _to_parenthesis(self) -> Generator[None, str, str]:
        read: list[str] = []
        depth, quote, escaped = 1, "", False
        while True:
            character = yield
            if quote:
                quote = "" if character == quote and not escaped else quote
                escaped = character == "\\" and not escaped
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if not depth:
                    return "".join(read)
            read.append(character)
            if len(read) > MAX_SOURCE_CHARS:
                raise NotACall


class OlmoReader(PythonicReader):
    marks = (OLMO_OPEN,)

    def _read_calls(self) -> Region:
        if not self._mark:
            yield from super()._read_calls()
            return
        character = yield from self._after_space()
        while character != "<":
            yield from self._python_call(character)
            character = yield from self._next_line()
        yield from self._one_of((OLMO_CLOSE,), character)

    def _next_line(self) -> Step:
        character = yield from self._after_space()
        while character in (",", ";"):
            character = yield from self._after_space()
        return character


def python_arguments(source: str) -> str:
    """What stands between the parentheses of a call, as a JSON object. Raises NotACall."""
    try:
        call = ast.parse(f"call({source}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(given.arg is None for given in call.keywords):
            raise NotACall
        found = {given.arg: _value(given.value) for given in call.keywords}
        if len(found) < len(call.keywords):
            raise NotACall
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMED_VALUES:
        return _NAMED_VALUES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return {key: _value(item) for key, item in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    raise NotACall
