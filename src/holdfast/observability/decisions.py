"""An automatic choice together with its reason. Owns the record and its one-line form, not the choosing."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLING = "sampling defaults"
"""The field of the one that tells how is sampled where a request says nothing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`source` says who decided: "flag", "environment", "file", "default", "measured", "model", ..."""

    field: str
    value: object
    reason: str
    source: str

    def line(self) -> str:
        return f"{self.field} = {self.value} ({self.source}): {self.reason}"
