"""`StructuredOutputs`, what the loop needs of structured output, and an implementation for engines without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.errors import HoldfastError, UnsupportedOptionError
from holdfast.records import Failure, Request, StepPlan, StepResult, TokenMasks
from holdfast.records.steps import Verdict


class StructuredOutputs(Protocol):
    """Requests come in, are compiled for, and follow a grammar until they are forgotten."""

    @property
    def compiling(self) -> bool:
        """Whether requests wait for their grammar."""

    def begin(self, request: Request) -> None:
        """`pop_compiled` hands it on. Raises HoldfastError for what is refused at once."""

    def forget(self, request_id: str) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def pop_compiled(self, wait_s: float = 0.0) -> list[tuple[Request, HoldfastError | None]]: ...

    def awaiting_mask(self, *, ahead: bool) -> frozenset[str]: ...

    def wait_for_masks(self, timeout_s: float) -> None: ...

    def masks(self, plan: StepPlan, before: Callable[[], StepResult] | None = None) -> TokenMasks | None: ...

    def advance_early(self, result: StepResult, *, newest: bool) -> None: ...

    def advance_grammar(self, request_id: str, token: int) -> Verdict | Failure: ...


class NoStructuredOutput:
    compiling = False

    def begin(self, request: Request) -> None:
        raise UnsupportedOptionError("structured output is not enabled in this engine", field="structured_outputs")

    def forget(self, request_id: str) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass

    def pop_compiled(self, wait_s: float = 0.0) -> list[tuple[Request, HoldfastError | None]]:
        return []

    def awaiting_mask(self, *, ahead: bool) -> frozenset[str]:
        return frozenset()

    def wait_for_masks(self, timeout_s: float) -> None:
        pass

    def masks(self, plan: StepPlan, before: Callable[[], StepResult] | None = None) -> TokenMasks | None:
        return None

    def advance_early(self, result: StepResult, *, newest: bool) -> None:
        pass

    def advance_grammar(self, request_id: str, token: int) -> Verdict | Failure:
        raise AssertionError("no request follows a grammar")
