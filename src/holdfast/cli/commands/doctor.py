"""`holdfast doctor`: logs, servers, a command or this machine in; what happened and what helps out. The judging is in
the room `doctor`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.output import UNFORESEEN_EXIT, say, say_error, say_json, unforeseen
from holdfast.errors import ConfigurationError, HoldfastError, printable

if TYPE_CHECKING:
    from holdfast.doctor.findings import Diagnosis
    from holdfast.doctor.probe.machine import MachineFacts

HELP = """Diagnose a failed or slow server, of Holdfast or of another engine, and suggest a fix.

Reads logs of vLLM, SGLang, llama.cpp, TGI, Ollama and Holdfast (files, gzip, or - for standard input), also with the
prefixes of journald, kubectl or docker. Reads the metrics of a running server, checks a command before it is run, and
without arguments checks this machine. Several sources are combined into one diagnosis."""

USAGE = "holdfast doctor [LOG | URL ...] [--command COMMAND] [--here] [--json] [--bundle FILE]"

EXAMPLES = """examples:
  holdfast doctor server.log                         a file
  kubectl logs POD --previous | holdfast doctor -    the previous log of a pod
  journalctl -u vllm | holdfast doctor -             a service
  holdfast doctor rank0.log rank1.log.gz --json      several logs, as JSON (docs/doctor-json.md)
  holdfast doctor http://localhost:8000              a running server, observed for some seconds
  holdfast doctor --command "vllm serve MODEL" --gpu rtx4090   a command, before it is run
  holdfast doctor                                    this machine
  holdfast doctor server.log --bundle report.tar.gz  an archive for a bug report, without keys, prompts and home paths

for a server that requires a key, set HOLDFAST_API_KEY
exit codes: 0 healthy, 1 problem found, 2 usage error, 3 unknown, 70 bug in Holdfast
"""
NO_SOURCE = "HFD92"
WIDTH_WITHOUT_TERMINAL = 100
LONGEST_LOOK_S = 3600.0
HEALTHY, FOUND, NOT_KNOWN = 0, 1, 3
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d+(?:/.*)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="LOG|URL",
        help="a log file, gzip or not; - for standard input; the address of a server; default: this machine",
    )
    parser.add_argument(
        "--command", metavar="COMMAND", help="a server's command as one argument, checked before it is run"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPUs that the command is for: rtx4090, l4, a100-80, h100-80x2 (all names: holdfast plan --list-gpus);"
        " default: this machine",
    )
    parser.add_argument("--vram", metavar="SIZE", help="usable memory of each GPU: 22GiB, 22GiBx2")
    parser.add_argument("--ram", metavar="SIZE", help="RAM of the machine that the command is for")
    parser.add_argument(
        "--engine-version", metavar="VERSION", help="version of the command's engine; default: the installed one"
    )
    parser.add_argument("--here", action="store_true", help="check this machine too")
    parser.add_argument("--seconds", metavar="S", default="10", help="how long a server is observed (default: 10)")
    parser.add_argument("--stream", action="store_true", help="also send one short streaming request to the server")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/doctor-json.md)")
    parser.add_argument("--bundle", metavar="FILE", help="also write a redacted archive for a bug report (tar.gz)")


def run(arguments: argparse.Namespace) -> int:
    try:
        diagnosis, machine = _diagnosis(arguments)
        _say(diagnosis, machine, as_json=arguments.json, options=arguments)
    except HoldfastError as error:
        say_error(error, as_json=arguments.json)
        return 2
    except Exception as error:  # Python's own exit code for it would say that something was found.
        say_error(unforeseen(error), as_json=arguments.json)
        return UNFORESEEN_EXIT
    try:
        _bundle(arguments, diagnosis, machine)
    except HoldfastError as error:  # The answer stands on standard output.
        say_error(error)
        return 2
    return exit_code(diagnosis)


def _is_piped() -> bool:
    """Whether a log waits on standard input: a pipe or a file with something in it."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        readable = stat.S_ISREG(kind) or (stat.S_ISFIFO(kind) and select.select([sys.stdin], [], [], 0)[0])
        buffered = sys.stdin.buffer
        return bool(readable) and isinstance(buffered, io.BufferedReader) and bool(buffered.peek(1))
    except (OSError, ValueError, AttributeError):
        return False


def _diagnosis(arguments: argparse.Namespace) -> tuple[Diagnosis, MachineFacts | None]:
    from holdfast.doctor.check_command.check import CommandMachine
    from holdfast.doctor.combine import Sources, diagnose_all

    named = {name: getattr(arguments, name) for name in ("gpu", "vram", "ram")}
    alone = next((name for name, value in named.items() if value is not None), None)
    if alone is not None and arguments.command is None:
        raise ConfigurationError(
            f"--{alone} describes the machine of a command, and there is no --command",
            code=NO_SOURCE,
            needed="--command",
            fix=f'holdfast doctor --command "vllm serve MODEL" --{alone} {named[alone]}',
            field=alone,
        )
    if not arguments.sources and arguments.command is None and _is_piped():
        arguments.sources = ["-"]
    sources = Sources(
        logs=tuple(source for source in arguments.sources if not _is_url(source)),
        urls=tuple(source for source in arguments.sources if _is_url(source)),
        command=arguments.command,
        machine=CommandMachine(**named),
        engine_version=arguments.engine_version,
        here=arguments.here,
        seconds=_seconds(arguments.seconds),
        stream=arguments.stream,
        key=os.environ.get("HOLDFAST_API_KEY"),
    )
    return diagnose_all(sources)


def _is_url(source: str) -> bool:
    """host:port is one too, with or without a path, unless a file is called so."""
    if source.startswith(("http://", "https://")):
        return True
    return _ADDRESS.fullmatch(source) is not None and not Path(source).exists()


def _seconds(written: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LONGEST_LOOK_S:
        raise ConfigurationError(
            f"--seconds: {written[:40]!r} is not valid",
            needed=f"a number from 0 to {LONGEST_LOOK_S:g}",
            fix="--seconds 10",
            field="seconds",
        )
    return value


def exit_code(diagnosis: Diagnosis) -> int:
    """0 healthy, 1 found, 3 not known."""
    if diagnosis.healthy:
        return HEALTHY
    known = [
        finding for finding in diagnosis.findings if not (finding.cause == "other" and finding.confidence == "low")
    ]
    return FOUND if known else NOT_KNOWN


def _bundle(arguments: argparse.Namespace, diagnosis: Diagnosis, machine: MachineFacts | None) -> None:
    if arguments.bundle is None:
        return
    from holdfast.doctor.probe.machine import document
    from holdfast.doctor.report.bundle import write_bundle

    logs = [source for source in arguments.sources if not _is_url(source)]
    names = write_bundle(arguments.bundle, logs, diagnosis, None if machine is None else document(machine))
    left_out = "; standard input is not included" if "-" in logs else ""
    if len(logs) < len(arguments.sources):
        left_out += "; of a running server it contains the findings, not its metrics"
    print(
        f"holdfast: written to {printable(arguments.bundle)}: {', '.join(names)}{left_out}. Check its"
        " content before you send it",
        file=sys.stderr,
    )


def _say(diagnosis: Diagnosis, machine: MachineFacts | None, *, as_json: bool, options: argparse.Namespace) -> None:
    from holdfast.doctor.report.text import lines, without_keys

    diagnosis = without_keys(diagnosis)
    if machine is not None:
        from holdfast.doctor.probe.machine import document, lines_of
    if as_json:
        import msgspec

        said = msgspec.to_builtins(diagnosis)
        say_json(said if machine is None else {**said, "machine": document(machine)})
        return
    if machine is not None:
        say([*lines_of(machine), ""])
    if diagnosis.healthy and not options.sources:
        command = "the command fits, according to the plan" if options.command is not None else None
        here = None
        if machine is not None:
            alone = "this machine has no NVIDIA GPU, so models run on its CPU (holdfast plan MODEL shows what fits)"
            here = "this machine is ready for a server" if machine.every.gpus else alone
        say([f"Nothing is wrong: {', and '.join(part for part in (command, here) if part is not None)}."])
        say(diagnosis.seen)
        return
    from holdfast.rescue.masking import EXPLAINED, STANDS_FOR

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    of_command = options.command is not None and not options.sources
    shown = list(lines(diagnosis, width=max(60, width), of_command=of_command))
    say(shown)
    if any(STANDS_FOR.search(line) for line in shown):
        say([f"  ({EXPLAINED})"])
