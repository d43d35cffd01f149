"""A step while it is being planned: rows that can still be taken back, and the token budget. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.records import Row, SequenceStart, StepPlan, TableWrite
from holdfast.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class PlannedRow:
    sequence: Sequence
    row: Row
    table_writes: list[TableWrite]
    start: SequenceStart | None = None


@dataclass(slots=True, eq=False)
class Draft:
    budget: int
    """Tokens this step may still compute."""
    rows: dict[Sequence, PlannedRow] = field(default_factory=dict)
    uncommitted: list[PlannedRow] = field(default_factory=list)
    """Rows whose sequence may still be preempted; nobody has been told of their blocks yet."""
    preempted: bool = False
    """Somebody had to give pages back so that others could go on: not the step to admit anyone."""

    def add(self, planned: PlannedRow) -> None:
        self.rows[planned.sequence] = planned
        self.uncommitted.append(planned)
        self.budget -= planned.row.count

    def remove(self, sequence: Sequence) -> None:
        """Takes back the row of a sequence that has been preempted, if it has one."""
        planned = self.rows.pop(sequence, None)
        if planned is not None:
            self.uncommitted.remove(planned)
            self.budget += planned.row.count

    def plan(self, step_id: int) -> StepPlan:
        planned = self.rows.values()
        return StepPlan(
            step_id=step_id,
            starts=[entry.start for entry in planned if entry.start is not None],
            table_writes=[write for entry in planned for write in entry.table_writes],
            rows=[entry.row for entry in planned],
        )
