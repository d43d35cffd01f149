"""`holdfast rescue -- COMMAND`: starts a server, watches it, and starts it again with what it died of put right.

Words and a terminal; what is done is in rescue/supervise.py.
"""

from __future__ import annotations

import argparse
import os
import select
import time

from holdfast.errors import ConfigurationError, printable

HELP = """Run a server's command and stay beside it: its output, signals and exit code pass through. When it dies of
something that can be put right, say why, change the command as little as possible, and start it again."""

USAGE = "holdfast rescue [--keep FLAG ...] [--ask] [--fix-first] [--max-restarts N] [--back-off S] -- COMMAND ..."

EXAMPLES = """examples:
  holdfast rescue -- vllm serve MODEL --max-model-len 32768
  holdfast rescue --keep max-model-len -- vllm serve MODEL --max-model-len 32768
  holdfast rescue --ask -- python -m sglang.launch_server --model-path MODEL
  holdfast rescue --max-restarts 2 -- llama-server -m model.gguf -c 65536

exit codes: those of COMMAND, 128 and the signal that ended it; 2 usage, 126 and 127 it cannot be run
"""
MOST_RESTARTS = 1000
DEFAULT_RESTARTS, DEFAULT_BACK_OFF_S = 5, 2.0
PATIENCE_S = 1.0
"""So long a word of ours waits for a reader."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="FLAG",
        help="leave this flag as it is; may be given several times",
    )
    parser.add_argument("--ask", action="store_true", help="confirm each change; without a terminal the answer is no")
    parser.add_argument(
        "--max-restarts", metavar="N", default=str(DEFAULT_RESTARTS), help=f"default: {DEFAULT_RESTARTS}"
    )
    parser.add_argument(
        "--back-off",
        metavar="S",
        default=f"{DEFAULT_BACK_OFF_S:g}",
        help="seconds before the first restart, twice as many before each further one, at most 60; default:"
        f" {DEFAULT_BACK_OFF_S:g}",
    )
    parser.add_argument(
        "--hung-after",
        metavar="S",
        default="0",
        help="end and start again a server that was ready and has not answered /health for so many seconds; default: 0,"
        " it is only said",
    )
    parser.add_argument(
        "--fix-first",
        action="store_true",
        help="put right what is surely wrong with the command before its first start; else it is only said",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, behind --")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.rescue.supervise import Orders, Rescue

    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise ConfigurationError(
            "there is no command to run",
            needed="a command behind --",
            field="command",
            fix="holdfast rescue -- vllm serve MODEL",
        )
    orders = Orders(
        keep=tuple(name for given in arguments.keep for name in given.split(",") if name),
        max_restarts=int(_number("max-restarts", arguments.max_restarts, MOST_RESTARTS)),
        back_off_s=_number("back-off", arguments.back_off, 3600.0),
        hung_after_s=_number("hung-after", arguments.hung_after, 86_400.0),
        fix_first=arguments.fix_first,
        confirm=_confirmed if arguments.ask else None,
    )
    return Rescue(words, orders, _say).run()


def _number(name: str, written: str, most: float) -> float:
    try:
        value = float(written)
    except ValueError:
        value = -1.0
    whole = name != "max-restarts" or value == int(max(value, -1))
    if not 0 <= value <= most or not whole:
        raise ConfigurationError(
            f"--{name}: {written[:40]!r} is not valid",
            needed=f"a number from 0 to {most:g}",
            fix=f"--{name} 2",
            field=name.replace("-", "_"),
        )
    return value


def _say(line: str) -> None:
    """Beside the program's own errors, marked as ours. What cannot be said is no reason to end.

    Not through Python's stream: it would keep what it could not write, and a signal may come within a line.
    """
    _write(f"holdfast rescue: {printable(line)}\n")


def _write(text: str) -> None:
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    until = time.monotonic() + PATIENCE_S
    while left:
        try:
            left = left[os.write(2, left) :]
        except BlockingIOError:
            if time.monotonic() > until:
                return
            select.select([], [2], [], PATIENCE_S)
        except OSError:
            return


def _confirmed(question: str) -> bool:
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            _write(f"holdfast rescue: {printable(question)} [y/N] ")
            return terminal.readline().strip().lower() in ("y", "yes")
    except OSError:
        _say(f"{question} Nobody can be asked: there is no terminal (pid {os.getpid()})")
        return False
