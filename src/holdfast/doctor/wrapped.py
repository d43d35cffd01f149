"""A message that a terminal or a forum broke over several lines, put together again where a rule then knows it; and the
arguments of TGI, of which a line may be no more than a number.

Looks only at errors that no rule knows as they stand, and at no more than two lines below each. Judges nothing.
"""

from __future__ import annotations

import re

from holdfast.doctor.lines import Line, read_line
from holdfast.doctor.rulebook import captured, rulebook

BELOW = 2
"""Lines below an error that may be the rest of it."""
LOOKED = 12_000
"""Characters below such a line that are looked at for its rest."""
_ARGUMENTS, _CLOSED = "Args {", "}"
_BEGINS = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): |^Exception: ")
_ANOTHER = re.compile(r'^\s*(?:Traceback|File "|\^|raise |$)')


def may_go_on(line: Line) -> bool:
    """Whether it is an error whose message is not closed, or the first line of arguments."""
    text = line.text
    if text.endswith(_ARGUMENTS):
        return True
    return "rr" in text and not text.endswith((".", "!", "?")) and _BEGINS.match(text) is not None


def whole(line: Line, below: str) -> Line:
    """With the lines below it, where a rule knows them together; else as it is."""
    if line.text.endswith(_ARGUMENTS):
        return _with_arguments(line, below)
    known = [rule for rule in rulebook().page(line.text).rules if rule.match(line.text) is not None]
    parts = [] if known else _rest(line, below)
    best, most = line, -1
    for count in range(1, len(parts) + 1):
        for between in ("", " "):
            rest = between + between.join(parts[:count])
            numbers = _numbers(line.text, rest)
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


def _numbers(text: str, rest: str) -> int:
    """How many a rule reads out of both together; -1: none knows a message that begins above and ends below."""
    joined = text + rest
    most = -1
    for rule in rulebook().page(joined).rules:
        found = rule.match(joined)
        if found is not None and found.start() < len(text) < found.end():
            most = max(most, len(captured(found)[0]))
    return most
