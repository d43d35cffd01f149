"""How a family writes calls, in parts that a grammar is made of. Reading them back is each family's own."""

from __future__ import annotations

from dataclasses import dataclass

NAME, ARGUMENTS = "\0name", "\0arguments"
"""Stand in a format for a tool's name as a JSON string, and for its arguments."""
BARE_NAME = "\0bare name"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """before call between call ... after; a single call stands without `before` and `after` where it may."""

    call: tuple[str, ...]
    between: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    bare_alone: bool = False
    marks: tuple[str, ...] = ()
    """Parts that are tokens of their own where the vocabulary has them."""

    @property
    def opens_with_mark(self) -> bool:
        """Whether a call is told from other text by how it begins."""
        return (*self.before, *self.call)[0] in self.marks
