"""A server that ends for an error says at once what the doctor would say of its log: the cause and the whole command.

Knows the error and the words of the command line; the judging is in the room `doctor`.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence

import holdfast
from holdfast.errors import HoldfastError, printable

_SECRETS = ("--api-key",)
_HIDDEN = '"${API_KEY:?}"'
"""What a shell puts in, and stops at where it is not set."""


def command_line(words: Sequence[str]) -> str:
    """As it can be pasted, without its secrets."""
    shown, secret = ["holdfast"], False
    for word in words:
        flag, equals, _ = word.partition("=")
        if secret and not word.startswith("--"):
            shown.append(_HIDDEN)
        else:
            secret = flag in _SECRETS and not equals
            shown.append(f"{flag}={_HIDDEN}" if flag in _SECRETS and equals else shlex.quote(word))
    return printable(" ".join(shown))


def say_why(error: BaseException, words: Sequence[str]) -> None:
    """On standard error, below the error itself. Whatever goes wrong here must not hide the error."""
    try:
        lines = _answer(error, words)
    except Exception:
        return
    print("\n".join(["", *lines]), file=sys.stderr, flush=True)


def _answer(error: BaseException, words: Sequence[str]) -> list[str]:
    from holdfast.doctor import diagnose_lines
    from holdfast.doctor.report.text import lines_of_findings

    said = f"holdfast: {error}" if isinstance(error, HoldfastError) else "".join(traceback.format_exception(error))
    log = [f"holdfast {holdfast.__version__}", f"$ {command_line(words)}", *said.splitlines()]
    return [printable(line) for line in lines_of_findings(diagnose_lines(log, "this server"))]
