"""Pages come back as they were written: after restarts, in other processes' views, within size, budget and queue."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefix_pages import (
    DEADLINE_S,
    PAGE_BYTES,
    FailingCalls,
    file_of,
    get,
    key_of,
    opened,
    page_of,
    put,
    served,
    until,
)

from holdfast.prefix_store.inspection import StoreInspection
from holdfast.prefix_store.reading import DEPTH

KEYS = [key_of(number) for number in range(8)]


def test_pages_come_back_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    assert put(store, KEYS) == [True] * 8
    assert store.has(KEYS) == 8
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)
    again = opened(tmp_path / "store")
    assert again.has([*KEYS, b"another".ljust(20)]) == 8
    assert again.has([b"another".ljust(20), *KEYS]) == 0
    assert served(again, KEYS) == KEYS
    stats = again.stats()
    assert (stats.pages, stats.nbytes, stats.total_bytes) == (8, 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    assert (stats.pages_read, stats.bytes_read, stats.missed) == (8, 8 * PAGE_BYTES, {})
    assert stats.read_bytes_per_second
    again.close(DEADLINE_S)


@pytest.mark.parametrize("page_bytes", [5, 4096, 5000, 70_001, 1 << 20])
def test_pages_of_any_size(tmp_path: Path, page_bytes: int) -> None:
    store = opened(tmp_path / "store", page_bytes=page_bytes)
    assert all(put(store, KEYS, page_bytes))
    assert served(store, KEYS, page_bytes) == KEYS
    store.close(DEADLINE_S)


def test_a_model_whose_path_is_no_text_is_kept_all_the_same(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", label="/models/\udcff")
    assert put(store, KEYS[:1]) == [True]
    store.close(DEADLINE_S)
    with StoreInspection(tmp_path / "store") as inspection:
        assert inspection.listing().models[0].label == "/models/?"


def test_thousands_of_small_pages_at_once(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", pages=50_000, page_bytes=4096)
    keys = [key_of(number) for number in range(3000)]
    assert all(put(store, keys, 4096))
    assert served(store, keys, 4096) == keys
    assert store.stats().dropped == {}
    assert store.stats().missed == {}
    store.close(DEADLINE_S)


def test_memory_at_whole_pages_of_the_machine_is_read_straight_into(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, KEYS)
    memory = memoryview(mmap.mmap(-1, 8 * PAGE_BYTES))
    views = [memory[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] for number in range(8)]
    results = []
    # In another order than they lie in the file.
    pages = [(KEYS[number], views[number]) for number in (3, 0, 7, 1, 2, 6, 5, 4)]
    assert store.read(pages, results.append).wait(DEADLINE_S)
    assert results[0].valid == (True,) * 8
    assert [bytes(view) for view in views] == [page_of(key) for key in KEYS]
    store.close(DEADLINE_S)


def test_sources_that_fill_memory_later(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")

    def fill(memory: memoryview) -> None:
        memory[:] = page_of(KEYS[0])

    def fail(memory: memoryview) -> None:
        raise RuntimeError("gone")

    over: list[bool] = []
    assert store.write(KEYS[1], fail, over.append)
    assert store.write(KEYS[0], fill, over.append)
    until(lambda: len(over) == 2)
    assert over == [False, True]
    assert served(store, KEYS[:2]) == KEYS[:1]
    assert store.stats().dropped == {"source failed": 1}
    # What is copied at once may change when `write` has returned.
    memory = bytearray(page_of(KEYS[2]))
    assert store.write(KEYS[2], memoryview(memory))
    memory[:] = bytes(PAGE_BYTES)
    until(lambda: store.has(KEYS[2:3]) == 1)
    assert served(store, KEYS[2:3]) == KEYS[2:3]
    store.close(DEADLINE_S)


def test_two_views_of_a_folder_share_pages_and_write_none_twice(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "store"), opened(tmp_path / "store")
    put(first, KEYS[:4])
    until(lambda: second.has(KEYS[:4]) == 4)
    assert served(second, KEYS[:4]) == KEYS[:4]
    assert put(second, KEYS) == [False] * 4 + [True] * 4
    assert second.stats().dropped == {"already there": 4}
    until(lambda: first.has(KEYS) == 8)
    assert first.stats().bytes_written + second.stats().bytes_written == 8 * PAGE_BYTES
    first.close(DEADLINE_S)
    second.close(DEADLINE_S)


def test_two_views_that_write_the_same_pages_at_once(tmp_path: Path) -> None:
    stores = [opened(tmp_path / "store", beat_s=60) for _ in range(2)]
    threads = [threading.Thread(target=put, args=(store, KEYS)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.stats().pages_written for store in stores) == 8
    again = opened(tmp_path / "store")
    assert served(again, KEYS) == KEYS
    for store in (*stores, again):
        store.close(DEADLINE_S)


def test_the_least_recently_used_leave_and_the_end_of_a_chain_before_its_beginning(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", pages=8)
    put(store, KEYS)
    store.use(KEYS[4:])
    store.use(KEYS[:3])
    put(store, [key_of(100)])
    assert store.has(KEYS[3:4]) == 0  # Never used.
    put(store, [key_of(101)])
    assert [store.has([key]) for key in KEYS] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert store.stats().total_bytes == 8 * PAGE_BYTES
    assert store.stats().pages_evicted == 2
    store.close(DEADLINE_S)


def test_of_a_chain_that_was_only_written_the_end_leaves_before_its_beginning(tmp_path: Path) -> None:
    """A beginning without its end is still found, an end without its beginning is not."""
    calls = FailingCalls()
    calls.clock_s = time.time()  # What is written slowly is no chain.
    store = opened(tmp_path / "store", pages=256, calls=calls)
    for key in KEYS:  # A batch each.
        put(store, [key])
    put(store, [key_of(number) for number in range(8, 32)])
    store.close(DEADLINE_S)
    store = opened(tmp_path / "store", pages=16)
    assert store.has([key_of(number) for number in range(32)]) == 16
    store.close(DEADLINE_S)


def test_what_another_process_used_stays(tmp_path: Path) -> None:
    calls = FailingCalls()
    calls.clock_s = time.time()
    first = opened(tmp_path / "store", pages=8, calls=calls)
    put(first, KEYS)
    second = opened(tmp_path / "store", pages=8)
    served(second, KEYS[:1])
    second.close(DEADLINE_S)
    calls.clock_s += 1
    put(first, [key_of(100)])
    assert first.has(KEYS[:1]) == 1
    assert sum(first.has([key]) for key in KEYS[1:]) == 6
    first.close(DEADLINE_S)


def test_a_reader_whose_page_was_evicted_by_another_has_a_miss(tmp_path: Path) -> None:
    reader = opened(tmp_path / "store", pages=8, beat_s=60)
    put(reader, KEYS)
    writer = opened(tmp_path / "store", pages=8)
    put(writer, [key_of(100 + number) for number in range(8)])
    assert reader.has(KEYS) == 8  # Not seen yet.
    assert served(reader, KEYS) == []
    assert reader.stats().missed == {"evicted": 8}
    assert reader.has(KEYS) == 0
    # Nothing of the other's was forgotten for it.
    reader.close(DEADLINE_S)
    assert len(served(writer, [key_of(100 + number) for number in range(8)])) == 8
    writer.close(DEADLINE_S)


def test_the_size_bounds_all_models_together(tmp_path: Path) -> None:
    first = opened(tmp_path / "store", pages=8)
    put(first, KEYS)
    other = opened(tmp_path / "store", pages=8, model=b"other", page_bytes=2 * PAGE_BYTES, size_bytes=8 * PAGE_BYTES)
    assert other.has(KEYS) == 0
    assert all(put(other, [key_of(50)], 2 * PAGE_BYTES, b"other"))
    assert other.stats().total_bytes <= 8 * PAGE_BYTES
    until(lambda: first.stats().pages == 6)
    blocks = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").glob("*.pages"))
    assert blocks <= 8 * PAGE_BYTES  # On the disk, too.
    assert served(other, [key_of(50)], 2 * PAGE_BYTES, b"other") == [key_of(50)]
    assert len(served(first, KEYS)) == 6
    first.close(DEADLINE_S)
    other.close(DEADLINE_S)


def test_a_smaller_size_takes_effect_at_the_next_start(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", pages=8)
    put(store, KEYS)
    store.close(DEADLINE_S)
    store = opened(tmp_path / "store", pages=3)
    assert store.stats().total_bytes == 3 * PAGE_BYTES
    assert len(served(store, KEYS)) == 3
    # A file system takes a block of its own for where the parts of a file lie, if those are many.
    assert file_of(tmp_path / "store", "pages").stat().st_blocks * 512 <= 3 * PAGE_BYTES + 4096
    store.close(DEADLINE_S)


def test_the_files_of_a_model_without_pages_go(tmp_path: Path) -> None:
    opened(tmp_path / "store", model=b"another").close(DEADLINE_S)
    store = opened(tmp_path / "store")
    file_of(tmp_path / "store", "index")
    store.close(DEADLINE_S)


def test_the_write_budget_is_shared_and_survives_restarts_until_the_next_day(tmp_path: Path) -> None:
    calls = FailingCalls()
    calls.clock_s = 20_000.5 * 86400
    budget = {"daily_write_bytes": 4 * PAGE_BYTES, "calls": calls}
    # The second does not look at what the first did before it writes.
    first, second = opened(tmp_path / "store", **budget), opened(tmp_path / "store", beat_s=60, **budget)
    assert put(first, KEYS[:3]) == [True] * 3
    assert sorted(put(second, KEYS[3:])) == [False] * 4 + [True]
    assert second.stats().dropped == {"write budget": 4}
    first.close(DEADLINE_S)
    second.close(DEADLINE_S)
    third = opened(tmp_path / "store", **budget)
    assert third.stats().written_today_bytes == 4 * PAGE_BYTES
    assert put(third, [key_of(50)]) == [False]
    calls.clock_s += 86400
    assert third.stats().written_today_bytes == 0
    assert put(third, [key_of(50)]) == [True]
    third.close(DEADLINE_S)


def test_it_takes_nothing_once_the_budget_is_spent(tmp_path: Path) -> None:
    calls = FailingCalls()
    calls.clock_s = 10 * 86400.0
    store = opened(tmp_path / "store", calls=calls, daily_write_bytes=2 * PAGE_BYTES)
    assert store.takes()
    assert put(store, KEYS[:2]) == [True, True]
    assert not store.takes()
    calls.clock_s += 86400
    assert store.takes()
    store.close(DEADLINE_S)
    assert not store.takes()


def test_a_late_note_of_use_does_not_make_a_page_that_is_being_written_look_abandoned(tmp_path: Path) -> None:
    calls = FailingCalls()
    calls.ahead_s = -1000.0
    late = opened(tmp_path / "store", pages=8, beat_s=60, calls=calls)
    put(late, KEYS)
    late.use(KEYS)
    writer = opened(tmp_path / "store", pages=8)
    filling, go_on = threading.Event(), threading.Event()

    def fill(memory: memoryview) -> None:
        filling.set()
        go_on.wait(DEADLINE_S)
        memory[:] = page_of(key_of(100))

    over: list[bool] = []
    assert writer.write(key_of(100), fill, over.append)
    assert filling.wait(DEADLINE_S)
    late.close(DEADLINE_S)  # Notes what it used, among it the page whose slot the writer has now.
    other = opened(tmp_path / "store", pages=8)
    for number in range(20):
        put(other, [key_of(200 + number)])
    go_on.set()
    until(lambda: len(over) == 1)
    assert over == [True]
    assert writer.stats().dropped == {}
    assert served(writer, [key_of(100)]) == [key_of(100)]
    other.close(DEADLINE_S)
    writer.close(DEADLINE_S)


def test_a_late_note_of_use_is_not_of_the_page_that_has_the_slot_by_then(tmp_path: Path) -> None:
    """It would be the next to leave, though it has just come."""
    calls = FailingCalls()
    calls.ahead_s = -1000.0
    late = opened(tmp_path / "store", pages=8, beat_s=60, calls=calls)
    put(late, KEYS)
    late.use(KEYS)
    writer, new = opened(tmp_path / "store", pages=8), [key_of(100 + number) for number in range(8)]
    assert put(writer, new) == [True] * 8
    late.close(DEADLINE_S)
    put(writer, [key_of(200)])
    assert sum(writer.has([key]) for key in new) == 7
    assert writer.has(new[6:]) == 2  # Of the first that were written one left.
    writer.close(DEADLINE_S)


def test_the_queue_is_bounded_and_drops_are_counted(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", queue_bytes=3 * PAGE_BYTES)
    wait, over = threading.Event(), []

    def fill(memory: memoryview) -> None:
        wait.wait(DEADLINE_S)

    taken = [store.write(key, fill, over.append) for key in KEYS]
    assert taken == [True] * 3 + [False] * 5
    assert not store.write(KEYS[0], fill)
    assert store.stats().dropped == {"queue full": 5, "already there": 1}
    assert store.stats().queued_bytes == 3 * PAGE_BYTES
    wait.set()
    until(lambda: len(over) == 3)
    assert over == [True] * 3
    store.close(DEADLINE_S)


def test_closing_writes_what_waits_and_answers_all(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    for key in KEYS:
        assert store.write(key, memoryview(page_of(key)))
    store.close(DEADLINE_S)
    assert not store.write(key_of(99), memoryview(page_of(key_of(99))))
    assert store.stats().dropped == {"closing": 1}
    assert get(store, KEYS)[0].missed == {"closing": 8}
    store.close(DEADLINE_S)
    again = opened(tmp_path / "store")
    assert served(again, KEYS) == KEYS
    again.close(DEADLINE_S)


def test_reads_while_it_is_closed_are_all_answered(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, KEYS)
    tickets = []
    asking = threading.Thread(
        target=lambda: tickets.extend(
            store.read([(KEYS[number % 8], memoryview(bytearray(PAGE_BYTES)))], lambda result: None)
            for number in range(400)
        )
    )
    asking.start()
    store.close(DEADLINE_S)
    asking.join()
    assert len(tickets) == 400
    assert all(ticket.wait(DEADLINE_S) for ticket in tickets)


def test_a_cancelled_read_is_answered_all_the_same(tmp_path: Path) -> None:
    calls = FailingCalls()
    store = opened(tmp_path / "store", page_bytes=1 << 20, calls=calls)
    put(store, KEYS, 1 << 20)
    calls.answer.clear()
    calls.begun = 0
    results = []
    tickets = [
        store.read([(key, memoryview(bytearray(1 << 20)))], lambda result: results.append(result)) for key in KEYS * 4
    ]
    until(lambda: calls.begun == DEPTH)  # All threads are at it: the others wait.
    for ticket in tickets:
        ticket.cancel()
    calls.answer.set()
    assert all(ticket.wait(DEADLINE_S) for ticket in tickets)
    assert len(results) == 32
    assert sum(all(result.valid) for result in results) == DEPTH
    assert store.stats().missed == {"cancelled": 32 - DEPTH}
    store.close(DEADLINE_S)


def test_a_callback_that_raises_harms_nobody(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")

    def fail(_: object) -> None:
        raise RuntimeError("of the caller")

    assert store.write(KEYS[0], memoryview(page_of(KEYS[0])), fail)
    until(lambda: store.has(KEYS[:1]) == 1)
    assert store.read([(KEYS[0], memoryview(bytearray(PAGE_BYTES)))], fail).wait(DEADLINE_S)
    assert put(store, KEYS[1:2]) == [True]
    assert served(store, KEYS[:2]) == KEYS[:2]
    store.close(DEADLINE_S)


def test_rates_are_kept_for_the_next_process(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, KEYS)
    served(store, KEYS)
    store.close(DEADLINE_S)
    again = opened(tmp_path / "store", model=b"another")
    assert again.stats().read_bytes_per_second
    assert again.stats().write_bytes_per_second
    again.close(DEADLINE_S)


def test_many_threads_and_two_views(tmp_path: Path) -> None:
    stores = [opened(tmp_path / "store", pages=24) for _ in range(2)]
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(25):
                keys = [key_of((number * 7 + turn * 3 + step) % 40) for step in range(4)]
                store = stores[(number + turn) % 2]
                put(store, keys)
                served(store, keys)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "checksum" not in {**stores[0].stats().missed, **stores[1].stats().missed}
    for store in stores:
        assert store.stats().total_bytes <= 24 * PAGE_BYTES
        store.close(DEADLINE_S)


def test_what_is_forgotten_is_found_by_nobody_again(tmp_path: Path) -> None:
    store, other = opened(tmp_path / "store"), opened(tmp_path / "store")
    put(store, KEYS[:2])
    filling, go_on, over = threading.Event(), threading.Event(), list[bool]()

    def fill(memory: memoryview) -> None:
        filling.set()
        go_on.wait(DEADLINE_S)
        memory[:] = page_of(KEYS[2])

    assert store.write(KEYS[2], fill, over.append)
    assert filling.wait(DEADLINE_S)
    assert store.write(KEYS[3], memoryview(page_of(KEYS[3])), over.append)
    assert store.write(KEYS[4], memoryview(page_of(KEYS[4])), over.append)
    store.forget([KEYS[0], KEYS[2], KEYS[3], KEYS[7]])  # There, being written, waiting, and unknown.
    assert store.has(KEYS[:1]) == 0
    go_on.set()
    until(lambda: len(over) == 3)
    assert sorted(over) == [False, False, True]
    assert store.stats().dropped == {"forgotten": 1}
    until(lambda: other.has([KEYS[4]]) == 1 and not any(other.has([key]) for key in (KEYS[0], KEYS[2], KEYS[3])))
    assert put(other, [KEYS[0]]) == [True]  # It may come again, as it should be.
    until(lambda: store.has([KEYS[0]]) == 1)
    store.close(DEADLINE_S)
    other.close(DEADLINE_S)
    again = opened(tmp_path / "store")
    assert [again.has([key]) for key in KEYS] == [1, 1, 0, 0, 1, 0, 0, 0]
    again.close(DEADLINE_S)


def test_what_was_forgotten_while_it_waited_may_come_anew_at_once(tmp_path: Path) -> None:
    """Of two copies of a page the first is wrong: the second is written, wherever the first is."""
    store = opened(tmp_path / "store")
    filling, go_on, over = threading.Event(), threading.Event(), list[tuple[str, bool]]()

    def fill(memory: memoryview) -> None:
        filling.set()
        go_on.wait(DEADLINE_S)
        memory[:] = page_of(KEYS[7])

    def ends(name: str) -> Callable[[bool], None]:
        return lambda there: over.append((name, there))

    assert store.write(KEYS[0], fill, ends("being written"))
    assert filling.wait(DEADLINE_S)
    assert store.write(KEYS[1], memoryview(page_of(KEYS[7])), ends("waiting"))
    places = store.room()
    store.forget(KEYS[:2])
    assert not store.awaits(KEYS[0])
    assert not store.awaits(KEYS[1])
    assert store.room() == places, "what was forgotten takes its place until it leaves"
    for key in KEYS[:2]:
        assert store.write(key, memoryview(page_of(key)), ends("anew"))
        assert store.awaits(key)
    go_on.set()
    until(lambda: len(over) == 4)
    assert sorted(over) == [("anew", True), ("anew", True), ("being written", False), ("waiting", False)]
    assert served(store, KEYS) == KEYS[:2]
    assert store.stats().queued_bytes == 0
    store.close(DEADLINE_S)
