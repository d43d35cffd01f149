"""What a tool is, and what is read out of an answer that may call some. Knows no way of writing calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    given: Mapping[str, Any]
    """As templates take it: {"type": "function", "function": {...}}."""
    parameters: Mapping[str, Any]
    """A JSON schema of an object."""
    strict: bool = False


class Content(NamedTuple):
    """Text that is no part of a call."""

    text: str


class CallBegun(NamedTuple):
    call: int
    """Counts the calls of one answer from 0."""
    name: str


class Arguments(NamedTuple):
    """A further piece of a call's arguments, as the model writes them."""

    call: int
    text: str


class Reasoning(NamedTuple):
    """Text the model thinks before it answers."""

    text: str


Event = Content | CallBegun | Arguments | Reasoning
