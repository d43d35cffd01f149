"""An automatic choice together with its reason. Owns the record and its one-line form, not the choosing."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLING = "sampling defaults"
"""The field of the decision on how to sample where a request does not say."""
SAID_AT_START = (SAMPLING, "kv_store", "idle_release", "yield_to_neighbours", "enable_expert_parallel")
"""Fields of decisions that everybody sees when a server starts: what it will do by itself later on, and within which
limits; and what was asked for and may come to nothing."""
DEFAULT_REASON = "the default"
"""What `source` says already: not repeated in the line."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`source` says who decided: "flag", "environment", "file", "default", "measured", "model", ..."""

    field: str
    value: object
    reason: str
    source: str
    lowered: bool = False
    """For want of memory, below what the model allows, what is usual or what was planned: a warning at start."""

    def line(self) -> str:
        reason = "" if self.reason == DEFAULT_REASON else f": {self.reason}"
        return f"{self.field} = {self.value} ({self.source}){reason}"


def said_at_start(line: str) -> bool:
    """Whether this line of a decision is one of those."""
    return line.startswith(tuple(f"{field} = " for field in SAID_AT_START))
