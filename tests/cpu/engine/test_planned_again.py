"""A start that runs out of memory is tried again with a plan of what is free then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.engine.startup.build_gpu import START_TRIES, start_with_room
from holdfast.errors import DoesNotFitError, EngineError
from holdfast.execution.gpu.memory.virtual_memory import RangeError


def plan(number: int, budget_bytes: int | None = None) -> Any:
    """Less is free each time, unless it is said what."""
    return SimpleNamespace(
        number=number,
        budget_bytes=budget_bytes or (1 << 30) - number,
        terms={"kv_pool": 1 << 20},
        limits=SimpleNamespace(max_model_len=10, max_num_seqs=2),
    )


def start(errors: list[BaseException]) -> tuple[Any, list[int]]:
    """What came of it, and the plans that were tried."""
    tried: list[int] = []

    def build(one: Any) -> Any:
        tried.append(one.number)
        if errors:
            raise errors.pop(0)
        return "built"

    return start_with_room(plan(0), build, lambda failed: plan(failed.number + 1)), tried


SHORTAGES: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    RangeError("2 bytes of memory", 2),
    DoesNotFitError("memory became short"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_shortage_is_planned_again(error: BaseException) -> None:
    assert start([error, error]) == ("built", [0, 1, 2])


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), EngineError("no"), RangeError("it", 1)])
def test_what_is_no_shortage_is_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        start([error])


def test_what_does_not_fit_in_as_much_memory_as_before_is_tried_once_more() -> None:
    """A neighbour may have come and gone; if nobody takes anything, it is the plan that is wrong."""
    tried: list[int] = []

    def build(one: Any) -> Any:
        tried.append(one.number)
        raise DoesNotFitError("a step took more memory than planned")

    with pytest.raises(DoesNotFitError, match="more memory than planned"):
        start_with_room(plan(0, 1 << 30), build, lambda failed: plan(failed.number + 1, 1 << 30))
    assert tried == [0, 1]


def test_it_is_not_tried_for_ever() -> None:
    errors: list[BaseException] = [torch.OutOfMemoryError("none") for _ in range(START_TRIES)]
    with pytest.raises(DoesNotFitError) as refusal:
        start(errors)
    assert refusal.value.code == "HF125"
    assert not errors


def test_what_became_impossible_is_refused_with_numbers() -> None:
    def again(failed: Any) -> Any:
        raise DoesNotFitError("it does not fit", needed="15 GiB", found="2 GiB")

    with pytest.raises(DoesNotFitError) as refusal:
        start_with_room(plan(0), lambda one: (_ for _ in ()).throw(torch.OutOfMemoryError("none")), again)
    assert (refusal.value.needed, refusal.value.found) == ("15 GiB", "2 GiB")
