"""A state machine over two views of a folder and a dictionary: with restarts, failures of every call and damaged files,
what is served is what was written; and without failures nothing is lost but what was evicted."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prefix_pages import DEADLINE_S, PAGE_BYTES, FailingCalls, key_of, opened, put, served

from holdfast.prefix_store import PrefixStore

PAGES = 12
CALLS = ("open", "read", "write", "read_into", "write_from", "size", "punch", "try_lock", "sync", "disk_space", "names")
NUMBERS = st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True)
VIEWS = st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """`written`: keys that a view said to have written, in no trouble, since when nothing was evicted. Where files were
    damaged nothing is promised any more but right bytes."""

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.calls = FailingCalls(seed)
        self.calls.failing, self.calls.errors = set(CALLS), [errno.EIO, errno.ENOSPC, errno.EROFS]
        self.views: list[PrefixStore] = [self.open_view(), self.open_view()]
        self.written: set[bytes] = set()
        self.damaged = False

    def open_view(self) -> PrefixStore:
        return opened(self.folder / "store", pages=PAGES, calls=self.calls, retry_s=0, beat_s=0.002)

    @rule(view=VIEWS, numbers=NUMBERS)
    def write(self, view: int, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        evicted = self.views[view].stats().pages_evicted
        there = put(self.views[view], keys)
        if self.views[view].stats().pages_evicted > evicted:
            self.written.clear()  # Also of what was written now: the last page may have taken the place of the first.
        elif not (self.calls.chance or self.damaged):
            self.written |= {key for key, is_there in zip(keys, there, strict=True) if is_there}

    @rule(view=VIEWS, numbers=NUMBERS)
    def read(self, view: int, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        served(self.views[view], keys)  # Asserts that their bytes are right.
        if self.calls.chance:
            self.written.clear()

    @rule(view=VIEWS, numbers=NUMBERS)
    def use(self, view: int, numbers: list[int]) -> None:
        self.views[view].use([key_of(number) for number in numbers])

    @rule(view=VIEWS)
    def restart(self, view: int) -> None:
        self.views[view].close(DEADLINE_S)
        self.views[view] = self.open_view()

    @rule(view=VIEWS)
    @precondition(lambda self: not self.calls.chance)
    def restart_finds_what_was_written(self, view: int) -> None:
        for one in self.views:
            one.close(DEADLINE_S)
        self.views = [self.open_view(), self.open_view()]
        written = sorted(self.written)
        assert served(self.views[view], written) == written

    @rule(chance=st.sampled_from([0.02, 0.2, 1.0]))
    def trouble_begins(self, chance: float) -> None:
        self.calls.chance = chance
        self.written.clear()

    @rule()
    def trouble_ends(self) -> None:
        self.calls.chance = 0.0
        for view in (0, 1):
            self.restart(view)  # One that could only read goes on so.
        assert not any(one.stats().read_only for one in self.views)

    @rule(
        name=st.sampled_from(["control", "*.index", "*.pages"]),
        where=st.integers(0, 1 << 20),
        content=st.one_of(st.none(), st.binary(min_size=1, max_size=9)),
    )
    def damage(self, name: str, where: int, content: bytes | None) -> None:
        """`content`: None ends the file there."""
        for file in (self.folder / "store").glob(name):
            with file.open("r+b") as damaged:
                at = where % (file.stat().st_size + 1)
                damaged.seek(at)
                if content is None:
                    damaged.truncate(at)
                else:
                    damaged.write(content)
        self.written.clear()
        self.damaged = True

    @invariant()
    def stays_within_its_size(self) -> None:
        for view in getattr(self, "views", ()):
            assert view.stats().nbytes <= PAGES * PAGE_BYTES

    def teardown(self) -> None:
        self.calls.chance = 0.0
        for view in self.views:
            view.close(DEADLINE_S)
        shutil.rmtree(self.folder)


def run_machine(examples: int, steps: int) -> None:
    limits = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=examples, stateful_step_count=steps, **limits)
    )


def test_any_order_of_writes_reads_restarts_and_trouble() -> None:
    run_machine(examples(40), 25)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_orders_of_writes_reads_restarts_and_trouble() -> None:
    run_machine(500, 50)
