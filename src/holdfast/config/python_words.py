"""Advice in the words of who reads it: an error that reaches a Python script names keywords, not flags.

Errors are written for the command line, where most are read. Knows how settings are spelled; no error by itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from holdfast.config.engine import EngineConfig
from holdfast.config.setting import flag
from holdfast.errors import ConfigurationError, HoldfastError, ModelError, RequestError

P = ParamSpec("P")
T = TypeVar("T")

_FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
_NAMES = "|".join(sorted((name.replace("_", "[_-]") for name in _FIELDS), key=len, reverse=True))
_VALUE = r"(?:(?P<between>[ =])(?P<value>(?!-)[^\s,;:()?]*[^\s,;:()?.]))?"
_FLAG = re.compile(rf"(?<![\w-])(?P<dashes>--)(?P<no>no-)?(?P<name>{_NAMES})(?![\w-]){_VALUE}")
_FLAG_OR_NAME = re.compile(_FLAG.pattern.replace("(?P<dashes>--)", "(?P<dashes>--)?", 1))
"""A setting's own parser names it and a value, as in a command without the dashes."""
_PLAIN_NUMBER = re.compile(r"\d+(\.\d+)?")
_LIKE_A_VALUE = re.compile(r"[0-9./~]")
"""Of settings that take any text: a word of the sentence has none of these."""


@contextmanager
def in_python() -> Iterator[None]:
    """Errors that pass speak of keywords."""
    try:
        yield
    except HoldfastError as error:
        error.message = _FLAG.sub(_keyword, error.message)
        error.args = (error.message,)
        if error.needed is not None:
            error.needed = _FLAG.sub(_keyword, error.needed)
        if error.fix is not None:
            error.fix = _FLAG_OR_NAME.sub(_keyword, error.fix)
        raise


def tells_scripts(function: Callable[P, T]) -> Callable[P, T]:
    """Of what a script calls: errors speak of keywords, and those of what was asked for end a script with their text
    behind the line that asked, without the frames of this project in between."""

    @wraps(function)
    def told(*args: P.args, **named: P.kwargs) -> T:
        try:
            with in_python():
                return function(*args, **named)
        except (ConfigurationError, ModelError, RequestError) as error:
            raise error.with_traceback(None) from None

    return told


def _keyword(found: re.Match[str]) -> str:
    name, value = found["name"].replace("-", "_"), found["value"]
    behind = "" if value is None else found["between"] + value
    parse: Callable[[str, Any], Any] = _FIELDS[name].metadata["parse"]
    if parse is flag:
        return f"{name}={not found['no']}{behind}" if found["dashes"] else found[0]
    if value is None or not (value.isupper() or _takes(parse, name, value, any_text=found["dashes"] is not None)):
        return name + behind
    # In capitals it stands for something: a SIZE, a FOLDER.
    return f"{name}={value}" if value.isupper() or _PLAIN_NUMBER.fullmatch(value) else f'{name}="{value}"'


def _takes(parse: Callable[[str, Any], Any], name: str, value: str, *, any_text: bool) -> bool:
    """Whether this is a value of the setting, and not the sentence going on. `any_text`: of one that takes any, too."""
    for word in (value, "out"):
        try:
            parse(name, word)
        except ConfigurationError:
            return word != value  # It takes the value, and not any word.
    return any_text and _LIKE_A_VALUE.search(value) is not None
