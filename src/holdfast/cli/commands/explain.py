"""`holdfast explain CODE`: what a code means and what helps. The words are in observability/codes.toml."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from holdfast.cli.output import say, say_json

if TYPE_CHECKING:
    from holdfast.observability.codes import Code

HELP = "explain a code such as HF110, and what to do about it; without a code: list them all"
EXAMPLES = """examples:
  holdfast explain HF110
  holdfast explain HF110 HFW21
  holdfast explain kv_cache_too_small_for_max_len    a cause, as the doctor's JSON names it
  holdfast explain             every code in one line
"""
_WIDTH = 100
_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_KINDS = {
    "class": "an error with more specific codes",
    "case": "an error",
    "warning": "a warning: the server starts anyway",
    "plan": "a warning of a plan: its result is still valid",
    "doctor": "what the doctor finds in a server's log",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "codes",
        nargs="*",
        metavar="CODE",
        help="a code from a message, or a cause from the doctor; default: all of them",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.doctor.rules.codes import codes as found_by_doctor
    from holdfast.observability.codes import codes

    found = [code for wanted in arguments.codes for code in _explained(wanted)]
    found = found or [*codes().values(), *found_by_doctor().values()]
    if arguments.json:
        say_json([asdict(code) for code in found])
    elif not arguments.codes:
        say(f"{code.code:<6} {textwrap.shorten(_plain(code.means), _WIDTH - 7, placeholder=' ...')}" for code in found)
    else:
        say(line for code in found for line in _lines(code))
    return 0


def _explained(wanted: str) -> Iterator[Code]:
    """A cause as it is found in a log, and where its code is Holdfast's own, what that means."""
    from holdfast.doctor.rules.codes import cause_named
    from holdfast.doctor.rules.codes import codes as found_by_doctor
    from holdfast.observability.codes import codes, explain

    cause = cause_named(wanted)
    if cause is not None:
        yield cause
        own = codes().get(cause.code)
        yield from () if own is None else (own,)
    else:
        yield found_by_doctor().get(_bare(wanted)) or explain(wanted)


def _bare(code: str) -> str:
    return code.strip().strip("[]").upper()


def _plain(text: str) -> str:
    """Without the marks of a page: the words of a link, and where it leads if that says more."""
    return _LINK.sub(lambda link: link[1] if link[1] == link[2] else f"{link[1]} ({link[2]})", text)


def _lines(code: Code) -> Iterator[str]:
    yield f"{code.code}: {_KINDS[code.kind]}"
    if code.name:
        also = f", also a {' and a '.join(code.caught_as)}" if code.caught_as else ""
        yield f"  class:  {code.name}{also}"
    yield from textwrap.wrap(_plain(code.means), _WIDTH, initial_indent="  means:  ", subsequent_indent="          ")
    yield from textwrap.wrap(_plain(code.helps), _WIDTH, initial_indent="  helps:  ", subsequent_indent="          ")
