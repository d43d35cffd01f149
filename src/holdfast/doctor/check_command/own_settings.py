"""What `holdfast serve` itself refuses of a command's settings, before it counts any memory: read as it reads them, and
asked of the same functions. Has no rule of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.sources import add_flags, add_refused, gather, split
from holdfast.config.tuning import TUNING
from holdfast.doctor.check_command.refusals import refused
from holdfast.doctor.check_command.remedies import all_changes, put_right
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Finding
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.planner.fit.search import Question


def settings_findings(command: ServerCommand, question: Question, *, here: bool) -> list[Finding]:
    """All refusals of a start on the question's machine, each without what was found before it, as far as leaving that
    out is what helps. `here`: that machine is this one, with the files that the command names."""
    findings: list[Finding] = []
    for _ in range(len(command.flags) + 1):
        error = _refused(command, question, here)
        if error is None:
            break
        said, _ = refused(command, error, question)
        findings += said
        if not all_changes(said):
            break
        command = put_right(command, said)
    return findings


def _refused(command: ServerCommand, question: Question, here: bool) -> ConfigurationError | None:
    """The first. None also of another engine, and of what is no command line or not understood, which is flags.py's to
    say."""
    from holdfast.planner.serve.refused_settings import refuse_settings_on

    given = _given(command)
    if given is None:
        return None
    model = question.model.unquantized or question.model  # A server is asked to quantize what is stored otherwise.
    try:
        config = _read(command, given, here)
        refuse_settings_on(question.machine, config, model.spec, model.canonical)
    except ConfigurationError as error:
        return error
    return None


class _NotUnderstood(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _NotUnderstood


def _given(command: ServerCommand) -> dict[str, Any] | None:
    """As it is written, by the names of settings. What only a shell knows is not looked at."""
    if command.engine != "holdfast" or command.call is not None:
        return None
    words: list[str] = []
    unknown = {at for flag in command.flags if flag.unknown for at in range(*flag.words)}
    for at, word in enumerate(command.words[len(command.program) :], start=len(command.program)):
        name, equals, value = word.partition("=")
        if at not in unknown:
            words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("model_positional", nargs="?")
    parser.add_argument("--config", type=Path)
    add_flags(parser, EngineConfig, title="engine")
    add_flags(parser, ServerConfig, title="server")
    add_refused(parser, (*ENGINE_REFUSED, *SERVER_REFUSED, *TUNING))
    try:
        return vars(parser.parse_known_args(words)[0])
    except _NotUnderstood:
        return None


def _read(command: ServerCommand, given: dict[str, Any], here: bool) -> EngineConfig:
    positional, file = given.pop("model_positional", None), given.pop("config", None)
    if positional is not None:
        given["model"] = positional
    gathered = gather([EngineConfig, ServerConfig], given, environment=command.environment, file=file if here else None)
    config, _ = split(gathered, (EngineConfig, ENGINE_REFUSED), (ServerConfig, SERVER_REFUSED))
    return config
