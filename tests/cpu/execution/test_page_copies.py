"""Pages between a pool, pinned RAM and a disk over simulated links, where a page is poisoned until it has arrived and
what leaves is read as late as it may be: tokens are transformers' own."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deadlines import PATIENCE_S
from late_tiers import AsGpu, disk_places, pinned
from simulated_copies import SimulatedCopies

from holdfast.execution.tiers.disk import DiskReads
from holdfast.execution.tiers.gpu import (
    MOST_RUN,
    PIECE_BYTES,
    DiskPlaces,
    GpuPageCopies,
    HostMemory,
    _Piece,
    piece_bytes,
)
from holdfast.kvcache import KVCache, Tier, TierLimits
from holdfast.prefix_store import PrefixStore
from holdfast.records import BlockCopy, Request, SamplingParams, StepPlan
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.scheduler import Scheduler

SPREAD = {"full": None, "window": 9}


TIERS = {"RAM": (True, False), "both": (True, True), "disk": (False, True)}
PAIRS = {
    ("compiled", "RAM", "full"), ("torch", "RAM", "window"), ("torch", "both", "full"), ("compiled", "both", "window"),
    ("compiled", "disk", "full"), ("torch", "disk", "window"),
}  # fmt: skip
"""Each of one with each of another; the others are for long runs."""


@pytest.mark.parametrize(
    ("driver_for", "kind", "in_ram", "on_disk"),
    [
        pytest.param(by, kind, *TIERS[tier], id="-".join(names), marks=() if names in PAIRS else pytest.mark.long)
        for names in itertools.product(("torch", "compiled"), TIERS, SPREAD)
        for by, tier, kind in [names]
    ],
    indirect=["driver_for"],
)
def test_random_mixes_over_late_links(
    kind: str,
    in_ram: bool,
    on_disk: bool,
    tmp_path: Path,
    oracles: Callable[..., Any],
    driver_for: Callable[..., Any],
) -> None:
    oracle, source = oracles("Mistral", sliding_window=SPREAD[kind]), random.Random(len(kind) + on_disk)
    blocks = 36 if kind == "full" else 30
    runner = driver_for(oracle, blocks=blocks, slots=6, budget=32).runner
    page = runner.layout.page_bytes
    store = None
    if on_disk:
        store = PrefixStore.open(tmp_path / "kv", size_bytes=32 << 20, page_bytes=page, model=b"m", beat_s=0.05)
    host = HostMemory(pinned([16 * page] * 12), page) if in_ram else None
    link = SimulatedCopies(1)
    copies = GpuPageCopies(
        lambda: runner.kv.pages,
        page,
        link,
        lambda: kind == "full",
        host,
        None if store is None else disk_places(store, page),
    )
    runner.use_tiers(AsGpu(copies))
    limits = TierLimits(host_pages=0, most_loading_disk=4, most_storing=8, spare_pages=blocks)
    kv = KVCache(runner.layout, blocks, True, limits, store)
    scheduler = Scheduler(SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100), kv)
    shared = [[source.randrange(300) for _ in range(40)] for _ in range(4)]
    prompts = {
        f"r{number}": shared[number % 4][: source.choice((24, 40))]
        + [source.randrange(300) for _ in range(source.randint(1, 12))]
        for number in range(16)
    }
    prompts |= {f"{name} again": asked for name, asked in prompts.items()}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    waiting, forgotten = deque(prompts), not on_disk
    while waiting or scheduler.has_unfinished or scheduler.has_copies:
        if not forgotten and len(waiting) == len(prompts) // 4:  # From here on only the disk knows what was asked.
            forgotten = True
            scheduler.reset_prefix_cache()
        while waiting and len(scheduler._waiting) < 2:
            name = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=source.randint(16, 30))
            scheduler.add(Request(request_id=name, prompt_token_ids=prompts[name], params=params), 0.0)
        if (plan := scheduler.schedule(0.0)) is not None:
            result = runner.execute(plan)
            kv.end_copies([], [], copies.host_pages())
            for output in scheduler.apply(result, 0.0):
                answers[output.request_id] += output.token_ids
        scheduler.check_invariants()
    for name, asked in prompts.items():
        oracle.assert_greedy(asked + answers[name], len(asked))
    assert kv.tiers is not None
    for tier, there in ((Tier.HOST, in_ram), (Tier.DISK, on_disk)):
        assert (kv.below_hits_total[tier] > 0) == there
        assert (kv.tiers.loaded_pages[tier] > 0) == there
    assert kind == "window" or scheduler.stats().preemptions_total > 0
    assert store is None or kv.tiers.stored_pages[Tier.DISK] > 0
    assert bool(link.later) == (kind == "full") != bool(link.copied)
    assert link.use().copied_bytes == sum(kv.tiers.loaded_pages.values()) * page
    assert link.use_back().copied_bytes >= sum(kv.tiers.stored_pages.values()) * page
    copies.close()


def test_pages_of_ram_are_used_as_they_are_pinned() -> None:
    """A server is ready before the last of them is."""
    page, gate = 4096, [True]

    def pin(address: int) -> int:
        while not gate[0]:
            time.sleep(0.001)
        return 0

    memory = pinned([4 * page], pin)
    host = HostMemory(memory, page)
    memory.wait(0)
    assert host.look() == 4
    gate[0] = False
    slow = HostMemory(pinned([4 * page, 4 * page], pin), page)
    assert slow.look() == 0
    assert not slow.settled
    gate[0] = True
    slow._pinned.wait(0, 1)
    assert slow.look() == 8
    assert slow.settled
    broken = HostMemory(pinned([4 * page], lambda address: 2), page)
    deadline = time.monotonic() + PATIENCE_S
    while not broken._pinned._done[0].done() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert broken.look() == 0
    assert broken.settled, "nobody need wait for the rest"


@pytest.mark.parametrize("page", [512, 3 * 1024, 12_288, 2 << 20, 5 << 20])
def test_pieces_are_whole_pages_of_both_kinds_and_no_more_than_was_asked_for(page: int) -> None:
    for nbytes in (64 << 20, 1 << 30):
        piece = piece_bytes(nbytes, page)
        assert piece % page == piece % 4096 == 0
        assert piece <= min(nbytes, PIECE_BYTES)
    assert piece_bytes(1, page) % page == 0


def test_the_link_tells_how_long_it_brought_pages_from_ram() -> None:
    """Since it was asked last, also where it did not time them all; and nothing where weights or pages from disk come
    over it too."""

    class Timed(SimulatedCopies):
        found = 0.0, 0

        def timed(self) -> tuple[float, int]:
            return self.found

        def passed(self, mark: Any) -> bool:
            return True

    link, weights_come, page = Timed(1), False, 16
    copies = GpuPageCopies(lambda: torch.zeros(64), page, link, lambda: weights_come, None, None)

    def come(pages: int, seconds: float, timed: int, tier: Tier = Tier.HOST) -> float:
        """Of so many pages that come so many are timed."""
        link.found = link.found[0] + seconds, link.found[1] + timed * page
        coming = [BlockCopy(number, tier, number, Tier.DEVICE, number, False) for number in range(pages)]
        copies._coming.extend(_Piece(None, [one]) for one in coming)
        assert copies.over(wait=False) == (list(range(pages)), [])
        return copies.loading_s()

    assert come(4, 0.5, 4) == 0.5
    assert come(0, 0.0, 0) == 0.0
    assert come(1000, 0.25, 2) == 125.0, "few of many pieces were timed"
    assert come(2, 0.0, 0) == 0.25, "none was: it is as it was of late"
    weights_come = True
    assert come(4, 2.0, 4) == 0.0
    weights_come, copies._from_disk = False, True
    assert come(4, 2.0, 4) == 0.0
    assert come(4, 1.0, 4, Tier.DISK) == 0.0
    assert come(4, 1.0, 4) == 1.0


@pytest.mark.parametrize("to_pool", [True, False])
def test_pages_that_lie_anywhere_go_many_at_a_time(to_pool: bool) -> None:
    """One by one the host would be busy with marks, and a stream full of them."""
    page, count, draw = 64, 3 * MOST_RUN, random.Random(3)
    pool, link = torch.randint(256, (2 * count, page), dtype=torch.uint8), SimulatedCopies(1)
    host = HostMemory(pinned([2 * count * page]), page)
    while not host.settled:
        host.look()
    memory = host.run(0, 2 * count).view(2 * count, page)
    memory.random_(256)
    ends = list(zip(draw.sample(range(2 * count), count), draw.sample(range(2 * count), count), strict=True))
    copies = GpuPageCopies(lambda: pool, page, link, lambda: False, host, None)
    if to_pool:
        wanted = [memory[there].clone() for there, _ in ends]
        asked = [
            BlockCopy(number, Tier.HOST, there, Tier.DEVICE, here, False) for number, (there, here) in enumerate(ends)
        ]
        copies.begin(StepPlan(step_id=1, copies=asked))
    else:
        wanted = [pool[here].clone() for _, here in ends]
        asked = [
            BlockCopy(number, Tier.DEVICE, here, Tier.HOST, there, False) for number, (there, here) in enumerate(ends)
        ]
        copies.launch_stores(StepPlan(step_id=1, copies=asked))
    sent = link.copied if to_pool else link.back
    assert sum(sent) == count * page
    assert len(sent) <= 6
    link.settle()
    found = set[int]()
    while len(found) < count:
        found |= set(copies.over(wait=True)[0])
    for (there, here), rows in zip(ends, wanted, strict=True):
        assert torch.equal(pool[here] if to_pool else memory[there], rows)
    copies.close()


@pytest.mark.parametrize("to_pool", [True, False])
def test_what_was_interrupted_writes_to_nobodys_page(to_pool: bool) -> None:
    """Ctrl-C when a copy is on its way and nobody has heard of it."""
    page = 4096

    class Struck(SimulatedCopies):
        def _begin(self, pieces: Any, done: Any) -> None:
            super()._begin(pieces, [])
            raise KeyboardInterrupt

    pool, link, host = torch.zeros(8 * page, dtype=torch.uint8), Struck(1), HostMemory(pinned([4 * page]), page)
    while not host.settled:
        host.look()
    copies = GpuPageCopies(lambda: pool, page, link, lambda: False, host, None)
    ends = (1, Tier.HOST, 2, Tier.DEVICE) if to_pool else (2, Tier.DEVICE, 1, Tier.HOST)
    asked: Any = SimpleNamespace(copies=[BlockCopy(0, ends[1], ends[0], ends[3], ends[2], False)])
    with pytest.raises(KeyboardInterrupt):
        (copies.begin if to_pool else copies.launch_stores)(asked)
    copies.abandon()
    written = pool if to_pool else host.run(0, 4)
    written.fill_(7)
    link.settle()
    assert set(written.tolist()) == {7}
    assert copies.over(wait=False) == ([], [])
    copies.close()


class Written:
    """A store that nothing is read from."""

    def __init__(self) -> None:
        self.pages: list[tuple[bytes, bytes]] = []

    def read(self, wanted: Any, done: Any) -> Any:
        raise AssertionError("nothing was asked for")

    def write(self, key: bytes, page: memoryview) -> bool:
        self.pages.append((key, bytes(page)))
        return True

    def close(self, timeout_s: float) -> None:
        return None


def to_disk(number: int) -> Any:
    return SimpleNamespace(copies=[BlockCopy(number, Tier.DEVICE, 2, Tier.DISK, 0, False, b"key %d" % number)])


def test_what_was_interrupted_before_its_copy_is_not_written_to_the_disk() -> None:
    """Its place holds an older page; it is free afterwards."""
    page = 4096

    class Struck(SimulatedCopies):
        times = 2

        def copy_back(self, pieces: Any, after: Any, done: Any) -> None:
            self.times -= 1
            if self.times >= 0:
                raise KeyboardInterrupt
            super().copy_back(pieces, after, done)

    pool, store, link = torch.full((8 * page,), 7, dtype=torch.uint8), Written(), Struck(1)
    memory = torch.full((2 * page,), 3, dtype=torch.uint8)
    disk = DiskPlaces(store, DiskReads(store, page, 1, memory.numpy().data[:page]), memory, page, page)
    copies = GpuPageCopies(lambda: pool, page, link, lambda: False, None, disk)
    for number in range(2):
        with pytest.raises(KeyboardInterrupt):
            copies.launch_stores(to_disk(number))
        copies.abandon()
        assert store.pages == []
    copies.launch_stores(to_disk(2))
    link.settle()
    assert copies.over(wait=True) == ([2], [])
    assert store.pages == [(b"key 2", bytes([7]) * page)]
    copies.close()


@pytest.mark.parametrize("way", ["to the pool", "behind weights", "from the pool"])
def test_ctrl_c_comes_after_the_copy_that_is_asked_for(way: str) -> None:
    page = 4096

    class Struck(SimulatedCopies):
        def _begin(self, pieces: Any, done: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super()._begin(pieces, done)

    pool, link, host = torch.zeros(8 * page, dtype=torch.uint8), Struck(1), HostMemory(pinned([4 * page]), page)
    while not host.settled:
        host.look()
    copies = GpuPageCopies(lambda: pool, page, link, lambda: way == "behind weights", host, None)
    ends = (2, Tier.DEVICE, 1, Tier.HOST) if way == "from the pool" else (1, Tier.HOST, 2, Tier.DEVICE)
    asked: Any = SimpleNamespace(copies=[BlockCopy(0, ends[1], ends[0], ends[3], ends[2], False)])
    with pytest.raises(KeyboardInterrupt):
        (copies.launch_stores if way == "from the pool" else copies.begin)(asked)
    (piece,) = (*copies._coming, *copies._going)
    assert piece.mark, "what it stands behind"
    copies.close()
