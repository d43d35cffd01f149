"""A disk that was slow is tried again, in simulated time: soon where it has recovered, and at a small loss where it
has not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulated_engine import FakeStore, SimulatedEngine, SimulatedRunner, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams, StepPlan
from holdfast.scheduler import Scheduler, SchedulerLimits, fetching

BLOCK, BLOCKS, HEAD = 16, 60, 20
"""The prompt has so many, the first of which can be in RAM."""
TOKEN_S, FAST_S, GIVEN_UP_S, LOOK_S = 1e-3, 1e-3, 10.0, 0.02
"""Of a token, of a page from anywhere, of one that does not come, and at least between looks."""
COMPUTED_S = BLOCK * BLOCKS * TOKEN_S


@pytest.fixture(autouse=True)
def rates_are_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured first is as good as all else here."""
    monkeypatch.setattr(fetching, "KNOWN_S", 0.0)


class TimedTiers(SimulatedTiers):
    """Pages of a tier come one after the other; of a disk that hangs none does. `beside_s`: that a page from disk takes
    longer while a step is computed."""

    now_s, page_s, beside_s, hangs = 0.0, FAST_S, 0.0, False

    def __init__(self, store: FakeStore) -> None:
        super().__init__(random.Random(0), store, 0.0)
        self._due_s: dict[int, float] = {}

    @property
    def pause_s(self) -> float:
        """Between looks while there is nothing to compute."""
        return min(0.1, max([LOOK_S, *(due_s - self.now_s for due_s in self._due_s.values())]))

    def follow(self, plan: StepPlan, runner: SimulatedRunner) -> tuple[list[int], list[int]]:
        free_s = dict.fromkeys(self.copied, self.now_s)
        for copy in self._under_way:
            free_s[copy.source_tier] = max(free_s.get(copy.source_tier, 0.0), self._due_s.get(copy.copy_id, 0.0))
        for copy in plan.copies:
            if copy.target_tier == Tier.DEVICE:
                runner.poison([copy.target])
                from_disk = copy.source_tier == Tier.DISK
                free_s[copy.source_tier] += self.page_s + self.beside_s * bool(plan.rows) if from_disk else FAST_S
                late = self.hangs and from_disk
                self._due_s[copy.copy_id] = self.now_s + GIVEN_UP_S if late else free_s[copy.source_tier]
            self._under_way.append(copy)
        over = [copy for copy in self._under_way if self._due_s.get(copy.copy_id, 0.0) <= self.now_s]
        self._under_way = [copy for copy in self._under_way if copy not in over]
        lost = [copy.copy_id for copy in over if self.hangs and copy.source_tier == Tier.DISK]
        for copy in over:
            self._due_s.pop(copy.copy_id, None)
            assert copy.copy_id in lost or self._move(copy, runner)
        return [copy.copy_id for copy in over if copy.copy_id not in lost], lost


class World:
    """`head_in_ram`: the first blocks of the prompt always are; all of it is on the disk. `disk_share`: that pages have
    of it while steps read layers from there too. `step_s`: of a step, besides its tokens."""

    def __init__(self, *, head_in_ram: bool, disk_share: float = 1.0, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.below = TierLimits(spare_pages=0, disk_share=disk_share)
        groups, places = form_groups([None])
        self.layout = KVLayout(
            groups=groups, block_tokens=BLOCK, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
        )
        self.prompt = [random.Random(1).randrange(50) for _ in range(BLOCK * BLOCKS + 1)]
        self.store = FakeStore(random.Random(3), most=1000, most_room=1000)
        self.tiers, self.asked = TimedTiers(self.store), 0
        self._restart(0)
        for _ in range(2):
            self.ask()
        assert len(self.store.pages) == BLOCKS
        self.store.lost.clear()
        self._restart(HEAD if head_in_ram else 0)

    def _restart(self, head: int) -> None:
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=2000)
        kv = KVCache(self.layout, 200, True, replace(self.below, host_pages=head), self.store)
        self.engine = SimulatedEngine(Scheduler(limits, kv), vocabulary=50, tiers=self.tiers)
        self.rate = self.engine.scheduler._fetching.loads[Tier.DISK]
        if head:
            assert kv.tiers is not None
            book = kv.open()
            kv.find_prefix(book, self.prompt)
            for key in book.hashes[:head]:
                place = kv.tiers.host.reserve(0, key)
                assert place is not None
                self.tiers.host[place] = list(self.store.pages[(0).to_bytes(2, "little") + key])
                kv.tiers.host.arrived(place)
            kv.close(book)
        for tokens in (100, BLOCK * BLOCKS, 300):  # So that it knows what computing takes.
            self.ask([len(self.engine.outputs) + 51] * tokens)

    def ask(self, prompt: list[int] | None = None) -> float:
        """Seconds to the first token; nothing stays in the pool."""
        prompt = prompt or self.prompt
        self.asked, name, tiers = self.asked + 1, f"{self.asked + 1}", self.tiers
        began_s, kv = tiers.now_s, self.engine.scheduler.kv
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params), began_s)
        while name in self.engine.unfinished:
            self.step()
        took_s = tiers.now_s - began_s
        while self.engine.scheduler.has_copies:
            self.step()
        book = kv.open()
        kv.find_prefix(book, prompt)
        kv.forget(book, 0)
        kv.close(book)
        return took_s

    def step(self) -> None:
        plan = self.engine.plan(self.tiers.now_s)
        assert plan is not None
        self.tiers.now_s += self.step_s + plan.token_count * TOKEN_S if plan.rows else self.tiers.pause_s
        self.engine.execute(self.tiers.now_s)


@pytest.mark.parametrize("head_in_ram", [False, True], ids=["all of it on disk", "the head in RAM"])
@pytest.mark.parametrize(("hangs", "most"), [(False, 60), (True, 500)], ids=["slow", "hung"])
def test_a_disk_that_has_recovered_is_fetched_from_again(hangs: bool, most: int, head_in_ram: bool) -> None:
    """After a hang a twenty-fifth of it must have been computed first: nobody knew that it would be over."""
    world = World(head_in_ram=head_in_ram)
    fetched_s = [world.ask() for _ in range(2)][-1]
    assert fetched_s < COMPUTED_S / 3
    world.tiers.page_s, world.tiers.hangs = 1.0, hangs
    world.ask()
    world.tiers.page_s, world.tiers.hangs = FAST_S, False
    took_s = [world.ask()]
    computed_s = took_s[0]
    assert computed_s > 0.6 * COMPUTED_S, "it seems slow"
    while took_s[-1] > 1.5 * fetched_s:
        took_s.append(world.ask())
        assert len(took_s) < most
    assert max(took_s) < computed_s + 1.1, "one paid for all"
    assert sum(took_s) < 1.05 * len(took_s) * computed_s
    assert world.rate.credit_s <= 1.0


@pytest.mark.parametrize("head_in_ram", [False, True], ids=["all of it on disk", "the head in RAM"])
@pytest.mark.parametrize("page_s", [0.02, 0.5, 3.0, None], ids=["a bit slow", "slow", "far too slow", "hangs"])
def test_a_disk_that_stays_slow_costs_little(page_s: float | None, head_in_ram: bool) -> None:
    world = World(head_in_ram=head_in_ram)
    world.tiers.page_s, world.tiers.hangs = page_s or 1.0, page_s is None
    for _ in range(2):
        world.ask()
    copied, computed_s = world.tiers.copied[Tier.DISK], world.ask()
    took_s = [world.ask() for _ in range(350)]
    assert sum(took_s) < 1.05 * computed_s * len(took_s)
    assert max(took_s) < computed_s + (GIVEN_UP_S if page_s is None else max(1.0, page_s)) + 0.2
    if page_s is not None:
        assert world.tiers.copied[Tier.DISK] > copied, "it is never tried"


def test_beside_steps_that_read_layers_from_it_a_disk_has_a_rate_of_its_own() -> None:
    """Slower than computing there, faster alone: neither decides what is done in the other."""
    world = World(head_in_ram=False, disk_share=1 / 9, step_s=0.01)
    world.tiers.beside_s = 0.05
    alone_s, beside_s = list[float](), list[float]()
    for _ in range(8):
        alone_s.append(world.ask())
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        world.engine.add(Request(request_id=f"beside {len(beside_s)}", prompt_token_ids=[1], params=params))
        beside_s.append(world.ask())
        world.engine.abort(f"beside {len(beside_s) - 1}")
    assert max(alone_s[1:]) < COMPUTED_S / 3
    assert max(beside_s[1:]) < 1.2 * COMPUTED_S


@pytest.mark.parametrize("hangs", [False, True])
def test_a_try_beside_a_step_that_ends_first_is_settled_where_it_was_charged(hangs: bool) -> None:
    world = World(head_in_ram=False, disk_share=1 / 9, step_s=0.01)
    tiers, engine, fetching = world.tiers, world.engine, world.engine.scheduler._fetching
    alone, beside = world.rate, fetching.disk_beside_steps
    beside.note(10 * world.layout.page_bytes, 1.0)
    beside.earn(1.0)
    tiers.beside_s, tiers.hangs = 0.012, hangs
    for name, prompt, tokens in (("last", [1], 2), ("again", world.prompt, 1)):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params), tiers.now_s)
        began_s = tiers.now_s
        world.step()
    assert set(engine.unfinished) == {"again"}
    assert beside.charged_s > 0.1
    assert engine.scheduler.kv.tiers is not None
    while engine.scheduler.kv.tiers.in_flight(Tier.DISK):
        world.step()
    took_s = tiers.now_s - began_s
    assert (took_s > GIVEN_UP_S) == hangs
    assert 1 - took_s <= beside.credit_s + 1e-9 <= (1 - GIVEN_UP_S if hangs else 1.0)
    assert not beside.charged_s
    assert not alone.credit_s
