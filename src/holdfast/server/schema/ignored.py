"""Fields of a request that nothing is done with: told to the client in a header and to the log, once a name.

Owns what is kept of such names and how they are shown. Which fields these are is decided in `fields` and by whoever
reads a part of a body.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field

from holdfast.units import shorten

log = logging.getLogger("holdfast.server")

HEADER = "X-Holdfast-Ignored-Fields"
MOST_SHOWN = 16
"""Names in a header, of one request."""
MOST_NAME_CHARS = 64
MOST_LOGGED = 256
"""Names in the log, of one server: whoever makes up new ones does not fill it."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class IgnoredFieldLog:
    """One line for each name, for as long as the server runs."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, name: str, known: Collection[str], why: str) -> None:
        if name in self._told or len(self._told) >= MOST_LOGGED:
            return
        self._told.add(name)
        if not why:
            near = difflib.get_close_matches(name, known, n=1)
            similar = f" (similar: {near[0]})" if near else ""
            why = f"unknown here{similar}; --strict-fields refuses such requests"
        log.warning("ignored the field %s of a request: %s", name, why)
        if len(self._told) == MOST_LOGGED:
            log.warning("%d unknown fields were logged; further ones are not", MOST_LOGGED)


@dataclass(slots=True)
class IgnoredFields:
    """Of one request."""

    strict: bool = True
    """Whether a field that is not known is refused in place of being ignored."""
    log: IgnoredFieldLog | None = None
    names: dict[str, None] = field(default_factory=dict)
    left_out: bool = False

    def add(self, name: str, known: Collection[str] = (), why: str = "") -> None:
        """`known`: what may have been meant. `why`: of a field that is known."""
        shown = shown_name(name)
        if shown in self.names:
            return
        if len(self.names) >= MOST_SHOWN:
            self.left_out = True
            return
        self.names[shown] = None
        if self.log is not None:
            self.log.tell(shown, known, why)

    @property
    def header(self) -> str | None:
        """The value of `HEADER`; None: nothing was ignored."""
        return ", ".join([*self.names, *(["..."] if self.left_out else [])]) or None


def shown_name(name: str) -> str:
    """A client's own word, as it may stand in a header and in a log."""
    return _NOT_PLAIN.sub("?", shorten(name, MOST_NAME_CHARS))


_OUTSIDE = IgnoredFields()
IGNORED: ContextVar[IgnoredFields] = ContextVar("ignored fields", default=_OUTSIDE)
"""Of the request that is being read. Where there is none, all that is not known is refused."""
