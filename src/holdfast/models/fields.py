"""Reads one field of a foreign config at a time: typed, bounded, and named in every complaint.

Knows nothing of any model family. A null field counts as missing, as transformers writes it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, overload

from holdfast.errors import CheckpointError
from holdfast.units import shorten

MAX_LAYERS = 1024
"""Eight times what the deepest of the models that are served has; a plan takes seconds for so many."""
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 13
MAX_WIDTH = 1 << 22
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 30
MAX_EXPERTS = 1 << 14


class Fields:
    """`values` as they were parsed; `where` is what people call that file; `prefix` stands before every name.

    `names` says how this file spells the names that are asked for: one spelling, or several of which the first
    that is there counts. With `only_named`, a name without a spelling is a field this file never has.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        where: str,
        prefix: str = "",
        names: Mapping[str, str | tuple[str, ...]] | None = None,
        only_named: bool = False,
    ) -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self.names = names or {}
        self.only_named = only_named

    def key(self, name: str) -> str:
        """How this file spells `name`."""
        spellings = self.names.get(name, name)
        if isinstance(spellings, str):
            return self.prefix + spellings
        present = (spelling for spelling in spellings if self.values.get(self.prefix + spelling) is not None)
        return self.prefix + next(present, spellings[0])

    def raw(self, name: str) -> Any:
        if self.only_named and name not in self.names:
            return None
        return self.values.get(self.key(name))

    def has(self, name: str) -> bool:
        return self.raw(name) is not None

    def wrong(self, name: str, needed: str, found: object) -> CheckpointError:
        full = self.key(name)
        return CheckpointError(
            f"{self.where}: {full} cannot be used", needed=f"{full}: {needed}", found=shorten(found, 120), field=full
        )

    def mistyped(self, name: str, needed: str, found: object) -> CheckpointError:
        """Where no text will do: one is quoted, for "4" is not 4."""
        error = self.wrong(name, needed, f'"{shorten(found)}", a string' if isinstance(found, str) else found)
        error.fix = f"correct {self.key(name)} there, or download that file again"
        return error

    def missing(self, name: str, needed: str) -> CheckpointError:
        error = self.wrong(name, needed, "nothing: the field is missing")
        error.fix = f"write {self.key(name)} there, or download that file again"
        return error

    def get(self, name: str, needed: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is ...:
            raise self.missing(name, needed)
        return default

    @overload
    def integer(self, name: str, *, high: int, low: int = 1, default: int = ...) -> int: ...
    @overload
    def integer(self, name: str, *, high: int, low: int = 1, default: None) -> int | None: ...
    def integer(self, name: str, *, high: int, low: int = 1, default: Any = ...) -> int | None:
        needed = f"a whole number from {low} to {high}"
        value = self.get(name, needed, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.mistyped(name, needed, value)
        return value

    @overload
    def number(self, name: str, *, low: float, high: float, default: float = ...) -> float: ...
    @overload
    def number(self, name: str, *, low: float, high: float, default: None) -> float | None: ...
    def number(self, name: str, *, low: float, high: float, default: Any = ...) -> float | None:
        needed = f"a number from {low:g} to {high:g}"
        value = self.get(name, needed, default)
        if value is None:
            return None
        good = not isinstance(value, bool) and isinstance(value, int | float)
        if not good or not math.isfinite(value) or not low <= value <= high:
            raise self.mistyped(name, needed, value)
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.get(name, "true or false", default)
        if not isinstance(value, bool):
            raise self.mistyped(name, "true or false", value)
        return value

    def text(self, name: str, *, default: str = ...) -> str:  # type: ignore[assignment]
        value = self.get(name, "a string", default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def table(self, name: str) -> Fields | None:
        """A table within the table; None when it is missing, null or empty."""
        value = self.raw(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.mistyped(name, "an object", value)
        return Fields(value, where=f"{self.where}, {self.key(name)}")

    def texts(self, name: str, *, count: int, allowed: Collection[str]) -> tuple[str, ...] | None:
        """One of `allowed` for each of `count` layers; None when missing."""
        value = self.raw(name)
        if value is None:
            return None
        needed = f"{count} of " + ", ".join(sorted(allowed))
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(name, needed, value)
        for entry in value:
            if not isinstance(entry, str) or entry not in allowed:
                raise self.wrong(name, needed, entry)
        return tuple(value)

    def flags(self, name: str, *, count: int) -> tuple[bool, ...]:
        """Yes or no for each of `count` layers; some writers put 1 and 0."""
        needed = f"true or false, or 1 or 0, for each of {count} layers"
        value = self.get(name, needed, ...)
        if not isinstance(value, list) or len(value) != count:
            raise self.mistyped(name, needed, value)
        for entry in value:
            if not isinstance(entry, int) or entry not in (0, 1):
                raise self.mistyped(name, needed, entry)
        return tuple(bool(entry) for entry in value)

    def integers(self, name: str, *, low: int, high: int, most: int) -> tuple[int, ...] | None:
        """At most `most` whole numbers; None when missing."""
        value = self.raw(name)
        if value is None:
            return None
        needed = f"a list of at most {most} whole numbers from {low} to {high}"
        if not isinstance(value, list) or len(value) > most:
            raise self.mistyped(name, needed, value)
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not low <= entry <= high:
                raise self.mistyped(name, needed, entry)
        return tuple(value)

    def numbers(self, name: str, *, low: float, high: float, most: int) -> tuple[float, ...]:
        """At most `most` of them; empty when missing."""
        needed = f"a list of at most {most} numbers from {low:g} to {high:g}"
        value = self.get(name, needed, [])
        if not isinstance(value, list) or len(value) > most:
            raise self.mistyped(name, needed, value)
        for entry in value:
            good = not isinstance(entry, bool) and isinstance(entry, int | float)
            if not good or not math.isfinite(entry) or not low <= entry <= high:
                raise self.mistyped(name, needed, entry)
        return tuple(float(entry) for entry in value)

    def token_ids(self, name: str, *, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of them; empty when missing."""
        value = self.raw(name)
        if value is None:
            return ()
        needed = f"token ids below the vocabulary's {vocab_size}"
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self.mistyped(name, needed, value)
        return tuple(dict.fromkeys(ids))
