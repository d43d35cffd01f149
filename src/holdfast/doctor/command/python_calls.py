"""A server's engine started from Python, `LLM("owner/name", max_model_len=8192)`: its keywords read, and written anew.

Runs no Python: what is no plain value is kept as it is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine_profiles.profile import engines


@dataclass(frozen=True, slots=True)
class Keyword:
    name: str
    value: str
    expression: bool


@dataclass(frozen=True, slots=True)
class PythonCall:
    engine: str
    name: str
    """LLM, sgl.Engine."""
    positional: str | None
    keywords: tuple[Keyword, ...]


def parse_call(text: str) -> PythonCall | None:
    for engine, how in engines().items():
        found = re.search(how["call"], text) if "call" in how else None
        if found is None:
            continue
        name = found[0].rstrip("(")
        try:
            tree = ast.parse(name + _balanced(text, found.end() - 1), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        if not isinstance(tree, ast.Call):
            continue
        keywords = tuple(
            Keyword(word.arg, _literal(word.value), not isinstance(word.value, ast.Constant))
            for word in tree.keywords
            if word.arg is not None
        )
        return PythonCall(engine, name, next((_literal(word) for word in tree.args), None), keywords)
    return None


def written_call(
    name: str, model: str | None, keywords: Mapping[str, str], kept: Sequence[str], environment: Mapping[str, str]
) -> str:
    """`kept`: those of `keywords` that are Python as they stand."""
    shown = [] if model is None else [repr(model)]
    shown += [f"{word}={value if word in kept else _python(value)}" for word, value in keywords.items()]
    before = "".join(f"os.environ[{variable!r}] = {value!r}; " for variable, value in environment.items())
    return f"{before}{name}({', '.join(shown)})"


def _balanced(text: str, start: int) -> str:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[start : at + 1]
    return text[start:]


def _literal(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)


def _python(value: str) -> str:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value
