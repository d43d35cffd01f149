"""`holdfast doctor`: logs of a server in, what happened and what helps out. The judging is in the room `doctor`."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

from holdfast.cli.output import UNFORESEEN_EXIT, say, say_error, say_json, unforeseen
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.doctor.records import Diagnosis

HELP = """Say what happened to a server, of Holdfast or of another engine, and what helps.

Reads logs of vLLM, SGLang, llama.cpp, TGI, Ollama and Holdfast: files, gz, - for standard input, with whatever
journald, kubectl or docker put before each line. Several are judged together."""

USAGE = "holdfast doctor [LOG ...] [--json] [--bundle FILE]"

EXAMPLES = """examples:
  holdfast doctor server.log                         a file
  kubectl logs POD --previous | holdfast doctor -    what a pod said before it died
  journalctl -u vllm | holdfast doctor -             a service
  holdfast doctor rank0.log rank1.log.gz --json      several, judged together, for programs (docs/doctor-json.md)
  holdfast doctor server.log --bundle report.tar.gz  an archive for a bug report, without keys, prompts and homes

exit codes: 0 healthy, 1 something was found, 2 usage, 3 not known, 70 a fault of Holdfast's own
"""
NO_SOURCE = "HFD92"
WIDTH_WITHOUT_TERMINAL = 100
HEALTHY, FOUND, NOT_KNOWN = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="*", metavar="LOG", help="a file, gz or not; - for standard input")
    parser.add_argument("--json", action="store_true", help="the answer for programs (docs/doctor-json.md)")
    parser.add_argument("--bundle", metavar="FILE", help="also write a redacted archive for a bug report (tar.gz)")


def run(arguments: argparse.Namespace) -> int:
    try:
        diagnosis = _diagnosis(arguments)
        _bundle(arguments, diagnosis)
        _say(diagnosis, as_json=arguments.json)
    except HoldfastError as error:
        say_error(error, as_json=arguments.json)
        return 2
    except Exception as error:  # Python's own exit code for it would say that something was found.
        say_error(unforeseen(error), as_json=arguments.json)
        return UNFORESEEN_EXIT
    return exit_code(diagnosis)


def _diagnosis(arguments: argparse.Namespace) -> Diagnosis:
    from holdfast.doctor import diagnose

    if not arguments.logs:
        raise ConfigurationError(
            "there is nothing to look at", code=NO_SOURCE, needed="a log, or - for standard input",
            fix="holdfast doctor server.log, or: kubectl logs POD | holdfast doctor -", field="log",
        )  # fmt: skip
    return diagnose(arguments.logs)


def exit_code(diagnosis: Diagnosis) -> int:
    """0 healthy, 1 found, 3 not known."""
    if diagnosis.healthy:
        return HEALTHY
    known = [
        finding for finding in diagnosis.findings if not (finding.cause == "other" and finding.confidence == "low")
    ]
    return FOUND if known else NOT_KNOWN


def _bundle(arguments: argparse.Namespace, diagnosis: Diagnosis) -> None:
    if arguments.bundle is None:
        return
    from holdfast.doctor.bundle import write_bundle

    write_bundle(arguments.bundle, arguments.logs, diagnosis)


def _say(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        say_json(msgspec.to_builtins(diagnosis))
        return
    from holdfast.doctor.report import lines

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    say(lines(diagnosis, width=max(60, width)))
