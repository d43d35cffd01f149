"""`python -m holdfast` and the `holdfast` command: the first lines, before anything large is imported. The rest is in
`cli.main`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.engine.startup.prespawn import EarlyProcess

INTERRUPTED_EXIT = 128 + 2
"""As a shell says of a program that was ended by Ctrl-C."""


def main() -> int:
    early = None
    try:
        early = begin_engine(sys.argv[1:])
        from holdfast.cli.main import main as run_command

        return run_command(early=early)
    except KeyboardInterrupt:  # Before there was a command to hear it.
        return INTERRUPTED_EXIT
    finally:
        if early is not None:
            early.end()  # Nothing to do where it was taken over and has ended.


def begin_engine(words: list[str]) -> EarlyProcess | None:
    """Of `serve` the engine process, which takes longest to start: it need not wait until settings are read. None for
    other commands, and where there is none to be had: who needs it then says why."""
    if words[:1] != ["serve"] or not {"-h", "--help"}.isdisjoint(words):
        return None
    from holdfast.engine.startup.prespawn import EarlyProcess
    from holdfast.errors import EngineDiedError

    with contextlib.suppress(EngineDiedError):
        return EarlyProcess()
    return None


if __name__ == "__main__":
    sys.exit(main())
