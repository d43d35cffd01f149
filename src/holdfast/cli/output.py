"""How commands print: results on standard output, for readers that may leave early; errors beside them.

Nothing that a file or a server said reaches the terminal as a command to it. Knows no command.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import holdfast
from holdfast.errors import HoldfastError, printable

UNFORESEEN = "HF001"
UNFORESEEN_EXIT = 70
"""EX_SOFTWARE of sysexits.h: neither "no" nor a mistake of the user's."""
_ASCII = str.maketrans(
    {"█": "#", "▓": "=", "▒": "+", "░": "-", "·": ".", "±": "+-", "×": "x", "…": "...", "─": "-", "►": ">"}
)
"""For terminals and pipes that take nothing else."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def say(lines: Iterable[str], *, colour: bool = False) -> None:
    """Lines on standard output. A reader that has left is no error: what was asked stands in the exit code.

    `colour`: colours are meant; everything else that would steer a terminal is spelled out in any case.
    """
    _write("".join(f"{_clean(line, colour)}\n" for line in lines))


def say_json(document: object) -> None:
    # In ASCII: JSON leaves some characters bare that steer a terminal.
    _write(json.dumps(document, indent=2) + "\n")


def say_error(error: HoldfastError, *, as_json: bool = False) -> None:
    """For people on standard error; for programs on standard output, where they look for the answer."""
    if not as_json:
        print(f"holdfast: {error}", file=sys.stderr)
        return
    fields = {name: getattr(error, name) for name in ("code", "message", "field", "needed", "found", "fix")}
    say_json({"error": fields})


def flush() -> None:
    """What is still held back; else Python would complain of a reader that left when it ends."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            _leave(stream)
        except OSError as error:
            _leave(stream)
            say_error(unforeseen(error))


def unforeseen(error: Exception) -> HoldfastError:
    """For an error that no room of Holdfast raised on purpose; says where, for whom it is reported to."""
    package = Path(holdfast.__file__).parent
    frames = [
        f"{Path(frame.filename).relative_to(package)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(package)
    ]
    system = isinstance(error, OSError)
    return HoldfastError(
        "the operating system refused an operation" if system else "an unexpected error in Holdfast",
        code=UNFORESEEN,
        found=f"{type(error).__name__}: {str(error)[:500]}; at {' > '.join(frames[-6:]) or 'an unknown place'}",
        fix="check the disk, file or permission that it names"
        if system
        else "this is a bug in Holdfast: please report it with this message and the request or command",
    )


def _write(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text, raw = _encodable(text, encoding), getattr(sys.stdout, "buffer", None)
    try:
        if isinstance(raw, io.RawIOBase):
            sys.stdout.flush()
            _write_whole(raw, memoryview(text.encode(encoding)))
        else:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        _leave(sys.stdout)


def _write_whole(raw: io.RawIOBase, rest: memoryview) -> None:
    """With PYTHONUNBUFFERED, as containers set it, Python drops what one write does not take: one that waits for a slow
    reader when the process is stopped and goes on, say."""
    while rest:
        taken = raw.write(rest)
        if taken is None:  # Somebody made it one that does not wait.
            select.select([], [raw], [])
        rest = rest[taken or 0 :]


def _encodable(text: str, encoding: str) -> str:
    """What the reader's encoding lacks is drawn with what it has, or spelled out."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def _leave(stream: TextIO) -> None:
    """Everything further goes nowhere, also what Python itself flushes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _clean(line: str, colour: bool) -> str:
    if not colour:
        return printable(line)
    return "".join(part if _COLOUR.fullmatch(part) else printable(part) for part in _COLOUR.split(line))
