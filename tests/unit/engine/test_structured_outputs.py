"""Answers that follow a grammar: who is compiled for and when, which worker process follows them, and what happens when
that takes too long or dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
from deadlines import PATIENCE_S
from ended_processes import still_running
from small_vocabulary import END, SIZE, VOCABULARY, small_grammars

from holdfast.engine.core import grammar_workers, masks
from holdfast.engine.core import structured_outputs as module
from holdfast.engine.core.grammar_workers import Lane, LaneLimits
from holdfast.engine.core.structured_outputs import FORMS_AHEAD, StructuredOutputManager
from holdfast.engine.requests.structured_output import StructuredOutput
from holdfast.errors import EngineError
from holdfast.footprint.structured_output import form_bytes
from holdfast.records import Failure, Request, SamplingParams, StepFailure, StepResult
from holdfast.records.steps import Verdict
from holdfast.records.structured import LARGE_BYTES, StructuredOutputsParams
from holdfast.text.structured import wire
from holdfast.text.structured.client import GrammarService
from holdfast.units import MIB

# Ambiguous: a mask takes more work with each token, a millisecond of it first and a second after some two hundred.
LATE_BOMB = StructuredOutputsParams(grammar='start: e\ne: e e e e | e e e | e e | "a" | "ab" | "abc"')
LARGE = StructuredOutputsParams(choice=["x" * LARGE_BYTES])


def ask(
    number: int, asked: str | StructuredOutputsParams | None = None, *, max_tokens: int = 9, **changes: Any
) -> Request:
    """`asked`: a regular expression, or whatever else."""
    asked = asked or f"a{{{number + 1}}}"
    state = StructuredOutputsParams(regex=asked) if isinstance(asked, str) else asked
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=state)
    return Request(
        request_id=f"{number}", prompt_token_ids=[1], params=params, eos_token_ids=(END,), arrival_s=number, **changes
    )


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(lambda: VOCABULARY, [END], SIZE)
    made.start()
    yield made
    made.close()


@pytest.fixture
def manager(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> Iterator[StructuredOutputManager]:
    """Its verdicts come, however long a worker has to wait for a processor."""
    monkeypatch.setattr(module, "VERDICT_S", PATIENCE_S)
    monkeypatch.setattr(module, "VERDICT_CPU_S", PATIENCE_S)
    made = StructuredOutputManager(lambda: service.address, rows=2, vocab_size=SIZE, eos_ids=[END], by_priority=True)
    yield made
    made.close()


def formed(manager: StructuredOutputManager, count: int) -> list[str]:
    found, deadline_s = list[str](), time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline_s
        for request, problem in manager.pop_compiled(0.05):
            assert problem is None
            found.append(request.request_id)
    return found


def test_no_more_are_compiled_than_may_run_and_a_few(manager: StructuredOutputManager) -> None:
    for number in range(20):
        manager.begin(ask(number))
    assert sorted(formed(manager, 2 + FORMS_AHEAD)) == ["0", "1", "2", "3", "4", "5"]
    assert manager.pop_compiled() == []
    assert manager.compiling
    manager.forget("9")  # Gone while it waited.
    manager.begin(ask(20, priority=-1))
    manager.forget("0")
    assert formed(manager, 1) == ["20"]
    for number in (1, 2, 3, 4):
        manager.forget(f"{number}")
    assert sorted(formed(manager, 4)) == ["10", "6", "7", "8"]
    manager.clear()
    assert not manager.compiling


def test_bytes_are_bounded_and_the_first_in_line_is_always_taken(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "held_bytes", lambda rows: form_bytes(100) * 2)
    monkeypatch.setattr(module, "FORM_BYTES", form_bytes(100))
    for number in range(5):
        manager.begin(ask(number))
    assert sorted(formed(manager, 2)) == ["0", "1"]
    assert manager.pop_compiled() == []
    monkeypatch.setattr(module, "held_bytes", lambda rows: 1)
    manager.forget("0")
    assert manager.pop_compiled() == []
    manager.forget("1")
    assert formed(manager, 1) == ["2"]


def test_what_is_counted_is_what_a_worker_saw(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "held_bytes", lambda rows: 7 * MIB + MIB // 2)
    manager.begin(ask(0))
    formed(manager, 1)
    worker = manager._workers._worker_of[manager._states["0"].number]
    grown = wire.Filled(manager._states["0"].number, 0, manager._states["0"].words.tobytes(), 0.0, 7 * MIB)
    manager._workers._take(worker, grown)
    manager.begin(ask(1, StructuredOutputsParams(choice=["y" * 9000])))  # It would take another 800 KiB.
    assert [*manager._bytes] == ["0"]
    assert manager._bytes["0"] >= 7 * MIB
    manager.forget("0")
    assert formed(manager, 1) == ["1"]


def answer(manager: StructuredOutputManager, request: Request, tokens: list[int]) -> list[Verdict | Failure]:
    manager.begin(request)
    formed(manager, 1)
    return [manager.advance_grammar(request.request_id, token) for token in tokens]


def test_verdicts_are_those_of_the_grammar(manager: StructuredOutputManager) -> None:
    assert answer(manager, ask(0, "ab?"), [ord("a"), END]) == [Verdict.GOES_ON, Verdict.ENDED]
    assert answer(manager, ask(1, "ab"), [ord("a"), ord("b")]) == [Verdict.GOES_ON, Verdict.COMPLETE]
    first, second = answer(manager, ask(2, "ab"), [ord("b"), ord("b")])
    assert isinstance(first, Failure)
    assert "does not allow" in first.message
    assert second is first


def filled(manager: StructuredOutputManager, name: str) -> masks.GrammarState:
    state, deadline_s = manager._states[name], time.monotonic() + PATIENCE_S
    while not state.filled:
        manager._workers.poll(0.05)
        assert time.monotonic() < deadline_s
    return state


def test_masks_are_those_of_the_library(manager: StructuredOutputManager) -> None:
    for number, pattern in enumerate(["a+", "b|ab", "[ab]*", "(ab)+"]):
        manager.begin(ask(number, pattern))
    formed(manager, 4)
    for number, pattern in enumerate(["a+", "b|ab", "[ab]*", "(ab)+"]):
        expected = small_grammars().matcher(StructuredOutputsParams(regex=pattern))
        assert filled(manager, f"{number}").words.tobytes() == expected.mask()
        token = ord("a")
        manager.advance_grammar(f"{number}", token)
        assert expected.consume(token)
        assert filled(manager, f"{number}").words.tobytes() == expected.mask()


def test_a_whole_step_is_judged_in_one_go(manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        manager.begin(ask(number, "ab"))
    formed(manager, 3)
    held = {number + 4: manager._states[f"{number}"] for number in range(3)}
    manager._newest = module._Sampled(held, [9, 4, 5, 6])
    sent, real = list[int](), manager._workers.advance
    monkeypatch.setattr(manager._workers, "advance", lambda tokens: (sent.append(len(tokens)), real(tokens)))
    # One is late: what was sampled for it is nothing.
    manager.advance_early(StepResult(step_id=1, token_ids=[7, ord("a"), ord("a"), ord("b")], late=[6]), newest=True)
    assert sent == [2]
    assert [manager.advance_grammar(name, ord("a")) for name in ("0", "1")] == [Verdict.GOES_ON] * 2
    assert sent == [2]
    assert manager.advance_grammar("2", ord("a")) is Verdict.GOES_ON
    assert sent == [2, 1]


def test_who_wait_together_share_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pay nothing while the device is busy with their step, and no step is held up for long."""
    manager = [masks.GrammarState(number, ask(0), 1, None) for number in range(4)]
    turns, now_s = iter([True, True, False, False]), itertools.count(0.0, 0.02)

    def poll(timeout_s: float) -> None:
        if any(state.filled for state in manager[1:]):
            manager[0].filled = True

    monkeypatch.setattr(masks, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    masks.wait_for_masks(manager, poll, lambda: next(turns, False))
    assert [state.patience_s for state in manager] == pytest.approx([0.05 - 0.06 / 4] * 4)
    for state in manager[1:]:
        state.filled = True
    masks.wait_for_masks(manager, lambda timeout_s: poll(0) if timeout_s else None, lambda: False)
    assert [state.patience_s for state in manager] == pytest.approx([0.05 - 0.06 / 4 - 0.02, *[0.05 - 0.06 / 4] * 3])
    assert manager[0].filled


def test_a_mask_that_cannot_be_narrowed_ends_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (masks.GrammarState(number, ask(0), 1, None) for number in range(2))
    real = masks.GrammarState._narrow

    def narrow(state: masks.GrammarState) -> None:
        if state is bad:
            raise IndexError
        real(state)

    monkeypatch.setattr(masks.GrammarState, "_narrow", narrow)
    for state in (good, bad):
        state.take(b"\1\0\0\0", 0.0)
    assert (bad.failure is not None, good.failure, good.words.any()) == (True, None, True)
    assert numpy.all(bad.words == -1)


# --- lanes, and workers that die ---


def lane_of(manager: StructuredOutputManager, name: str) -> Lane:
    return manager._workers._worker_of[manager._states[name].number].lane


def test_costly_grammars_are_kept_apart_and_proven_ones_too(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_workers, "PROVEN_MASKS", 2)
    manager.begin(ask(0, "[ab]+", costly_grammar=True))
    manager.begin(ask(1, "[ab]+"))
    formed(manager, 2)
    assert [lane_of(manager, "0"), lane_of(manager, "1")] == [Lane.SLOW, Lane.NEW]
    for _ in range(3):
        manager.advance_grammar("1", ord("a"))
        filled(manager, "1")
    manager.forget("1")
    manager.begin(ask(3, LARGE))  # Of costly ones there is room for one, and others need not wait for it.
    manager.begin(ask(2, "[ab]+"))
    assert formed(manager, 1) == ["2"]
    assert manager.compiling
    manager.forget("0")
    assert formed(manager, 1) == ["3"]
    assert [lane_of(manager, "2"), lane_of(manager, "3")] == [Lane.PROVEN, Lane.SLOW]


def workers(manager: StructuredOutputManager) -> dict[Lane, int]:
    return {worker.lane: worker.connection._pid or 0 for worker in manager._workers._workers}


def test_many_answers_are_spread_over_the_workers_there_may_be(service: GrammarService) -> None:
    manager = StructuredOutputManager(lambda: service.address, rows=16, vocab_size=SIZE, eos_ids=[END])
    manager._workers._most[Lane.NEW] = 3
    for number in range(16):
        manager.begin(ask(number, "[ab]+"))
    formed(manager, 16)
    assert [len(worker.states) for worker in manager._workers._workers] == [6, 5, 5]
    for number in range(16):
        manager.forget(f"{number}")
    assert manager._workers._workers == []
    manager.close()


def test_answers_of_a_worker_that_dies_go_on_in_another(manager: StructuredOutputManager) -> None:
    for number in range(2):
        manager.begin(ask(number, "(ab)+", max_tokens=99))
    formed(manager, 2)
    assert manager.advance_grammar("0", ord("a")) is Verdict.GOES_ON
    before = workers(manager)
    os.kill(before[Lane.NEW], signal.SIGKILL)
    assert manager.advance_grammar("0", ord("b")) is Verdict.GOES_ON
    allowed = numpy.unpackbits(filled(manager, "0").words.view(numpy.uint8), bitorder="little")
    assert allowed[ord("a")] == allowed[END] == 1
    assert allowed[ord("b")] == 0
    assert manager.advance_grammar("1", ord("b")) is not Verdict.GOES_ON
    assert workers(manager)[Lane.NEW] != before[Lane.NEW]


def test_an_answer_that_was_complete_when_its_worker_died_still_ends(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.begin(ask(0, "ab"))
    formed(manager, 1)
    manager.advance_grammar("0", ord("a"))
    filled(manager, "0")
    os.kill(workers(manager)[Lane.NEW], signal.SIGSTOP)
    # The verdict does not come: the answer goes on, until it is known.
    monkeypatch.setattr(module, "VERDICT_S", 0.1)
    assert manager.advance_grammar("0", ord("b")) is Verdict.GOES_ON
    monkeypatch.setattr(module, "VERDICT_S", PATIENCE_S)
    os.kill(workers(manager)[Lane.NEW], signal.SIGKILL)
    filled(manager, "0")
    assert manager.advance_grammar("0", END) is Verdict.OVER


@pytest.mark.parametrize("sampled", [END, ord("b")], ids=["an end", "anything, where ends are forbidden"])
def test_an_answer_that_is_complete_ends_though_its_worker_is_late_again(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch, sampled: int
) -> None:
    monkeypatch.setattr(module, "VERDICT_S", 0.1)
    manager.begin(ask(0, "a"))
    formed(manager, 1)
    filled(manager, "0")
    worker = psutil.Process(workers(manager)[Lane.NEW])
    worker.suspend()
    assert manager.advance_grammar("0", ord("a")) is Verdict.GOES_ON
    worker.resume()
    filled(manager, "0")
    worker.suspend()
    assert manager.advance_grammar("0", sampled) is Verdict.OVER


def test_a_worker_that_hangs_is_replaced(manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.begin(ask(0, "(ab)+", max_tokens=99))
    formed(manager, 1)
    hung = psutil.Process(workers(manager)[Lane.NEW])
    hung.suspend()
    monkeypatch.setattr(module, "VERDICT_S", 0.1)
    manager.advance_grammar("0", ord("a"))
    monkeypatch.setattr(module, "VERDICT_S", PATIENCE_S)
    (worker,) = manager._workers._workers
    assert worker._asked_s is not None
    worker._asked_s -= grammar_workers.SILENT_S  # Of this one the time is over; the next has all of it.
    filled(manager, "0")
    assert not still_running([hung])
    assert manager.advance_grammar("0", ord("b")) is Verdict.GOES_ON


def test_a_worker_that_had_nothing_to_do_does_not_count_as_silent(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_workers, "PROVEN_MASKS", 0)
    manager.begin(ask(0, "(ab)+", max_tokens=99))
    formed(manager, 1)
    (worker,) = manager._workers._workers
    filled(manager, "0")
    manager.forget("0")
    assert manager._workers._workers == [worker]
    for number in (1, 2):
        assert worker._asked_s is None
        asked_s = time.monotonic()
        manager.begin(ask(number, "(ab)+", max_tokens=99))
        assert worker._asked_s is not None
        assert worker._asked_s >= asked_s
        if number == 2:
            formed(manager, 1)
            filled(manager, "2")
        manager.forget(f"{number}")  # The first before it has an answer.


def test_a_grammar_that_explodes_in_mid_answer_ends_its_own_answer_alone(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {lane: LaneLimits(niceness=0, mask_s=0.03, open_s=20.0) for lane in Lane}
    monkeypatch.setattr(grammar_workers, "LIMITS", limits)
    manager.begin(ask(0, LATE_BOMB, max_tokens=999))
    manager.begin(ask(1, "(ab)+", max_tokens=99))
    formed(manager, 2)
    verdicts: list[Verdict | Failure] = []
    for token in b"a" * 300:
        verdicts.append(manager.advance_grammar("0", token))
        if isinstance(verdicts[-1], Failure):
            break
        filled(manager, "0")
    assert isinstance(verdicts[-1], Failure)
    assert (verdicts[-1].code, verdicts[-1].kind) == ("HF362", "GrammarError")
    assert len(verdicts) > 10
    for token in b"ab":
        assert manager.advance_grammar("1", token) is Verdict.GOES_ON
        assert filled(manager, "1").failure is None


def test_memory_comes_back_when_answers_end(manager: StructuredOutputManager, service: GrammarService) -> None:
    for number in range(2):
        manager.begin(ask(number, "(" + "|".join(f"{at:05d}" for at in range(900)) + ")+", costly_grammar=number == 0))
    formed(manager, 2)
    assert len(workers(manager)) == 2
    for number in range(2):
        manager.forget(f"{number}")
    assert workers(manager) == {}
    assert service.pid is not None
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.Process(service.pid).children():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_without_a_service_answers_fail_and_nothing_hangs() -> None:
    manager = StructuredOutputManager(lambda: "/nonexistent/grammars.sock", rows=2, vocab_size=SIZE, eos_ids=[END])
    manager.begin(ask(0))
    ((request, problem),) = manager.pop_compiled()
    assert request.request_id == "0"
    assert problem is not None
    assert "not available" in problem.message
    assert not manager.compiling


def test_nobody_waits_for_the_verdict_of_an_answer_that_has_gone(manager: StructuredOutputManager) -> None:
    manager.begin(ask(0, "(ab)+"))
    formed(manager, 1)
    manager._newest = module._Sampled({4: manager._states["0"]}, [4])
    manager.forget("0")
    began_s = time.monotonic()
    manager.advance_early(StepResult(step_id=1, token_ids=[ord("a")]), newest=True)
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_after_a_failure_nothing_is_foreseen_for_the_step_in_flight(manager: StructuredOutputManager) -> None:
    manager.begin(ask(0, "(ab)+"))
    formed(manager, 1)
    state = manager._states["0"]
    manager._newest = module._Sampled({4: state}, [4])
    failed = StepFailure(slot=9, failure=Failure.of(EngineError("no memory")))
    manager.advance_early(StepResult(step_id=1, token_ids=[], failures=[failed]), newest=False)
    manager.advance_early(StepResult(step_id=2, token_ids=[ord("a")]), newest=True)
    assert (state.early_verdict, state.output) == (None, [])
    manager.advance_early(StepResult(step_id=3, token_ids=[ord("a")]), newest=True)
    assert (state.early_verdict, state.output) == (Verdict.GOES_ON, [ord("a")])


def test_min_tokens_forbid_the_end_that_ignore_eos_does_not() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, ignore_eos=True, structured_outputs=LATE_BOMB)
    state = masks.GrammarState(1, Request(request_id="0", prompt_token_ids=[1], params=params), 1, None, (2,))
    state.take(b"\x0c\0\0\0", 0.0)
    assert state.words.tolist() == [8]


async def test_a_service_that_is_about_to_start_when_the_engine_sleeps_does_not() -> None:
    """Its thread cannot be cancelled; it would hold memory for as long as the engine sleeps."""
    made = StructuredOutput(None, [END], SIZE)  # type: ignore[arg-type]
    made.check_available = lambda: None  # type: ignore[method-assign]
    started, go_on, start = threading.Event(), threading.Event(), made.service.start

    def late(*arguments: Any) -> None:
        started.set()
        go_on.wait(PATIENCE_S)
        start(*arguments)

    made.service.start = late  # type: ignore[method-assign]
    made.service._vocabulary = lambda: VOCABULARY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.engine.requests.structured_output.PREPARE_S", 0.0)
        made.prepare_soon()
        while not started.is_set():
            await asyncio.sleep(0.001)
    made.stop()
    go_on.set()
    made._threads.shutdown(wait=True)
    try:
        assert made.service.pid is None
    finally:
        made.close()
