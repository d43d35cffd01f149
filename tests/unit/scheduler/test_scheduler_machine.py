"""Pool, prefix index and scheduler together, driven at random, over a runner that proves what every row reads."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_engine import NO_MEMORY, NOT_FINITE, FakeStore, SimulatedEngine, SimulatedTiers

from holdfast.kvcache import KVCache, KVLayout, TierLimits, form_groups
from holdfast.records import Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

VOCABULARY = 40
EOS = 7
WINDOWS = [
    [None, None],
    [5, 5],
    [1],
    [None, 6, 6],
    [None, 3, 9, 9],
    [None, None, 12],
]


class SchedulerMachine(RuleBasedStateMachine):
    engine: SimulatedEngine
    requests = 0

    @initialize(
        windows=st.sampled_from(WINDOWS),
        block_tokens=st.sampled_from([1, 2, 3, 4, 8]),
        blocks=st.integers(8, 60),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.integers(0, 24),
        max_model_len=st.integers(4, 64),
        policy=st.sampled_from(["fcfs", "priority"]),
        steps_in_flight=st.sampled_from([1, 2]),
        stages=st.sampled_from([0, 0, 2, 3]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        beside=st.sampled_from([None, None, 1, 7]),
        host_pages=st.sampled_from([0, 0, 3, 30]),
        disk=st.booleans(),
        seed=st.integers(0, 1 << 16),
    )
    def build(
        self,
        windows,
        block_tokens,
        blocks,
        max_num_seqs,
        extra_tokens,
        max_model_len,
        policy,
        steps_in_flight,
        stages,
        prefix_caching,
        beside,
        host_pages,
        disk,
        seed,
    ):
        groups, places = form_groups(windows)
        layout = KVLayout(
            groups=groups, block_tokens=block_tokens, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
        )
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=max_model_len,
            policy=policy,
            max_steps_in_flight=stages or steps_in_flight,
            apart=stages > 0,
            prompt_tokens_beside=beside,
        )
        choice = random.Random(seed)
        store = FakeStore(choice, late=choice.choice([0.0, 0.7])) if disk else None
        spare = choice.choice([(12, 0), (2, 3)])
        below = TierLimits(
            host_pages=host_pages, most_loading=5, most_loading_disk=2, most_storing=4, spare_pages=spare[0],
            saves_ahead=spare[1], stores_a_plan=choice.choice([1, 3, 1024]), loads_a_plan=choice.choice([1, 256]),
        )  # fmt: skip
        kv = KVCache(layout, blocks, prefix_caching, below if host_pages or disk else None, store)
        tiers = SimulatedTiers(choice, store) if host_pages or disk else None
        self.engine = SimulatedEngine(Scheduler(limits, kv), vocabulary=VOCABULARY, tiers=tiers)

    @rule(
        prefix=st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8] * 3, [1, 2, 3, 4] * 2 + [9] * 12]),
        prefix_length=st.integers(0, 24),
        own=st.lists(st.integers(0, 3), max_size=12),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([None, None, [3], [EOS, 11]]),
        eos=st.sampled_from([(), (EOS,), (EOS, 12)]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "other"]),
        arrival_s=st.sampled_from([0.0, 1.0, 2.0]),
        resumed=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        scored=st.sampled_from([None, None, 0]),
        told=st.sampled_from([0, 0, 1, 5]),
    )
    def add(
        self,
        prefix,
        prefix_length,
        own,
        max_tokens,
        min_tokens,
        stops,
        eos,
        priority,
        salt,
        arrival_s,
        resumed,
        scored,
        told,
    ):
        self.requests += 1
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stops,
            prompt_logprobs=scored,
        )
        length = len(prefix[:prefix_length] + own)
        again = self.requests % 4 == 0
        self.engine.add(
            Request(
                request_id=str(self.requests),
                prompt_token_ids=prefix[:prefix_length] + own,
                params=params,
                eos_token_ids=eos,
                priority=priority,
                cache_salt=salt,
                arrival_s=arrival_s,
                output_token_ids=resumed if again else [],
                prompt_logprobs_sent=max(0, length - 1 if resumed else min(told, length - 1)) if again else 0,
            )
        )

    @precondition(lambda self: self.engine.can_plan)
    @rule()
    def plan(self):
        self.engine.plan()

    @precondition(lambda self: self.engine.plans_in_flight)
    @rule()
    def execute(self):
        self.engine.execute()

    @precondition(lambda self: self.engine.plans_in_flight)
    @rule(row=st.integers(0, 5), failure=st.sampled_from([NO_MEMORY, NOT_FINITE]))
    def fail(self, row, failure):
        """One request ends, and everybody else's answer is what it would have been."""
        outputs = self.engine.execute(failing_row=row, failure=failure)
        failed = [output for output in outputs if output.failure is not None]
        assert len(failed) <= 1

    @rule(steps=st.integers(1, 12))
    def run(self, steps):
        """A stretch as the engine's loop would do it."""
        for _ in range(steps):
            while self.engine.can_plan and self.engine.plan() is not None:
                self.engine.scheduler.check_invariants()
            if not self.engine.plans_in_flight:
                return
            self.engine.execute()
            self.engine.scheduler.check_invariants()

    @precondition(lambda self: self.engine.unfinished)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice):
        unfinished = list(self.engine.unfinished)
        self.engine.abort(unfinished[choice % len(unfinished)])

    @rule(more=st.integers(0, 50), saves=st.sampled_from([0, 1, 3]))
    def resize(self, more, saves):
        """Pages come and go while answers go on; what lay in those that go is read where it was moved to, or, of those
        who are sent back, in RAM."""
        self.engine.resize(self.engine.scheduler.least_blocks + more, saves)

    @rule()
    def reset(self):
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def adds_up(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.finish()
            self.engine.scheduler.check_invariants()
            assert self.engine.scheduler.kv.blocks_used == 0
            assert not self.engine.scheduler.has_unfinished


class LongSchedulerMachine(SchedulerMachine):
    pass


def test_tables_name_no_page_that_left_a_window_and_is_gone() -> None:
    """Nothing has to be moved: what lay in the pages that go was given back before. Runners' tables still name them."""
    groups, places = form_groups([4])
    layout = KVLayout(groups=groups, block_tokens=2, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=40)
    engine = SimulatedEngine(Scheduler(limits, KVCache(layout, 30, prefix_caching=False)), vocabulary=VOCABULARY)
    for name, tokens in (("holds the first pages, and ends", 1), ("goes on", 25)):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=[1, 2, 3], params=params))
    for _ in range(12):
        engine.plan()
        engine.execute()
    (goes_on,) = engine.scheduler._running
    assert max(goes_on.book.tables[0]) < engine.scheduler.least_blocks < 30
    engine.runner._slots[goes_on.slot].tables[0][0] = 29  # As if the first of its pages had been the last one then.
    engine.resize(engine.scheduler.least_blocks)
    engine.finish()


QUICK = settings(
    max_examples=examples(120),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = QUICK
TestSchedulerMachineForLong = pytest.mark.timeout(3600)(pytest.mark.long(LongSchedulerMachine.TestCase))
TestSchedulerMachineForLong.settings = settings(QUICK, max_examples=2000)
