"""A step that the GPU was given: where its results arrive, and what becomes of them. Launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.errors import StepMemoryError
from holdfast.execution.gpu.sampling import FoundLogprobs, FoundScores
from holdfast.execution.gpu.step import DeviceStep
from holdfast.execution.sampling.nonfinite import broken_rows, tell_of_others
from holdfast.records import AdapterArrival, Failure, Row, StepFailure, StepPlan, StepResult, TokenLogprobs

Sampled = list[tuple[int, TokenLogprobs | None]]
"""A token for each row that samples, in the order of the rows."""
Told = list[list[TokenLogprobs]]
"""Of each row that scores, in the order of the rows."""


@dataclass(frozen=True, slots=True)
class Launched:
    step: DeviceStep
    place: int
    """Of its tokens in pinned memory."""
    logprobs: FoundLogprobs | None
    scores: FoundScores | None = None
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """By slot."""
    late: list[int] = field(default_factory=list)
    """Slots that were sampled without their masks: see StepResult.late."""


ReadStep = Callable[[Launched], tuple[Sampled, Told]]
"""Waits until its tokens are here."""


class GpuStep:
    """A step that was launched: its tokens arrive in pinned memory. Or one that was done in parts, and is here."""

    def __init__(
        self,
        read: ReadStep,
        plan: StepPlan,
        *,
        launched: Launched | None = None,
        sampled: Sampled | None = None,
        told: Told | None = None,
        embeddings: Sequence[bytes] = (),
        failures: Sequence[StepFailure] = (),
        late: Sequence[int] = (),
    ) -> None:
        self.late = list(late) if launched is None else launched.late
        self._read, self._plan, self._launched = read, plan, launched
        self._sampled: Sampled = sampled or []
        self._told: Told = told or []
        self._embeddings, self._failures = list(embeddings), list(failures)
        self.adapters: list[AdapterArrival] = []
        """Known when it was submitted."""
        self.over: Callable[[bool], tuple[list[int], list[int]]] | None = None
        """Of copies between tiers: those that are over, and those that failed. It waits a little where it shall."""
        self.host_pages: Callable[[], int] = lambda: 0
        self.loading_s: Callable[[], float] = lambda: 0.0
        self._copied: tuple[list[int], list[int]] | None = None
        self._loading_s = 0.0

    def result(self) -> StepResult:
        if self._launched is not None:
            (self._sampled, self._told), self._launched = self._read(self._launched), None
        if self._copied is None:
            self._copied = ([], []) if self.over is None else self.over(not self._plan.rows)
            self._loading_s = self.loading_s()
        told = any(logprobs is not None for _, logprobs in self._sampled)
        rows, failed = self._plan.rows, {failure.slot for failure in self._failures}
        broken = [
            failure
            for failure in broken_rows(rows, [token for token, _ in self._sampled])
            if failure.slot not in failed
        ]
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=[max(token, 0) for token, _ in self._sampled],
            logprobs=[logprobs for _, logprobs in self._sampled] if told else [],
            prompt_logprobs=tell_of_others(rows, self._told, broken) if broken else self._told,
            embeddings=self._embeddings,
            failures=[*self._failures, *broken],
            late=self.late,
            adapters=self.adapters,
            finished_copies=self._copied[0],
            failed_copies=self._copied[1],
            host_pages=self.host_pages(),
            loading_s=self._loading_s,
        )


def no_memory(row: Row, said: str) -> StepFailure:
    error = StepMemoryError(
        "out of GPU memory in a step of one token",
        found=said,
        fix="send it again; stop other processes that use the GPU, or lower --gpu-memory-utilization",
    )
    return StepFailure(slot=row.slot, failure=Failure.of(error))


def in_order(rows: Sequence[Row], found: dict[int, bytes]) -> list[bytes]:
    """For every row that samples; none at all where nobody asked."""
    return [found.get(row.slot, b"") for row in rows if row.samples] if found else []
