"""What was computed once is remembered: by other processes, after restarts, within bounds, whatever the file holds."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from prefix_pages import DEADLINE_S, FailingCalls, file_of, key_of, opened, put, until

from holdfast.prefix_store.files import uses
from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.uses import KEPT_S, FirstUses
from holdfast.prefix_store.inspection import StoreInspection

KEYS = [key_of(number) for number in range(40)]


def test_a_first_use_is_known_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    assert store.used_before(KEYS) == 0
    store.computed(KEYS[:30])
    assert store.used_before(KEYS) == 30
    store.close(DEADLINE_S)
    again = opened(tmp_path / "store")
    assert again.used_before(KEYS) == 30
    assert again.used_before(KEYS[30:]) == 0
    again.close(DEADLINE_S)
    another = opened(tmp_path / "store", model=b"another model")
    assert another.used_before(KEYS) == 0
    another.close(DEADLINE_S)


def test_processes_tell_each_other(tmp_path: Path) -> None:
    """Also one that is killed: what it noted is in the file with the next beat."""
    first, second = opened(tmp_path / "store"), opened(tmp_path / "store")
    first.computed(KEYS[:20])
    until(lambda: second.used_before(KEYS) == 20)
    second.computed(KEYS[20:])
    until(lambda: first.used_before(KEYS) == 40)
    for store in (first, second):
        store.close(DEADLINE_S)


def small(monkeypatch: pytest.MonkeyPatch, marks: int) -> None:
    for name, value in (("MARKS", marks), ("_SETS", marks // 8), ("_SET_SHIFT", 64 - (marks // 8 - 1).bit_length())):
        monkeypatch.setattr(uses, name, value)


def test_the_record_is_bounded_and_remembers_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 4096)
    path, keys = tmp_path / "uses", [key_of(number) for number in range(11_000)]
    record = FirstUses(path, Calls())
    for first in range(0, len(keys), 700):  # Over the end of the ring, more than once.
        record.note(keys[first : first + 700])
        record.exchange()
    assert path.stat().st_size == 4096 + 8 * 4096
    again = FirstUses(path, Calls())
    again.load()
    for found in (record, again):
        assert found.count(keys[-300:]) == 300
        known = sum(found.count([key]) for key in keys)
        assert 3000 < known <= 4096
    behind = FirstUses(path, Calls())
    behind.load()
    record.note([key_of(number) for number in range(20_000, 22_000)])
    record.exchange()
    behind.load()
    assert behind.count([key_of(number) for number in range(21_000, 22_000)]) == 1000
    record.close()


def test_who_asks_gets_turns_while_marks_of_others_are_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread does, for each prompt. Of what it does not know of nothing is put in order anew."""
    theirs, ours = FirstUses(tmp_path / "uses", Calls()), FirstUses(tmp_path / "uses", Calls())
    ours.note(KEYS)
    for record in (ours, theirs):
        record.exchange()
    more = [key_of(number) for number in range(100, 6100)]
    theirs.note(more)
    theirs.exchange()
    inserted, turns, insert = list[int](), list[int](), ours._insert_many

    def counted(marks: NDArray[np.uint64]) -> None:
        inserted.append(len(marks))
        insert(marks)

    def turn(seconds: float) -> None:
        turns.append(ours.count(more))
        ours.note([key_of(10_000 + len(turns))])

    monkeypatch.setattr(ours, "_insert_many", counted)
    monkeypatch.setattr("holdfast.prefix_store.files.uses.time.sleep", turn)
    ours.exchange()
    assert max(inserted) <= uses.AT_ONCE
    assert turns == [uses.AT_ONCE * number for number in range(1, len(turns) + 1)]
    assert len(turns) == len(inserted) - 1 > 3
    assert (ours.count(KEYS), ours.count(more)) == (40, 6000)
    theirs.exchange()
    assert theirs.count([key_of(10_000 + number) for number in range(1, len(turns) + 1)]) == len(turns)
    for record in (ours, theirs):
        record.close()


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 64, b"holdfast uses 1\n" + b"\xff" * 16])
def test_a_damaged_record_begins_anew(tmp_path: Path, damage: bytes) -> None:
    store = opened(tmp_path / "store")
    store.computed(KEYS)
    store.close(DEADLINE_S)
    file_of(tmp_path / "store", "uses").write_bytes(damage)
    again = opened(tmp_path / "store")
    assert again.used_before(KEYS) == 0
    again.computed(KEYS[:7])
    again.close(DEADLINE_S)
    third = opened(tmp_path / "store")
    assert third.used_before(KEYS) == 7
    third.close(DEADLINE_S)


def test_a_model_that_was_asked_once_is_remembered_while_another_is_served(tmp_path: Path) -> None:
    """It has no page yet, and files without pages are removed."""
    store = opened(tmp_path / "store")
    store.computed(KEYS)
    store.close(DEADLINE_S)
    opened(tmp_path / "store", model=b"another model").close(DEADLINE_S)
    store = opened(tmp_path / "store")
    assert store.used_before(KEYS) == 40
    store.close(DEADLINE_S)
    later = FailingCalls()
    later.ahead_s = KEPT_S + 60
    opened(tmp_path / "store", model=b"another model", calls=later).close(DEADLINE_S)
    for ending in ("index", "pages", "uses"):
        assert file_of(tmp_path / "store", ending), "of the other model alone"


def test_pruning_all_forgets_what_was_used(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.computed(KEYS)
    assert all(put(store, KEYS[:3]))
    until(lambda: not store._uses.noted)
    with StoreInspection(tmp_path / "store") as inspection:
        inspection.prune(size_bytes=None, unused_s=None, model=None)
    until(lambda: store.has(KEYS) == 0)
    store.computed([key_of(1000)])
    until(lambda: store.used_before(KEYS) == 0)
    store.close(DEADLINE_S)
    with StoreInspection(tmp_path / "store") as inspection:
        inspection.prune(size_bytes=None, unused_s=None, model=None)
    assert not list((tmp_path / "store").glob("*.uses"))


def test_what_could_not_be_told_is_told_later(tmp_path: Path) -> None:
    calls = FailingCalls()
    record = FirstUses(tmp_path / "uses", calls)
    record.note(KEYS)
    calls.failing, calls.errors, calls.chance = {"write"}, [errno.ENOSPC], 1.0
    with pytest.raises(OSError, match="injected"):
        record.exchange()
    calls.chance = 0.0
    record.exchange()
    record.close()
    again = FirstUses(tmp_path / "uses", Calls())
    again.load()
    assert again.count(KEYS) == 40


def test_pages_do_not_need_a_record_that_can_be_opened(tmp_path: Path) -> None:
    """Neither of their own model nor of others: something else lies there, or it is another user's."""
    other = opened(tmp_path / "store", model=b"another model")
    other.computed(KEYS)
    other.close(DEADLINE_S)
    opened(tmp_path / "store").close(DEADLINE_S)
    for index in (tmp_path / "store").glob("*.index"):
        index.with_suffix(".uses").unlink(missing_ok=True)
        index.with_suffix(".uses").mkdir()
    again = opened(tmp_path / "store")
    again.computed(KEYS)
    time.sleep(0.2)  # Some beats.
    assert again.stats().failing is None
    assert all(put(again, KEYS[:3]))
    assert again.has(KEYS) == 3
    assert again.used_before(KEYS) == 40
    again.close(DEADLINE_S)
