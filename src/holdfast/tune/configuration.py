"""`ServerConfiguration`: the settings by which a server differs from the default; `Axis`: what one setting may be.

Knows the names of settings and how a command is written; decides nothing.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

import msgspec

from holdfast.doctor.command.parse import parse_command
from holdfast.errors import ConfigurationError
from holdfast.planner.engines.command import line

Value = int | float | str
ENGINES = ("holdfast", "vllm")


class Axis(msgspec.Struct, frozen=True):
    name: str
    values: tuple[Value | None, ...]
    """In order; None: what the engine takes by itself, in the place where that lies."""


class LeftOut(msgspec.Struct, frozen=True):
    """Settings that are not varied, and why."""

    names: tuple[str, ...]
    why: str


class ServerConfiguration(msgspec.Struct, frozen=True):
    changes: tuple[tuple[str, Value], ...] = ()

    def value(self, name: str) -> Value | None:
        return dict(self.changes).get(name)

    @property
    def is_default(self) -> bool:
        return not self.changes

    def __str__(self) -> str:
        return shlex.join(flags_of(self.changes)) or "the default"


DEFAULT = ServerConfiguration()


def flags_of(changes: Sequence[tuple[str, Value]]) -> list[str]:
    return [word for name, value in changes for word in (f"--{name.replace('_', '-')}", str(value))]


def command_of(configuration: ServerConfiguration, *, engine: str, model: str, flags: Sequence[str]) -> str:
    """As a person starts it, without keys."""
    text = _written(configuration, engine, model, flags)
    command = parse_command(text)
    return text if command is None else command.with_changes({})


def _written(configuration: ServerConfiguration, engine: str, model: str, flags: Sequence[str]) -> str:
    changes: dict[str, object] = dict(configuration.changes)
    if "kv_offloading_size" in changes:  # Some releases take a size with the name of what offloads alone.
        changes["kv_offloading_backend"] = "native"
    return " ".join([line(engine, model, changes), *map(shlex.quote, flags)])


def start_words(
    configuration: ServerConfiguration, *, engine: str, model: str, flags: Sequence[str], port: int
) -> list[str]:
    """The same for a process of this program, on a port of its own."""
    words = shlex.split(_written(configuration, engine, model, flags))
    quiet = ["--disable-access-log"] if engine == "holdfast" else ["--disable-uvicorn-access-log"]
    return [*program(engine), *words[1:], "--host", "127.0.0.1", "--port", str(port), *quiet]


def program(engine: str) -> list[str]:
    if engine == "holdfast":
        return [sys.executable, "-m", "holdfast"]
    found = shutil.which(engine)
    if found is None:
        raise ConfigurationError(
            f"--engine {engine}: there is no program called {engine}",
            needed=f"{engine} in PATH",
            fix="activate the environment that it is installed in, or leave --engine out",
            field="engine",
        )
    return [found]
