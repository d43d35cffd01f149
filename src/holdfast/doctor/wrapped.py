"""A message that a terminal, a forum or the program itself broke over several lines, put together again where a rule
then knows it or reads more of it; and the arguments of TGI, of which a line may be no more than a number.

Looks only at errors whose message is not closed, and at a few lines below each. Judges nothing.
"""

from __future__ import annotations

import re

from holdfast.doctor.lines import Line, read_line
from holdfast.doctor.rulebook import Rule, captured, rulebook

BELOW = 4
"""Lines below an error that may be the rest of it: PyTorch's longest message at 80 columns has so many."""
LOOKED = 12_000
"""Characters below such a line that are looked at for its rest."""
_ARGUMENTS, _CLOSED = "Args {", "}"
_BEGINS = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): |^Exception: ")
_ANOTHER = re.compile(r'^\s*(?:Traceback|File "|\^|raise |$)')


def may_go_on(line: Line) -> bool:
    """Whether it is an error whose message is not closed, or the first line of arguments."""
    return line.text.endswith(_ARGUMENTS) or is_open_error(line)


def is_open_error(line: Line) -> bool:
    text = line.text
    return "rr" in text and not text.endswith((".", "!", "?")) and _BEGINS.match(text) is not None


def whole(line: Line, below: str) -> Line:
    """With the lines below it, where a rule knows them together, or reads more out of them; else as it is."""
    if line.text.endswith(_ARGUMENTS):
        return _with_arguments(line, below)
    parts = _rest(line, below)
    if not parts:
        return line
    best, most = line, max((_read(rule, line.text) for rule in rulebook().page(line.text).rules), default=-1)
    for between in ("", " "):
        rules = rulebook().page(line.text + between + between.join(parts)).rules
        for count in range(1, len(parts) + 1):
            rest = between + between.join(parts[:count])
            numbers = max((_read(rule, line.text, rest) for rule in rules), default=-1)
            if numbers > most:
                best, most = line._replace(whole=line.whole + rest, text=line.text + rest), numbers
    return best


def _with_arguments(line: Line, below: str) -> Line:
    """In one line, as some versions print them; as it is where they are not closed."""
    parts: list[str] = []
    for raw in below.removeprefix("\n").split("\n"):
        text = read_line(raw, line.number).text.strip()
        parts.append(text)
        if text == _CLOSED:
            rest = f" {' '.join(parts)}"
            return line._replace(whole=line.whole + rest, text=line.text + rest)
    return line


def _rest(line: Line, below: str) -> list[str]:
    parts: list[str] = []
    for raw in below.removeprefix("\n").split("\n")[:BELOW]:  # Behind a carriage return stands the end of the line.
        following = read_line(raw, line.number)
        stranger = following.process not in ("", line.process) or _BEGINS.match(following.text)
        if stranger or _ANOTHER.match(following.text):
            break
        parts.append(following.text)
    return parts


def _read(rule: Rule, text: str, rest: str = "") -> int:
    """How many numbers it reads out of both together; -1: it knows no message that begins above and ends below."""
    found = rule.match(text + rest)
    if found is None or (rest and not found.start() < len(text) < found.end()):
        return -1
    return len(captured(found)[0])
