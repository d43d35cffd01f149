"""An automatic choice together with its reason. Owns the record and its one-line form, not the choosing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """`source` says who decided: "flag", "environment", "file", "default", "measured", "model", ..."""

    field: str
    value: object
    reason: str
    source: str

    def line(self) -> str:
        return f"{self.field} = {self.value} ({self.source}): {self.reason}"
