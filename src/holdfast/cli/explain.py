"""`holdfast explain CODE`: what a code means and what helps. The words are in observability/codes.toml."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from holdfast.cli.output import say, say_json

if TYPE_CHECKING:
    from holdfast.observability.codes import Code

HELP = "say what a code such as HF110 means, and what helps; without a code: list them all"
EXAMPLES = """examples:
  holdfast explain HF110
  holdfast explain             every code in one line
"""
_WIDTH = 100
_KINDS = {
    "class": "an error, and the root of particular cases",
    "case": "an error",
    "warning": "a warning: the server starts all the same",
    "plan": "a warning of a plan: its answer stands",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", default=None, help="as messages have it; left out: all of them")
    parser.add_argument("--json", action="store_true", help="the same for programs")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.observability.codes import codes, explain

    found = list(codes().values()) if arguments.code is None else [explain(arguments.code)]
    if arguments.json:
        say_json([asdict(code) for code in found])
    elif arguments.code is None:
        say(f"{code.code:<6} {textwrap.shorten(code.means, _WIDTH - 7, placeholder=' ...')}" for code in found)
    else:
        say(_lines(found[0]))
    return 0


def _lines(code: Code) -> Iterator[str]:
    yield f"{code.code}: {_KINDS[code.kind]}"
    if code.name:
        also = f", also a {' and a '.join(code.caught_as)}" if code.caught_as else ""
        yield f"  class:  {code.name}{also}"
    yield from textwrap.wrap(code.means, _WIDTH, initial_indent="  means:  ", subsequent_indent="          ")
    yield from textwrap.wrap(code.helps, _WIDTH, initial_indent="  helps:  ", subsequent_indent="          ")
