"""Joins a message or an argument dump that was broken over several lines, if a rule then matches or captures more.

Looks only at errors and dumps that are not closed, and at a few lines around each. Draws no conclusion.
"""

from __future__ import annotations

import re

from holdfast.doctor.logs.line import Line, read_line
from holdfast.doctor.rules.load import Rule, captured, rulebook

BELOW = 4
"""Lines below an error that may be the rest of it: PyTorch's longest message at 80 columns has so many."""
LOOKED = 12_000
"""Characters below such a line that are looked at for its rest."""
_ARGUMENTS, _CLOSED = "Args {", "}"
_DUMP = re.compile(r"(?:non-default args: |args: (?:vLLM )?Namespace|server_args ?= ?ServerArgs)(?=[({])")
DUMP_BELOW = 120
"""Lines of arguments, at 40 columns as many as a dump has that is looked at."""
_BEGINS = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): |^Exception: ")
_ANOTHER = re.compile(r'^\s*(?:Traceback|File "|\^|raise |$)')


def may_go_on(line: Line) -> bool:
    """Whether it is an error whose message is not closed, or the first line of arguments that go on."""
    return line.text.endswith(_ARGUMENTS) or is_open_error(line) or _is_open_dump(line)


def _is_open_dump(line: Line) -> bool:
    found = _DUMP.search(line.text) if "args" in line.text else None
    return found is not None and not _closed(line.text[found.end() :])


def _closed(dump: str) -> bool:
    """Whether the bracket that it begins with is closed; what stands in quotes counts too, as it is in pairs."""
    opened = sum(map(dump.count, "([{"))
    return opened <= sum(map(dump.count, ")]}"))


def is_open_error(line: Line) -> bool:
    text = line.text
    return "rr" in text and not text.endswith((".", "!", "?")) and _BEGINS.match(text) is not None


def whole(line: Line, below: str) -> Line:
    """With the lines below it, where a rule knows them together, or reads more out of them; else as it is."""
    if line.text.endswith(_ARGUMENTS):
        return _with_arguments(line, below)
    if _is_open_dump(line):
        return _with_dump(line, below)
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


def with_what_is_near(line: Line, above: str, below: str) -> Line:
    """An error that was not put together, with the lines beside it that may be parts of it."""
    lines = [*above.removesuffix("\n").split("\n")[-BELOW:], *below.removeprefix("\n").split("\n")[:BELOW]]
    return line._replace(near="\n".join(one for one in lines if _is_bare(one, line.number)))


def _is_bare(raw: str, number: int) -> bool:
    one = read_line(raw, number)
    return bool(one.text) and one.text == one.whole and not one.level and _ANOTHER.match(one.text) is None


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


def _with_dump(line: Line, below: str) -> Line:
    """In one line, where it is closed by lines that bear no stamp, level or process; else as it is."""
    whole_text = line.text
    for raw in below.removeprefix("\n").split("\n")[:DUMP_BELOW]:
        if not _is_bare(raw, line.number):
            return line
        # Cut inside a word, or behind a comma, where a blank means nothing.
        whole_text += read_line(raw, line.number).text
        dump = _DUMP.search(whole_text)
        if dump is not None and _closed(whole_text[dump.end() :]):
            return line._replace(whole=line.whole + whole_text[len(line.text) :], text=whole_text)
    return line


def _rest(line: Line, below: str) -> list[str]:
    parts: list[str] = []
    for raw in below.removeprefix("\n").split("\n")[:BELOW]:  # Behind a carriage return stands the end of the line.
        following = read_line(raw, line.number)
        if following.service != line.service and line.service:
            continue
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
