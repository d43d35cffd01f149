"""Pages that go to a store on disk and come back, also after a restart: tokens are transformers' own, whatever the mix.
A store that hangs or lies is a miss."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import PATIENCE_S
from late_tiers import AsGpu, disk_places
from simulated_copies import SimulatedCopies

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.tiers import disk
from holdfast.execution.tiers.cpu import CpuPageCopies
from holdfast.execution.tiers.disk import LATE_S, DiskReads
from holdfast.execution.tiers.gpu import GpuPageCopies
from holdfast.footprint.cpu import staging_places, staging_stride
from holdfast.kvcache import KVCache, Tier, TierLimits
from holdfast.prefix_store import PrefixStore
from holdfast.records import BlockCopy, Request, SamplingParams
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.scheduler import Scheduler
from holdfast.units import MIB


def open_store(folder: Path, page_bytes: int) -> PrefixStore:
    return PrefixStore.open(folder, size_bytes=64 << 20, page_bytes=page_bytes, model=b"one model", beat_s=0.05)


def serve(runner: Any, store: PrefixStore, prompts: dict[str, list[int]], source: random.Random, blocks: int) -> Any:
    """All of them, in random company; answers by name, and the scheduler."""
    runner.use_tiers(CpuPageCopies(store, runner.layout.page_bytes))
    kv = KVCache(runner.layout, blocks, True, TierLimits(most_loading_disk=8), store)
    scheduler = Scheduler(SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100), kv)
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    waiting = deque(prompts)
    while waiting or scheduler.has_unfinished or scheduler.has_copies:
        for _ in range(source.randint(0, 3)):
            if waiting:
                name = waiting.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=source.randint(16, 30))
                request = Request(request_id=name, prompt_token_ids=prompts[name], params=params)
                scheduler.add(request, time.monotonic())
        plan = scheduler.schedule(time.monotonic())
        if plan is not None:
            for output in scheduler.apply(runner.execute(plan), time.monotonic()):
                answers[output.request_id] += output.token_ids
        scheduler.check_invariants()
    return answers, scheduler


@pytest.mark.parametrize(
    ("driver_for", "window"),
    [
        pytest.param("compiled", None, id="compiled-full"),
        pytest.param("torch", 9, id="torch-window"),
        pytest.param("compiled", 9, id="compiled-window", marks=pytest.mark.long),
        pytest.param("torch", None, id="torch-full", marks=pytest.mark.long),
    ],
    indirect=["driver_for"],
)
def test_random_mixes_with_a_store_that_outlives_the_engine(
    window: int | None, tmp_path: Path, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    oracle = oracles("Mistral", sliding_window=window)
    source = random.Random(window or 0)
    blocks = 36 if window is None else 30
    shared = [[source.randrange(300) for _ in range(40)] for _ in range(3)]
    prompts = {
        f"r{number}": shared[number % 3][: source.choice((8, 24, 40))]
        + [source.randrange(300) for _ in range(source.randint(1, 20))]
        for number in range(16)
    }
    prompts |= {f"{name} again": prompt for name, prompt in prompts.items()}
    came, preempted = 0, 0
    for _ in range(2):
        runner = driver_for(oracle, blocks=blocks, slots=6, budget=32).runner
        store = open_store(tmp_path / "store", runner.layout.page_bytes)
        answers, scheduler = serve(runner, store, prompts, source, blocks)
        for name, prompt in prompts.items():
            oracle.assert_greedy(prompt + answers[name], len(prompt))
        came = scheduler.kv.below_hits_total[Tier.DISK]
        preempted += scheduler.stats().preemptions_total
        assert scheduler.kv.blocks_used == 0
        store.close(5.0)
        assert store.stats().pages > 0
    assert came > 0, "after the restart something comes from the disk"
    assert window is not None or preempted > 0


class FakeStore:
    """Reads end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[tuple[bytes, memoryview]], Callable[[Any], None]]] = []
        self.cancelled = 0

    def read(self, wanted: Sequence[tuple[bytes, memoryview]], done: Callable[[Any], None]) -> Any:
        self.asked.append((wanted, done))
        return SimpleNamespace(cancel=self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1

    def write(self, key: bytes, page: memoryview) -> bool:
        return False

    def close(self, timeout_s: float) -> None: ...


def load(number: int) -> BlockCopy:
    return BlockCopy(number, Tier.DISK, 0, Tier.DEVICE, number, False, bytes([number]))


def test_pages_come_as_they_are_read_and_wrong_ones_do_not() -> None:
    store = FakeStore()
    reads = DiskReads(store, 8, places=8)
    reads.begin([load(1), load(2)])
    ((first, one), (_, two)), done = store.asked[0]
    one[:], two[:] = b"abcdefgh", b"nonsense"
    assert (first, list(reads.collect())) == (bytes([1]), [])
    threading.Timer(0.01, lambda: done(SimpleNamespace(valid=(True, False)))).start()
    found = [(copy.copy_id, None if at is None else bytes(reads.views[at])) for copy, at in reads.collect(wait_s=10.0)]
    assert found == [(1, b"abcdefgh"), (2, None)]
    assert not reads.under_way


@pytest.mark.parametrize("page_bytes", [2 * MIB, 5 * MIB], ids=["8B", "70B"])
def test_the_disk_reads_on_while_pages_that_have_come_go_to_the_pool(page_bytes: int) -> None:
    """Of large pages there are few places: were all of them asked for as one, the disk would stand still each time."""
    places, store = staging_places(page_bytes), FakeStore()
    reads = DiskReads(store, page_bytes, places)
    reads.begin([load(number) for number in range(places)])
    assert len(store.asked) >= 4
    assert len(store.asked[0][0]) >= 3, "a disk is not kept busy by single pages"
    wanted, done = store.asked[0]
    done(SimpleNamespace(valid=(True,) * len(wanted)))
    come = [place for _, place in reads.collect() if place is not None]
    assert 0 < len(come) <= places // 4
    for place in come:
        reads.release(place)
    before = len(store.asked)
    reads.begin([load(100)])
    assert len(store.asked) == before + 1, "what has come makes room for more"


def test_a_disk_that_hangs_is_not_waited_for_and_keeps_only_its_own_memory() -> None:
    now, store = [0.0], FakeStore()
    reads = DiskReads(store, 8, places=2, clock=lambda: now[0])
    reads.begin([load(1), load(2)])
    assert len(store.asked) == 2
    now[0] = LATE_S + 1
    assert [(copy.copy_id, page) for copy, page in reads.collect()] == [(1, None), (2, None)]
    assert store.cancelled == 2
    reads.begin([load(3)])  # All places are the store's.
    assert [(copy.copy_id, page) for copy, page in reads.collect()] == [(3, None)]
    store.asked[0][1](SimpleNamespace(valid=(True,)))  # At last; nobody waits for it.
    assert list(reads.collect()) == []
    reads.begin([load(4)])
    assert len(store.asked) == 3
    assert [copy.copy_id for copy in reads.give_up()] == [4]
    store.asked[2][1](SimpleNamespace(valid=(True,)))
    assert list(reads.collect()) == []


def test_places_of_what_was_given_up_are_had_as_soon_as_the_disk_is_done_with_them() -> None:
    """After a resize all that is wanted is asked for anew, before anybody has looked what was over."""
    store = FakeStore()
    reads = DiskReads(store, 8, places=2)
    reads.begin([load(1), load(2)])
    (_, first), (_, second) = store.asked
    first(SimpleNamespace(valid=(True,)))
    reads.begin([load(3)])  # No place; and what has come meanwhile waits to be collected.
    assert [copy.copy_id for copy in reads.give_up()] == [3, 1, 2]
    reads.begin([load(1)])
    second(SimpleNamespace(valid=(False,)))
    reads.begin([load(2)])
    assert [wanted[0][0] for wanted, _ in store.asked] == [bytes([number]) for number in (1, 2, 1, 2)]
    for _, done in store.asked[2:]:
        done(SimpleNamespace(valid=(True,)))
    assert [copy.copy_id for copy, place in reads.collect() if place is not None] == [1, 2]
    assert not reads.under_way


class HungStore:
    """A real store, of which no read ends while the disk hangs."""

    def __init__(self, store: PrefixStore) -> None:
        self.store, self.hangs = store, False
        self.hung: list[tuple[Sequence[tuple[bytes, memoryview]], Callable[[Any], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, wanted: Sequence[tuple[bytes, memoryview]], done: Callable[[Any], None]) -> Any:
        if not self.hangs:
            return self.store.read(wanted, done)
        self.hung.append((wanted, done))
        return SimpleNamespace(cancel=lambda: None)


@pytest.mark.parametrize("as_gpu", [False, True], ids=["CPU", "GPU"])
def test_all_of_a_long_prefix_is_written_through_few_places(
    as_gpu: bool, tmp_path: Path, oracles: Callable[..., Any], driver_for: Callable[..., Any]
) -> None:
    """A page of a large model is megabytes: a few dozen may wait for the disk, and a prompt has a thousand."""
    runner = driver_for(oracles("Llama"), blocks=60, slots=4, budget=32).runner
    page = runner.layout.page_bytes
    store = PrefixStore.open(
        tmp_path, size_bytes=64 << 20, page_bytes=page, model=b"m", beat_s=0.05, queue_bytes=6 * staging_stride(page)
    )
    copies: Any = CpuPageCopies(store, page)
    if as_gpu:
        places = disk_places(store, page)  # Four each way.
        copies = AsGpu(GpuPageCopies(lambda: runner.kv.pages, page, SimulatedCopies(1), lambda: False, None, places))
    runner.use_tiers(copies)
    kv = KVCache(runner.layout, 60, True, TierLimits(most_writing=4 if as_gpu else 64), store)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200)
    core, prompt = EngineCore(Scheduler(limits, kv), runner), [5, 6, 7, 8] * 40
    for name in ("first", "second"):
        params = SamplingParams(temperature=0.0, max_tokens=2)
        core.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
        while core.has_work:
            core.step()
            core.scheduler.check_invariants()
    store.close(PATIENCE_S)
    assert store.stats().pages == len(prompt) // 4 - 1
    assert store.stats().dropped == {}
    assert core.stats().failed_copies_total == 0


@pytest.mark.parametrize("blocks", [22, 40], ids=["fewer pages", "more pages"])
def test_a_resize_does_not_wait_for_a_disk_that_hangs(
    blocks: int,
    tmp_path: Path,
    oracles: Callable[..., Any],
    driver_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "LATE_S", PATIENCE_S)
    oracle, runner = oracles("Llama"), driver_for(oracles("Llama"), blocks=36, slots=4, budget=32).runner
    runner.back_kv(36, 60)
    store = HungStore(open_store(tmp_path / "store", runner.layout.page_bytes))
    runner.use_tiers(CpuPageCopies(store, runner.layout.page_bytes))
    kv = KVCache(runner.layout, 36, True, TierLimits(most_loading_disk=8), store)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=80)
    core, answers = EngineCore(Scheduler(limits, kv), runner), dict[str, list[int]]()

    def ask(name: str, prompt: list[int]) -> None:
        answers[name] = list(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=12)
        core.add(Request(request_id=name, prompt_token_ids=prompt, params=params))

    def step() -> None:
        for output in core.step():
            answers[output.request_id] += output.token_ids
        core.scheduler.check_invariants()

    prompt = [5, 6, 7, 8] * 10
    for name in ("first", "second"):
        ask(name, prompt)
        while core.has_work:
            step()
    store.store._writer.drain(PATIENCE_S)
    core.scheduler.reset_prefix_cache()
    store.hangs = True
    ask("waits", prompt)
    ask("runs", [9, 10, 11] * 5)
    while not store.hung:
        step()
    began_s = time.monotonic()
    core.resize_kv(blocks)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    core.scheduler.check_invariants()
    assert core.scheduler.stats().failed_copies_total == 0
    store.hangs = False
    for wanted, done in store.hung:  # The disk answers at last, with whatever it likes: nobody reads it.
        for _, memory in wanted:
            memory[:] = b"\xff" * len(memory)
        done(SimpleNamespace(valid=(True,) * len(wanted)))
    while core.has_work:
        step()
    for name, found in answers.items():
        oracle.assert_greedy(found, len(prompt) if name != "runs" else 15)
    assert kv.blocks_used == 0
    core.close()
