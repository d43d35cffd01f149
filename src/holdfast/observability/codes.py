"""What every code means and what helps, for people. Owns codes.toml; raises and warns of nothing itself."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from holdfast import errors
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

Kind = Literal["class", "case", "warning", "plan", "doctor"]
UNKNOWN_CODE = "HF145"
_NEAREST_SHOWN = 5
_CAUGHT_AS = (ValueError, FileNotFoundError, TypeError)
_TABLE = re.compile(r"(<!-- codes: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    code: str
    kind: Kind
    """class: one of the error tree; case: a particular case of one; warning: said at load; plan: said by a plan;
    doctor: found in a log."""
    name: str = ""
    """The class that carries it."""
    means: str
    helps: str = ""
    cause: str = ""
    """What the doctor calls it; empty: it ends no server."""
    phase: str = ""
    """Of a server's life, when it is met."""

    @property
    def caught_as(self) -> tuple[str, ...]:
        """Python's own exceptions that it can be caught as too."""
        found = getattr(errors, self.name, None)
        if not isinstance(found, type):
            return ()
        return tuple(kind.__name__ for kind in _CAUGHT_AS if issubclass(found, kind))


@cache
def codes() -> dict[str, Code]:
    text = (resources.files("holdfast.observability") / "codes.toml").read_text(encoding="utf-8")
    return {code: Code(code=code, **row) for code, row in tomllib.loads(text).items()}


def explain(code: str) -> Code:
    """However it is cased, and in the brackets in which messages have it."""
    wanted = code.strip().strip("[]").upper()
    found = codes().get(wanted)
    if found is not None:
        return found
    begun = [known for known in codes() if len(wanted) > 2 and known.startswith(wanted)]
    near = [*begun, *difflib.get_close_matches(wanted[:20], (known for known in codes() if known not in begun), n=3)]
    raise ConfigurationError(
        f"unknown code {shorten(code)}",
        code=UNKNOWN_CODE,
        needed="a code such as HF110" + (f"; the closest: {', '.join(near[:_NEAREST_SHOWN])}" if near else ""),
        fix="holdfast explain, which lists them all",
        field="code",
    )


def table(kind: str) -> str:
    """In Markdown, as docs/errors.md has it."""
    wanted = [code for code in codes().values() if code.kind == kind]
    if kind in ("warning", "plan"):
        rows = ["| code | means | what helps |", "|---|---|---|"]
        return "\n".join(rows + [f"| {code.code} | {code.means} | {code.helps} |" for code in wanted]) + "\n"
    rows = ["| code | class | means | what helps |", "|---|---|---|---|"]
    for code in wanted:
        also = f" ({', '.join(f'*{name}*' for name in code.caught_as)})" if kind == "class" and code.caught_as else ""
        rows.append(f"| {code.code} | `{code.name}`{also} | {code.means} | {code.helps} |")
    return "\n".join(rows) + "\n"


def fill_tables(page: str) -> str:
    """A Markdown page with the tables between its marks written anew."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)
