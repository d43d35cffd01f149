"""`holdfast explain CODE`: what a code means and what helps. The words are in observability/codes.toml."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict

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
        print(json.dumps([asdict(code) for code in found], indent=2, ensure_ascii=False))
    elif arguments.code is None:
        for code in found:
            print(f"{code.code:<6} {textwrap.shorten(code.means, _WIDTH - 7, placeholder=' ...')}")
    else:
        code = found[0]
        print(f"{code.code}: {_KINDS[code.kind]}")
        if code.name:
            also = f", also a {' and a '.join(code.caught_as)}" if code.caught_as else ""
            print(f"  class:  {code.name}{also}")
        print(textwrap.fill(code.means, _WIDTH, initial_indent="  means:  ", subsequent_indent="          "))
        if code.helps:
            print(textwrap.fill(code.helps, _WIDTH, initial_indent="  helps:  ", subsequent_indent="          "))
    return 0
