"""A step while it is being planned (rows that can still be taken back, and the token budget) and while its result is
awaited. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import EngineError
from holdfast.kvcache import Tier
from holdfast.records import AdapterFetch, BlockCopy, Row, SequenceStart, StepPlan, StepResult, TableWrite
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
    kept_back: int = 0
    """Tokens of the step that are not to be used."""
    rows: dict[Sequence, PlannedRow] = field(default_factory=dict)
    uncommitted: list[PlannedRow] = field(default_factory=list)
    """Rows whose sequence may still be preempted; nobody has been told of their blocks yet."""
    preempted: bool = False
    """Somebody had to give pages back so that others could go on: not the step to admit anyone."""

    fetches: list[AdapterFetch] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

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

    def leave(self, tokens: int) -> None:
        """No more than these from here on."""
        if self.budget > tokens:
            self.kept_back += self.budget - tokens
            self.budget = tokens

    def plan(self, step_id: int) -> StepPlan:
        planned = self.rows.values()
        return StepPlan(
            step_id=step_id,
            starts=[entry.start for entry in planned if entry.start is not None],
            table_writes=[write for entry in planned for write in entry.table_writes],
            rows=[entry.row for entry in planned],
            fetches=self.fetches,
            copies=self.copies,
        )


@dataclass(slots=True)
class StepInFlight:
    step_id: int
    rows: list[PlannedRow]
    planned_s: float = 0.0
    void: set[Sequence] = field(default_factory=set)
    """Whose rows count for nothing: they may have read what a failed row did not write."""

    def check(self, result: StepResult) -> None:
        """Whether it is a result of this plan. A row that failed has told nothing."""
        failed = {failure.slot for failure in result.failures}
        rows = [planned.row for planned in self.rows]
        sampling = sum(row.samples for row in rows)
        scored = [0 if row.slot in failed else row.scored for row in rows if row.scored]
        counts = [len(entry) for entry in result.prompt_logprobs]
        if len(result.token_ids) != sampling or len(result.logprobs) not in (0, sampling) or counts != scored:
            raise EngineError(
                f"the result of step {self.step_id} does not belong to its plan",
                needed=f"{sampling} tokens and {sum(scored)} scores of prompts",
                found=f"{len(result.token_ids)} tokens, {len(result.logprobs)} logprobs and {sum(counts)} scores",
            )


def moving_plan(step_id: int, moved: Mapping[int, int], running: Iterable[Sequence]) -> StepPlan:
    """A step without rows: pages change places, and who runs learns where its own are."""
    return StepPlan(
        step_id=step_id,
        copies=[BlockCopy(0, Tier.DEVICE, source, Tier.DEVICE, target, True) for source, target in moved.items()],
        table_writes=[
            TableWrite(sequence.slot, group, 0, list(table))
            for sequence in running
            for group, table in enumerate(sequence.book.tables)
        ],
    )
