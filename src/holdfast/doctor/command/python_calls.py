"""A server's engine started from Python, `LLM("owner/name", max_model_len=8192)`, read as a command.

Runs no Python: what is no plain value is kept as it is written.
"""

from __future__ import annotations

import ast
import re

from holdfast.doctor.command.server_command import Flag, ServerCommand
from holdfast.engine_profiles.profile import MODEL_FLAGS, engines, profile


def parse_call(text: str) -> ServerCommand | None:
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
        flags = tuple(
            Flag(
                name=profile(engine).canonical(word.arg),
                values=(_literal(word.value),),
                expression=not isinstance(word.value, ast.Constant),
            )
            for word in tree.keywords
            if word.arg is not None
        )
        named = [flag.value for flag in flags if flag.name in MODEL_FLAGS] + [_literal(word) for word in tree.args[:1]]
        model = next((one for one in named if one), None)
        return ServerCommand(engine=engine, words=(text,), program=(name,), model=model, flags=flags, call=name)
    return None


def _balanced(text: str, start: int) -> str:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[start : at + 1]
    return text[start:]


def _literal(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value)
