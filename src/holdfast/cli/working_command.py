"""A command of `holdfast serve` that was refused, written again so that it starts: every flag that cannot be honoured
is changed as its error advises, or left out, until nothing is refused any more.

    words ─► what is refused ─► without it ─► parsed, settled and, where the model is here, planned again ─┐
                 ▲─────────────────────────── refused for something else ───────────────────────────────┘

Loads nothing and fetches nothing. Where no command is found that passes, there is none: half a fix is not printed.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.fatal import command_line
from holdfast.config import EngineConfig
from holdfast.config.setting import flag_name
from holdfast.errors import ConfigurationError, HoldfastError, ModelError

ROUNDS = 20
"""More mistakes than that are in no command."""
_VALUE = re.compile(r"(--[a-z][\w-]*) ([^\s,;:]+)(?:[,;:]| |$)")
"""What a fix begins with where another value helps."""


@dataclass(frozen=True, slots=True)
class WorkingCommand:
    command: str
    also: tuple[str, ...]
    """What else was refused, beside the error at hand."""


Parse = Callable[[list[str]], tuple[Any, argparse.Namespace]]
"""From the words after `holdfast` to the command's module and its arguments. Raises ConfigurationError."""


def working_command(error: HoldfastError, words: Sequence[str], parse: Parse) -> WorkingCommand | None:
    """`words`: as they were typed after `holdfast`, and refused with `error`."""
    from holdfast.doctor.command.parse import parse_command

    text, refused, also = command_line(words), error, list[str]()
    for _ in range(ROUNDS):
        parsed = parse_command(text)
        changed = None if parsed is None else parsed.with_changes(_changes(refused))
        if changed is None or changed == text:
            return None
        text = changed
        found = refused_start(shlex.split(text)[1:], parse)
        if found is None:
            return WorkingCommand(text, tuple(also))
        also.append(found.message)
        refused = found
    return None


def _changes(error: HoldfastError) -> dict[str, str | None]:
    """Flags with their new values, or None for those that are to go."""
    advised = _VALUE.match(error.fix or "")
    names = getattr(error, "settings", ()) or ([error.field] if error.field else [])
    flags = [name if name.startswith("-") else flag_name(name) for name in names]
    if advised is not None and len(flags) < 2:
        value = advised[2]
        return {advised[1]: "" if value in ("or", "for", "to") else value}
    return dict.fromkeys(flags)


def refused_start(words: list[str], parse: Parse) -> HoldfastError | None:
    """Why these words would not start a server, as far as that can be known without loading."""
    from holdfast.engine.startup.build import find_model, plan_model
    from holdfast.engine.startup.select_device import settle_device
    from holdfast.footprint.cpu import FRONT_BYTES

    try:
        serve, arguments = parse(words)
        engine, server = serve.read_settings(arguments)
        engine = settle_device(engine)
        if _is_here(engine):
            model = find_model(engine, progress=False)
            plan_model(engine, model, front_bytes=FRONT_BYTES)
            serve.server_settings(engine, server, model)
    except ModelError:
        return None  # Nothing that a flag could change.
    except HoldfastError as error:
        return error
    return None


def _is_here(config: EngineConfig) -> bool:
    from holdfast.checkpoints import DEFAULT_MODEL
    from holdfast.checkpoints.sources import builtin

    name = config.model or DEFAULT_MODEL
    entry = builtin.find(name)
    return Path(name).expanduser().exists() or (entry is not None and builtin.is_cached(entry))


def with_working_command(error: ConfigurationError, words: Sequence[str], parse: Parse) -> None:
    """Adds to the error what else is refused, and to its fix the command that passes."""
    found = working_command(error, words, parse)
    if found is None:
        return
    error.message += "".join(f"\n  also refused: {line.splitlines()[0]}" for line in found.also)
    error.fix = found.command if error.fix is None else f"{error.fix}: {found.command}"
