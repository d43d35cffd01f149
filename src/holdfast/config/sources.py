"""Where settings come from: flag > environment (HOLDFAST_NAME) > --config file (TOML, YAML) > default.

Builds the flags of an argparse parser out of the declared settings; knows none of them by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.config.setting import (
    Origin,
    build,
    environment_name,
    flag,
    flag_name,
    refusals,
    refuse,
    texts,
    texts_or_tables,
    unknown_name,
)
from holdfast.config.tuning import TUNING
from holdfast.config.unsupported import LISTS, RANK_GPUS, SHORT, SWITCHES
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

T = TypeVar("T")

OTHER_VARIABLES = (
    "HOLDFAST_CACHE",
    "HOLDFAST_RUNTIME_DIR",
    "HOLDFAST_CPU_KERNELS",
    "HOLDFAST_NATIVE",
    "HOLDFAST_FAULT_",
    "HOLDFAST_SOAK_",
    "HOLDFAST_OPERATIONS",
    RANK_GPUS,
)
"""Beginnings of variables that mean something and are no settings of a server."""


def add_flags(parser: argparse.ArgumentParser, kind: type, *, title: str, skip: Iterable[str] = ()) -> None:
    """Values stay text here; the setting's own parser reads them, wherever they come from."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(kind):
        if field.name in skip:
            continue
        spec = field.metadata
        names = (flag_name(field.name), *spec["flags"])
        default = "" if field.default is None or field.default == () else f" (default: {_shown(field.default)})"
        common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": spec["help"] + default}
        if spec["parse"] is flag:
            # --name, --no-name and --name=false all work. The last are options of their own with the "=" in their
            # name, because an optional value would swallow a MODEL that comes next.
            hidden = common | {"help": argparse.SUPPRESS}
            group.add_argument(*names, action="store_const", const="true", **common)
            _add_words(group, field.name, hidden)
        elif spec["parse"] in (texts, texts_or_tables):
            # Given twice, both count.
            group.add_argument(*names, nargs="+", action="extend", metavar=spec["metavar"], **common)
        else:
            group.add_argument(*names, metavar=spec["metavar"] or "VALUE", **common)


def add_refused(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """vLLM's flags, taken with as many words as they have there, to be refused with the reason all at once."""
    for name in names:
        hidden: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        flags = (flag_name(name), *SHORT.get(name, ()))
        if name in SWITCHES:
            parser.add_argument(*flags, action="store_const", const="true", **hidden)
            _add_words(parser, name, hidden)
        else:
            parser.add_argument(*flags, nargs="*" if name in LISTS else None, **hidden)


def _add_words(group: Any, name: str, hidden: Mapping[str, Any]) -> None:
    written = flag_name(name)
    for value, words in (("true", _YES), ("false", _NO)):
        spellings = [f"{written}={spelled}" for word in words for spelled in {word, word.upper(), word.capitalize()}]
        group.add_argument(*spellings, action="store_const", const=value, **hidden)
    group.add_argument("--no-" + written[2:], action="store_const", const="false", **hidden)


_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

FLAG, VARIABLE = Origin(flag_name), Origin(environment_name)


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """All named values, and where each was written: a mistake is said in the words of its place."""

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, FLAG)


def gather(
    kinds: Sequence[type],
    given: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Gathered:
    """All named values for these kinds of config, the stronger source winning."""
    environment = os.environ if environment is None else environment
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    values, origins = ({}, {}) if file is None else _read_file(file, _further_names(kinds))
    for variable in environment:
        if variable.startswith("HOLDFAST_") and not variable.startswith(OTHER_VARIABLES):
            name = variable.removeprefix("HOLDFAST_").lower()
            if name not in names:
                raise unknown_name(name, names, VARIABLE)
    for name in names:
        if environment_name(name) in environment:
            values[name], origins[name] = environment[environment_name(name)], VARIABLE
    for name, value in given.items():
        if value is not None:
            values[name], origins[name] = value, FLAG
    return Gathered(values, origins)


def split(
    gathered: Gathered, first: tuple[type[T], Mapping[str, str]], second: tuple[type[Any], Mapping[str, str]]
) -> tuple[T, Any]:
    """Gives each of two kinds its own values; a name that neither knows is an error."""
    refused = {**first[1], **second[1]}
    refuse(refusals(gathered.values, refused, gathered.origin))
    parts: list[dict[str, Any]] = [{}, {}]
    known: list[set[str]] = [
        {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for kind in (first[0], second[0])
    ]
    for name, value in gathered.values.items():
        if name in known[0]:
            parts[0][name] = value
        elif name in known[1]:
            parts[1][name] = value
        elif name not in refused and name not in TUNING:
            raise unknown_name(name, known[0] | known[1], gathered.origin(name))
    return (
        build(first[0], parts[0], refused=first[1], origin=gathered.origin),
        build(second[0], parts[1], refused=second[1], origin=gathered.origin),
    )


def _further_names(kinds: Sequence[type]) -> dict[str, str]:
    """Other spellings of settings that have a flag of their own, and what they are called here."""
    return {
        spelled[2:].replace("-", "_"): field.name
        for kind in kinds
        for field in dataclasses.fields(kind)
        for spelled in field.metadata["flags"]
        if spelled.startswith("--")
    }


def _read_file(path: Path, further: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Origin]]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"--config: {path} cannot be read: {error.strerror}", field="config") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config: {path} is not text: {error}", field="config") from error
    found = _read_yaml(path, text) if path.suffix in (".yaml", ".yml") else _read_toml(path, text)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for written, value in found.items():
        name = written.replace("-", "_")
        name = further.get(name, name)
        if name in values:
            raise _twice(path, written)
        values[name], origins[name] = value, _written_in(path, text, written)
    return values, origins


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"--config: {path} is not valid TOML: {error}", fix="rename it to .yaml if it is YAML", field="config"
        ) from error


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml  # Only who has such a file waits for it.

    class Once(yaml.SafeLoader):  # type: ignore[misc]  # The library tells no types.
        """Of two lines with one name the parser would take the last without a word."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            again = next((name for place, name in enumerate(names) if name in names[:place]), None)
            if again is not None:
                raise _twice(path, again)
            return dict(super().construct_mapping(node, deep))

    try:
        found = yaml.load(text, Loader=Once)
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigurationError(f"--config: {path} is not valid YAML: {said}", field="config") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(
            f"--config: {path} is not a list of settings", needed="lines such as max-model-len: 8192", field="config"
        )
    return found


def _twice(path: Path, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"--config: {path} sets {shorten(name)} twice",
        needed="one line per setting",
        fix=f"leave one {shorten(name)} out",
        field=name.replace("-", "_"),
    )


def _written_in(path: Path, text: str, written: str) -> Origin:
    """The parser keeps no lines: the first that begins as this name must be written is it, as far as we can tell."""
    key = re.compile(rf"""\s*\[?\s*["']?{re.escape(written)}["']?\s*[=.:\]]""")
    lines = (number for number, line in enumerate(text.splitlines(), 1) if key.match(line))
    line = next(lines, None)
    place = f"{path}: " if line is None else f"{path}, line {line}: "
    return Origin((lambda name: name.replace("_", "-")) if "-" in written else str, place)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
