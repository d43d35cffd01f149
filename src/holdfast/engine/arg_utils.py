"""`EngineArgs` and `AsyncEngineArgs`: an engine's settings as vLLM's scripts keep them before they make one.

A dataclass with every setting of `EngineConfig`, and vLLM's others, which are taken or refused when an engine is made.
Parses nothing itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.config import EngineConfig
from holdfast.config.engine import REFUSED
from holdfast.config.sources import add_flags, add_refused
from holdfast.config.tuning import TUNING

P = TypeVar("P", bound=argparse.ArgumentParser)

_OWN = tuple(field.name for field in dataclasses.fields(EngineConfig))
_THEIRS = tuple(name for name in {**REFUSED, **TUNING} if name not in _OWN)

if TYPE_CHECKING:
    # mypy cannot know fields that are made out of a table.
    class _Settings:
        def __init__(self, *positional: Any, **named: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...
else:
    _Settings = dataclasses.make_dataclass(
        "_Settings",
        [
            *((field.name, Any, field.default) for field in dataclasses.fields(EngineConfig)),
            *((name, Any, None) for name in _THEIRS),
            ("disable_log_stats", bool, False),
        ],
    )


class EngineArgs(_Settings):
    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Flags of all of these, each with its default."""
        add_flags(parser, EngineConfig, title="model and engine")
        add_refused(parser, (*_THEIRS, "disable_log_stats"))
        parser.set_defaults(**{field.name: field.default for field in dataclasses.fields(EngineConfig)})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Names that are no settings are the script's own."""
        known = (*_OWN, *_THEIRS, "disable_log_stats")
        return cls(**{name: getattr(args, name) for name in known if hasattr(args, name)})

    def settings(self) -> dict[str, Any]:
        """As `LLM` takes them: those that were not left as they are."""
        unset = EngineArgs()
        names = (*_OWN, *_THEIRS)
        return {name: value for name in names if (value := getattr(self, name)) != getattr(unset, name)}


class AsyncEngineArgs(EngineArgs):
    pass
