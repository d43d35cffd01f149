"""Fetch or compute, in simulated time with planted costs: of a step, a token, and what each token sees; of a page over
a link. Whatever they are, waiting for pages is not slower than computing by more than 5%, and where it pays it is done.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from simulated_engine import SimulatedEngine, SimulatedRunner, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import Request, SamplingParams, StepPlan
from holdfast.scheduler import Scheduler, SchedulerLimits, fetching
from holdfast.scheduler.prefill_cost import PrefillCost, PromptWork, pairs

BLOCK, STEP, LONGEST = 16, 128, 1100
ROUNDS = 40
"""Prompts of which the beginning is asked for again."""


@pytest.fixture(autouse=True)
def rates_are_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured first is as good as all else here, and all of it together takes less."""
    monkeypatch.setattr(fetching, "KNOWN_S", 0.0)


@dataclass(frozen=True)
class Costs:
    step_s: float
    token_s: float
    pair_s: float
    page_s: float


class TimedTiers(SimulatedTiers):
    """One page after the other; what has come is told when a step is over."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(random.Random(0), None, 0.0)
        self.costs, self.now_s, self._free_s = costs, 0.0, 0.0
        self.due_s: dict[int, float] = {}

    def begin(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            if copy.target_tier:  # The other direction of the link.
                self.due_s[copy.copy_id] = self.now_s
                continue
            self._free_s = max(self._free_s, self.now_s) + self.costs.page_s
            self.due_s[copy.copy_id] = self._free_s

    def follow(self, plan: StepPlan, runner: SimulatedRunner) -> tuple[list[int], list[int]]:
        self._under_way += plan.copies
        over = [copy for copy in self._under_way if self.due_s[copy.copy_id] <= self.now_s]
        self._under_way = [copy for copy in self._under_way if copy not in over]
        for copy in over:
            if not copy.target_tier:
                runner.poison([copy.target])
            assert self._move(copy, runner)
        return [copy.copy_id for copy in over], []


class World:
    """`below`: with pages in RAM below the pool. `busy`: answers go on beside, one after the other."""

    def __init__(self, costs: Costs, *, below: bool, busy: bool, window: int | None) -> None:
        groups, places = form_groups([None, window])
        layout = KVLayout(
            groups=groups, block_tokens=BLOCK, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
        )
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=STEP, max_model_len=4000)
        blocks = 1 + 120 * len(groups)
        tiers = TierLimits(host_pages=20_000, spare_pages=blocks, most_storing=200) if below else None
        self.costs, self.tiers = costs, TimedTiers(costs)
        self.engine = SimulatedEngine(
            Scheduler(limits, KVCache(layout, blocks, True, tiers)),
            vocabulary=50,
            tiers=self.tiers if below else None,
        )
        self.first_s: dict[str, float] = {}
        self._busy, self._beside = busy, 0

    def _step(self) -> None:
        if self._busy and f"beside {self._beside}" not in self.engine.unfinished:
            self._beside += 1
            params = SamplingParams(max_tokens=50)
            self.engine.add(Request(request_id=f"beside {self._beside}", prompt_token_ids=[1], params=params))
        plan, tiers, costs = self.engine.plan(self.tiers.now_s), self.tiers, self.costs
        assert plan is not None
        tiers.begin(plan)
        if plan.rows:
            layout = self.engine.scheduler.kv.layout
            seen = sum(pairs(layout, row.start, row.start + row.count) for row in plan.rows)
            tiers.now_s += costs.step_s + plan.token_count * costs.token_s + seen * costs.pair_s
        else:
            tiers.now_s = max(tiers.now_s, min(tiers.due_s[one.copy_id] for one in (*tiers._under_way, *plan.copies)))
        for output in self.engine.execute(tiers.now_s):
            if output.token_ids:
                self.first_s.setdefault(output.request_id, tiers.now_s)

    def ask(self, name: str, prompt: list[int]) -> float:
        """Seconds to its first token."""
        began_s = self.tiers.now_s
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params), began_s)
        while name in self.engine.unfinished:
            self._step()
        return self.first_s[name] - began_s


def asked_again(costs: Costs, seed: int, *, below: bool, busy: bool = False, window: int | None = None) -> list[float]:
    """Seconds to the first token of each prompt that begins like one whose pages have left the pool. Negative: the link
    had not been seen before."""
    world, choice, seconds = World(costs, below=below, busy=busy, window=window), random.Random(seed), list[float]()
    prompts = [[choice.randrange(50) for _ in range(choice.randint(40, LONGEST))] for _ in range(ROUNDS + 4)]
    rate = world.engine.scheduler._fetching.loads[Tier.HOST]
    for number, prompt in enumerate(prompts):
        world.ask(f"first {number}", prompt)
        if number >= 4:
            again = prompts[number - 4][: choice.choice((80, 250, LONGEST))]
            asked = again + [choice.randrange(50) for _ in range(choice.choice((1, 30, 200)))]
            known = rate.per_s is not None
            took_s = world.ask(f"again {number}", asked)
            seconds.append(took_s if known else -took_s)
    return seconds


def both(costs: Costs, seed: int, *, busy: bool = False, window: int | None = None) -> tuple[float, float]:
    """Seconds with pages in RAM and without, of all prompts since the link was first seen."""
    fetched = asked_again(costs, seed, below=True, busy=busy, window=window)
    computed = asked_again(costs, seed, below=False, busy=busy, window=window)
    since = [number for number, took_s in enumerate(fetched) if took_s > 0]
    assert len(since) > ROUNDS // 2
    return sum(fetched[number] for number in since), sum(abs(computed[number]) for number in since)


def drawn(seed: int) -> Costs:
    """From links that are far too slow to those that are far faster than computing."""
    choice = random.Random(seed)
    token_s, step_s = 1e-4, choice.choice((0.0, 1e-3, 2e-2))
    pair_s = token_s / choice.choice((100, 1000, 30_000))
    return Costs(step_s, token_s, pair_s, page_s=BLOCK * token_s * 2 ** choice.uniform(-5, 4))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("seed", [3, 5, 11, *(pytest.param(seed, marks=pytest.mark.long) for seed in (13, 17, 24))])
def test_waiting_for_pages_is_not_slower_than_computing(seed: int, busy: bool) -> None:
    fetched_s, computed_s = both(drawn(seed), seed, busy=busy)
    assert fetched_s <= 1.05 * computed_s


@pytest.mark.parametrize("pair_s", [0.0, 2e-6], ids=["linear", "quadratic"])
def test_what_pays_is_fetched(pair_s: float) -> None:
    """Also where it pays only because attention over a long prompt takes longer than all else."""
    costs = Costs(step_s=1e-3, token_s=1e-4, pair_s=pair_s, page_s=BLOCK * 1e-4 * (0.1 if not pair_s else 2.0))
    fetched_s, computed_s = both(costs, 1)
    assert fetched_s < (0.6 if not pair_s else 0.95) * computed_s


def test_costs_are_found_from_steps_that_differ() -> None:
    planted, cost, choice = (0.02, 1e-4, 1e-8), PrefillCost(2048), random.Random(3)
    assert cost.seconds(PromptWork(1, 100, 100)) is None
    cost.note(PromptWork(1, 2048, 0), 30.0)  # A kernel is compiled.
    for _ in range(100):
        work = PromptWork(1, choice.randint(64, 2048), choice.randint(10_000, 30_000_000))
        exact_s = sum(one * part for one, part in zip(planted, work.parts, strict=True))
        cost.note(work, exact_s * choice.uniform(0.98, 1.02))
    for work in (PromptWork(8, 16_384, 134_225_920), PromptWork(0, 200, 20_000), PromptWork(1, 2048, 2_000_000)):
        exact_s = sum(one * part for one, part in zip(planted, work.parts, strict=True))
        assert cost.seconds(work) == pytest.approx(exact_s, rel=0.05)


@pytest.mark.parametrize("wrong_s", [0.0005, 30.0], ids=["no time", "far too long"])
@pytest.mark.parametrize("at", [0, 1, 20], ids=["first", "second", "later"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked always", "asked at the end"])
def test_a_time_that_is_wrong_does_not_decide(wrong_s: float, at: int, asked: bool) -> None:
    """The host stood still while one step was over, and the next as well."""
    planted, cost, choice = (0.01, 23e-6, 0.7e-9), PrefillCost(8192), random.Random(3)
    whole = PromptWork(2, 16_384, 134_225_920)
    whole_s = sum(one * part for one, part in zip(planted, whole.parts, strict=True))
    for number in range(28):
        work = PromptWork(1, choice.randint(64, 8192), choice.randint(10_000, 30_000_000))
        exact_s = sum(one * part for one, part in zip(planted, work.parts, strict=True))
        cost.note(work, wrong_s if number == at else exact_s * choice.uniform(0.98, 1.02))
        if asked and number > at + 3:
            by_fit_s = cost.seconds(whole)
            assert by_fit_s is not None
            assert 0.6 < by_fit_s / whole_s < 1.6
    assert cost.seconds(whole) == pytest.approx(whole_s, rel=0.15)


@pytest.mark.parametrize("at", [0, 7, 30])
def test_one_small_step_that_took_no_time_does_not_say_what_many_tokens_cost(at: int) -> None:
    """It was seen with the next. Steps of few tokens are all that was seen."""
    cost, whole = PrefillCost(8192), PromptWork(2, 16_384, 134_225_920)
    cost.note_small(0.008)
    for number in range(31):
        tokens = 200 + 17 * number
        cost.note(PromptWork(1, tokens, tokens * (tokens + 1) / 2), 0.001 if number == at else 0.012 + tokens * 30e-6)
    by_pace_s = cost.seconds(whole)
    assert by_pace_s == pytest.approx(16_384 * (0.012 + 710 * 30e-6) / 710, rel=0.2)


def test_steps_that_are_alike_do_not_show_what_a_token_costs() -> None:
    """They may all take as long because weights come over a link, whatever is in them."""
    cost = PrefillCost(2048)
    for _ in range(10):
        cost.note(PromptWork(1, 2048, 2_000_000), 0.3)
    spared, whole = cost.seconds(PromptWork(0, 512, 100_000)), cost.seconds(PromptWork(4, 8192, 30_000_000))
    assert spared is not None
    assert whole is not None
    assert spared < 0.01
    assert whole == pytest.approx(1.2, rel=0.05)


def test_a_step_in_which_hardly_anything_is_bounds_what_steps_cost() -> None:
    """What steps that are alike take beyond that is their tokens'."""
    cost = PrefillCost(8192)
    for _ in range(10):
        cost.note(PromptWork(1, 8192, 8_000_000), 0.2)
    cost.note_small(0.01)
    spared, whole = cost.seconds(PromptWork(0, 2048, 2_000_000)), cost.seconds(PromptWork(4, 32_768, 32_000_000))
    assert spared == pytest.approx(0.19 / 4, rel=0.02)
    assert whole == pytest.approx(0.8, rel=0.02)
    cost.note_small(0.3)  # It bounds nothing: the steps' own may be all that they took.
    assert cost.seconds(PromptWork(0, 2048, 2_000_000)) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("small_s", [0.02, 0.025])
def test_of_few_tokens_nobody_concludes_that_many_cost_nothing(small_s: float) -> None:
    """A step of 64 takes what one of a single token does, as long as it waits for weights. After a start that is all
    that was seen."""
    cost, whole = PrefillCost(8192), PromptWork(2, 16_384, 134_225_920)
    cost.note(PromptWork(1, 64, 2080), 0.022)
    cost.note_small(small_s)
    assert cost.seconds(PromptWork(1, 64, 2080)) == pytest.approx(0.022, rel=0.02)
    by_pace_s = cost.seconds(whole)
    assert by_pace_s == pytest.approx(16_384 * 0.022 / 64, rel=0.01)
    cost.note(PromptWork(1, 8192, 33_558_528), 2.1)
    assert cost.seconds(whole) == pytest.approx(5.4, rel=0.3), "4.2, and as much more as tokens see"


def test_pairs_are_counted_as_layers_see_them() -> None:
    groups, places = form_groups([None, 5])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    for start, end in ((0, 1), (0, 12), (3, 20), (7, 7)):
        seen = sum(position + 1 + min(position + 1, 5) for position in range(start, end))
        assert pairs(layout, start, end) == seen / 2
