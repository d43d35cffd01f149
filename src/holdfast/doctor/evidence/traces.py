"""A traceback as a log has it: what its frames say of the phase. Knows no rule; log_state.py finds where one begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.doctor.rules.load import Mark


@dataclass(slots=True)
class Trace:
    """A traceback: what its frames say of the phase, outermost first."""

    last: int
    marks: list[Mark] = field(default_factory=list)
    torn: bool = False
    """A frame of it was cut short, and might have told more."""
    ended: bool = False
    """Its error was seen."""
    code_next: bool = False
    """The last line of it was a frame, so the next is the code that stood there."""

    @property
    def phase(self) -> str | None:
        """The innermost frame that tells one."""
        return next((mark.phase for mark in reversed(self.marks) if mark.phase), None)

    @property
    def tags(self) -> set[str]:
        return {mark.tag for mark in self.marks if mark.tag}
