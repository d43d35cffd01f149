"""What a terminal shows after all that was written to it: enough of one for prompts, bars and lines of a log."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


def shown(written: str) -> list[str]:
    """Its lines, without trailing spaces; lines are as long as they are."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(written):
        control = _CONTROL.match(written, at)
        if control is not None:
            at, (number, kind) = control.end(), control.groups()
            if kind == "A":
                row = max(0, row - int(number or 1))
            elif kind == "K":
                lines[row] = "" if number == "2" else lines[row][:column]
            elif kind == "J":
                lines[row:] = [lines[row][:column]]
            continue
        character, at = written[at], at + 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\b":
            column = max(0, column - 1)
        elif character.isprintable():
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
