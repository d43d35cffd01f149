"""A server that ends for an error adds to it what the doctor would say of its log: the cause and the whole command.

Knows the error and the words of the command line; the diagnosis is made in `holdfast.doctor`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import traceback
from collections.abc import Sequence

import msgspec

import holdfast
from holdfast.errors import HoldfastError, printable
from holdfast.observability.codes import codes

_HIDDEN = {"--api-key": '"${API_KEY:?}"', "--node-secret": '"${HOLDFAST_NODE_SECRET:?}"'}
"""Flags with secrets, and what a shell puts in for each, or stops at where it is not set."""
_MANY = ("--api-key",)
"""Which take all words up to the next flag, not one."""
_FLAG = re.compile(r"--(?:[A-Za-z]\S*)?|-[A-Za-z]{1,4}(?:[.=]\S*|\d*)")
"""A secret may begin with a dash too: what may not be a flag is not shown."""


def command_line(words: Sequence[str]) -> str:
    """As it can be pasted, without its secrets."""
    shown, following, many = ["holdfast"], None, False  # What stands for the word, or words, behind a flag's.
    for word in words:
        flag, equals, _ = word.partition("=")
        name = flag.replace("_", "-")
        hidden = _HIDDEN.get(name)
        if following is not None and _FLAG.fullmatch(word) is None:
            shown.append(following)
            following = following if many else None
        elif f'"{word}"' in _HIDDEN.values():
            shown.append(f'"{word}"')
        else:
            following, many = None if equals else hidden, name in _MANY
            shown.append(f"{flag}={hidden}" if hidden is not None and equals else shlex.quote(word))
    return printable(" ".join(shown))


def say_fatal(error: BaseException, words: Sequence[str], command: str | None = None) -> None:
    """The error that ends a server on standard error, in one block: message, needed, found, cause, fix, the whole
    command. Of an error that is not ours only what the doctor says of it: its traceback is in the log.

    `command`: one that is known to pass, in the place of the doctor's.
    """
    lines = f"holdfast: {error}".splitlines() if isinstance(error, HoldfastError) else []
    with contextlib.suppress(Exception):  # Whatever goes wrong here must not hide the error.
        lines = _with_diagnosis(lines, error, words, command)
    if lines:
        print("\n".join(lines), file=sys.stderr, flush=True)


def _has_blanks(command: str, words: Sequence[str]) -> bool:
    """Whether there are words in it that stand for what only the user knows: `FILE`. It is no command to run."""
    return any(word.isalpha() and word.isupper() and word not in words for word in command.split())


def _with_diagnosis(lines: list[str], error: BaseException, words: Sequence[str], command: str | None) -> list[str]:
    from holdfast.doctor import diagnose_lines
    from holdfast.doctor.report.text import lines_of_findings
    from holdfast.doctor.rules.load import rulebook

    lines = list(lines)
    said = lines or "".join(traceback.format_exception(error)).splitlines()
    log = [f"holdfast {holdfast.__version__}", f"$ {command_line(words)}", *said]
    diagnosis = diagnose_lines(log, "this server")
    code, written = getattr(error, "code", None), getattr(error, "fix", None)
    for finding in diagnosis.findings:
        if finding.code != code:
            continue
        if finding.cause != codes()[code].cause:  # Else the code says it.
            above_fix = len(lines) - (written is not None)
            lines.insert(above_fix, f"  cause:  {rulebook().causes[finding.cause].means} ({finding.cause})")
        if finding.fix is not None and written is None:
            lines.append(f"  fix:    {finding.fix.why}")
        advised = None if finding.fix is None else finding.fix.command
        if command is None and advised not in (None, written) and not _has_blanks(advised or "", words):
            lines.append(f"  run:    {advised}")
    if command is not None and command != written:
        lines.append(f"  run:    {command}")
    others = [finding for finding in diagnosis.findings if finding.code != code]
    if others:
        lines += ["", *lines_of_findings(msgspec.structs.replace(diagnosis, findings=others))]
    return [printable(line) for line in lines]
