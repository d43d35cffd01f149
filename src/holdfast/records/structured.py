"""What an answer must look like: vLLM's names, checked when made. What a schema or grammar means is `text`'s to say."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.units import shorten

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of them is asked for."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark as llguidance takes it, or GBNF or EBNF, told apart by how it is written."""
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    """Between the parts of JSON."""
    disable_any_whitespace: bool = False
    """JSON without any white space between its parts."""
    disable_additional_properties: bool = False
    """A schema's objects have the properties it names and no others, unless it says so itself."""
    disable_fallback: bool = False
    """There is one way to hold an answer to its form here, and none to fall back to."""
    backend: str | None = None
    """Of older vLLM; "auto" and "guidance" say what is done anyway."""

    def __post_init__(self) -> None:
        asked = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            raise RequestError(
                f"structured_outputs asks for {', '.join(asked) if asked else 'nothing'}",
                needed=f"exactly one of {', '.join(KINDS)}",
                field="structured_outputs",
            )
        if self.choice is not None and not (self.choice and all(isinstance(each, str) for each in self.choice)):
            raise RequestError("choice must be a list of strings, not empty", field="choice")
        if self.backend not in (None, "auto", "guidance", "llguidance"):
            raise UnsupportedOptionError(
                f"structured outputs are not made with {shorten(self.backend)!r} here",
                fix="leave backend out",
                field="backend",
            )

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""
