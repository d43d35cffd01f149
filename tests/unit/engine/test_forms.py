"""Who is compiled for, and when: no more than there is room for, in order, and nobody who has gone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy
import pytest
from small_vocabulary import END, SIZE, VOCABULARY

from holdfast.engine import forms as module
from holdfast.engine import masks
from holdfast.engine.forms import FORMS_AHEAD, Forms
from holdfast.planner.form_sizes import form_bytes
from holdfast.records import Request, SamplingParams
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured import llguidance_backend as matching
from holdfast.text.structured.llguidance_backend import Grammars, MaskPool


def ask(number: int, **changes: int) -> Request:
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex=f"a{{{number + 1}}}"))
    return Request(
        request_id=f"{number}", prompt_token_ids=[1], params=params, eos_token_ids=(END,), arrival_s=number, **changes
    )


@pytest.fixture
def forms() -> Iterator[Forms]:
    made = Forms(rows=2, vocab_size=SIZE, eos_ids=[END], by_priority=True)
    made.teach(lambda: VOCABULARY)
    yield made
    made.close()


def formed(forms: Forms, count: int) -> list[str]:
    found, deadline_s = list[str](), time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline_s
        for request, problem in forms.formed(0.05):
            assert problem is None
            found.append(request.request_id)
    return found


def test_no_more_are_compiled_than_may_run_and_a_few(forms: Forms) -> None:
    for number in range(20):
        forms.begin(ask(number))
    assert sorted(formed(forms, 2 + FORMS_AHEAD)) == ["0", "1", "2", "3", "4", "5"]
    assert forms.formed() == []
    assert forms.compiling
    forms.forget("9")  # Gone while it waited.
    forms.begin(ask(20, priority=-1))
    forms.forget("0")
    assert formed(forms, 1) == ["20"]
    for number in (1, 2, 3, 4):
        forms.forget(f"{number}")
    assert sorted(formed(forms, 4)) == ["10", "6", "7", "8"]
    forms.clear()
    assert not forms.compiling


def test_bytes_are_bounded_and_the_first_in_line_is_always_taken(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "held_bytes", lambda rows: form_bytes(100) * 2)
    for number in range(5):
        forms.begin(ask(number))
    assert sorted(formed(forms, 2)) == ["0", "1"]
    assert forms.formed() == []
    monkeypatch.setattr(module, "held_bytes", lambda rows: 1)
    forms.forget("0")
    assert forms.formed() == []
    forms.forget("1")
    assert formed(forms, 1) == ["2"]


def test_nobody_waits_for_those_who_have_gone(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heavy ones are being compiled, and all others behind them were aborted: they are never begun."""
    begun, go_on, real = list[str](), threading.Event(), Grammars.matcher

    def slow(self: Grammars, params: StructuredOutputsParams) -> object:
        begun.append(str(params.regex))
        assert go_on.wait(60)
        return real(self, params)

    monkeypatch.setattr(Grammars, "matcher", slow)
    for number in range(6):
        forms.begin(ask(number))
    for number in range(6):
        forms.forget(f"{number}")
    forms.begin(ask(6))
    go_on.set()
    assert formed(forms, 1) == ["6"]
    assert len(begun) <= module.COMPILING_THREADS + 1


def test_who_wait_together_share_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pay nothing while the device is busy with their step, and no step is held up for long."""
    threads, now_s = masks.MaskThreads(), itertools.count(0.0, 0.02)
    forms = [masks.Form(ask(0), matcher=None, words=None, allowed=None) for _ in range(4)]  # type: ignore[arg-type]
    turns = iter([True, True, False, False])

    def waits(timeout_s: float) -> None:
        if not any(form.filled for form in forms[1:]):
            return
        forms[0].filled = True

    monkeypatch.setattr(threads._changed, "wait", waits)
    monkeypatch.setattr(masks, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    threads.wait(forms, lambda: next(turns, False))
    assert [form.patience_s for form in forms] == pytest.approx([0.05 - 0.06 / 4] * 4)
    for form in forms[1:]:
        form.filled = True
    threads.wait(forms, lambda: False)
    assert [form.patience_s for form in forms] == pytest.approx([0.05 - 0.06 / 4 - 0.02, *[0.05 - 0.06 / 4] * 3])
    assert forms[0].filled


class _Pool:
    """Of the library, but may panic."""

    def __init__(self, *, panics: bool = False) -> None:
        self._real, self._panics = MaskPool(), panics

    def fill(self, matchers, words) -> None:
        if self._panics:
            raise BaseException("a panic")
        self._real.fill(matchers, words)


def made(forms: Forms, *patterns: str) -> list[masks.Form]:
    matchers = [forms._compiler().matcher(StructuredOutputsParams(regex=pattern)) for pattern in patterns]
    return [masks.Form(ask(0), matcher, numpy.zeros(1 + SIZE // 32, dtype=numpy.int32), None) for matcher in matchers]


@pytest.mark.parametrize("panics", [False, True])
def test_masks_filled_together_are_those_filled_alone(forms: Forms, panics: bool) -> None:
    patterns = ["a+", "b|ab", "[ab]*", "a+", "(ab)+"]
    together, alone = made(forms, *patterns), made(forms, *patterns)
    for one in alone:
        one.fill()
    room = numpy.full((len(patterns), len(together[0].words)), -1, dtype=numpy.int32)
    masks.fill_together(together, _Pool(panics=panics), room, 1)  # type: ignore[arg-type]
    assert [one.words.tolist() for one in together] == [one.words.tolist() for one in alone]
    assert len({tuple(one.words.tolist()) for one in together}) == 4
    assert not any(one.failure for one in together)


def test_forms_that_were_slow_together_are_looked_at_alone(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    some, now_s = made(forms, "a+", "b+"), itertools.count(0.0, 1.0)
    for one in some:
        one.quick_in_a_row = 9
    monkeypatch.setattr(masks, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    room = numpy.zeros((2, len(some[0].words)), dtype=numpy.int32)
    masks.fill_together(some, _Pool(), room, 1)  # type: ignore[arg-type]
    assert [(one.quick, one.spent_s) for one in some] == [(False, 0.1)] * 2
    for quick in (False, False, False, True):
        some[0].quick_in_a_row += 1
        assert some[0].quick is quick


def test_a_form_that_cannot_be_narrowed_ends_its_own_answer(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = made(forms, "a+", "b+")
    real = masks.Form._narrow

    def narrow(form: masks.Form) -> None:
        if form is bad:
            raise IndexError
        real(form)

    monkeypatch.setattr(masks.Form, "_narrow", narrow)
    masks.fill_together([bad, good], _Pool(), numpy.zeros((2, len(good.words)), dtype=numpy.int32), 1)  # type: ignore[arg-type]
    assert (bad.failure is not None, good.failure, good.words.any()) == (True, None, True)


def test_a_grammar_that_many_use_is_compiled_more_than_once(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MASK_THREADS", 3)
    grammars = forms._compiler()
    params = StructuredOutputsParams(regex="ab?")
    found = [grammars.matcher(params) for _ in range(20)]
    (compiled,) = [one for one in grammars._compiled.values() if one.copies == 20]
    assert len(compiled.originals) == 3
    words = numpy.zeros((20, 1 + SIZE // 32), dtype=numpy.int32)
    MaskPool().fill(found, words)
    assert (words == words[0]).all()
    assert words[0].any()
