"""Arguments as engines print them: Python's `Namespace(...)`, `ServerArgs(...)` and `{...}`, Rust's `Args { ... }`.

Each argument is read by itself, so that one that cannot be read, or a line that was cut, costs no other. Gives values;
knows no flag.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

UNREADABLE = object()
"""In the place of a value that is no plain one."""
_NAMED = re.compile(r"""\s*(?:['"](?P<quoted>\w+)['"]\s*:|(?P<plain>\w+)\s*[=:])\s*""")
_ENUM = re.compile(r"<[\w.]+: ('[^']*'|\"[^\"]*\"|[\d.]+)>")
_BARE = re.compile(r"[\w.:/+-]+")
_SOME = re.compile(r"^Some\(\s*(.*?),?\s*\)$", re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"
LONGEST = 60_000


class Call:
    """`LoRAModulePath(name='sql', path='/a')`."""

    def __init__(self, name: str, keywords: dict[str, Any]) -> None:
        self.name, self.keywords = name, keywords


def arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Of a dump, from behind its opening bracket."""
    for piece in _pieces(text[:LONGEST]):
        named = _NAMED.match(piece)
        if named is not None:
            yield named["quoted"] or named["plain"], _value(piece[named.end() :].strip())


def _pieces(text: str) -> Iterator[str]:
    """Between the commas of the outermost level, to the bracket that closes it."""
    depth, quote, start, at = 0, "", 0, 0
    while at < len(text):
        letter = text[at]
        if quote:
            at += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if depth < 0:
                break
        elif letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        at += 1
    if not quote and depth <= 0:  # Else it was cut in its middle.
        yield text[start:at]


def _value(written: str) -> Any:
    some = _SOME.match(written)
    written = written if some is None else some[1].strip()
    if written in ("true", "false"):  # Rust's.
        return written == "true"
    try:
        return _plain(ast.parse(_ENUM.sub(r"\1", written), mode="eval").body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return written if _BARE.fullmatch(written) else UNREADABLE


def _plain(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_plain(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {str(_plain(key)): _plain(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Call(func=called, keywords=keywords):
            named = {word.arg: _plain(word.value) for word in keywords if word.arg is not None}
            return Call(ast.unparse(called).rsplit(".", 1)[-1], named)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name() | ast.Attribute():
            return ast.unparse(node)
    raise ValueError(ast.dump(node)[:80])
