"""A KV pool that gives memory up while nobody asks or others need it, over a real scheduler and a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.core.breathing import AGAIN_S, SAVE_S, Breathing
from holdfast.engine.core.kv_balance import KVBalance
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.neighbours import DeviceSample, Neighbours
from holdfast.engine.core.pool_resizes import PREPARE_S
from holdfast.engine.offline.unsupported import refuse_breathing
from holdfast.engine.process.stats import continued
from holdfast.errors import EngineError, UnsupportedOptionError
from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.records import PoolChange, Request, SamplingParams, StepPlan, StepResult, VramBudget, VramGrant
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.scheduler.prefill_cost import PromptWork
from holdfast.units import MIB

BLOCKS, LEAST = 41, 6
PAGE = 32 * MIB


class FakeDevice:
    """Memory of a device in pages, of which a neighbour holds some, and a runner that computes nothing."""

    def __init__(self, total: int = 60, host_pages: int = 0) -> None:
        self.total, self.neighbour, self.blocks, self.most_blocks = total, 0, BLOCKS, 50
        self.layers = 0
        self.host_pages, self.stored, self.computed = host_pages, 0, 0
        self.fail = False

    # The runner.

    def resize_kv(self, blocks: int) -> None:
        if self.fail or blocks + self.layers + self.neighbour > self.total:
            raise EngineError("the device has no memory")
        self.blocks = blocks

    def submit(self, plan: StepPlan, masks: object = None) -> SimpleNamespace:
        copies = [copy.copy_id for copy in plan.copies if not copy.before_step]
        self.stored += len(copies)
        self.computed += plan.token_count
        tokens = [7 for row in plan.rows if row.samples]
        result = StepResult(step_id=plan.step_id, token_ids=tokens, finished_copies=copies, host_pages=self.host_pages)
        return SimpleNamespace(late=(), result=lambda: result)

    def give_up_reads(self) -> list[int]:
        return []

    # Of its memory.

    @property
    def pool_bytes(self) -> int:
        return self.blocks * PAGE

    def blocks_of(self, pool_bytes: int) -> int:
        return pool_bytes // PAGE

    def blocks_within_free(self, margin_bytes: int) -> int:
        return self.total - self.layers - self.neighbour - margin_bytes // PAGE

    def full_blocks(self, blocks: int) -> int:
        return blocks

    def budget_was_set(self) -> None: ...

    def budget_with_pool(self) -> None: ...

    def take(self) -> DeviceSample:
        own = self.blocks + self.layers
        return DeviceSample(self.total * PAGE, (self.total - own - self.neighbour) * PAGE, own * PAGE)

    def close(self) -> None: ...


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("holdfast.engine.core.loop.time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make(device: FakeDevice, *, idle_s: float | None = None, watches: bool = False) -> EngineCore:
    groups, places = form_groups((None,))
    layout = KVLayout(
        groups=groups, block_tokens=16, layers_per_page=places, kv_heads=1, head_dim=PAGE // 128, element_bytes=4
    )
    assert layout.page_bytes == PAGE
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=80, max_model_len=80)
    tiers = TierLimits(host_pages=device.host_pages, spare_pages=0) if device.host_pages else None
    scheduler = Scheduler(limits, KVCache(layout, BLOCKS, True, tiers))
    breathing = Breathing(
        device,
        idle_release_s=idle_s,
        neighbours=Neighbours(PAGE) if watches else None,
        watch=device if watches else None,  # type: ignore[arg-type]
    )
    core = EngineCore(scheduler, device, breathing=breathing)  # type: ignore[arg-type]
    assert core.scheduler.least_blocks == LEAST
    return core


def ask(core: EngineCore, name: str, first: int, tokens: int = 64) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    core.add(Request(request_id=name, prompt_token_ids=list(range(first, first + tokens)), params=params))


def run(core: EngineCore) -> list[object]:
    found = list[object]()
    while core.scheduler.has_unfinished or core._undelivered:
        found += core.step()
    return found


def cached(core: EngineCore, name: str, first: int) -> int:
    ask(core, name, first)
    return max(output.cached_tokens for output in run(core))


def test_an_idle_pool_is_given_back_and_taken_when_somebody_asks(clock: Clock) -> None:
    device = FakeDevice()
    core = make(device, idle_s=5.0)
    ask(core, "first", 0)
    run(core)
    core.breathe()
    clock.now_s += 4.9
    core.breathe()
    assert (device.blocks, core.pop_breathed()) == (BLOCKS, None)
    clock.now_s += 0.2
    core.breathe()
    assert (device.blocks, core.scheduler.kv.blocks_total) == (LEAST, LEAST - 1)
    change = core.pop_breathed()
    assert change == PoolChange(blocks=LEAST, kv_bytes=LEAST * PAGE, reason="no request for 5 s", lowered=True)
    clock.now_s += 100
    core.breathe()
    assert core.pop_breathed() is None
    ask(core, "next", 1000)
    run(core)
    assert device.blocks == BLOCKS
    taken = core.pop_breathed()
    assert taken is not None
    assert (taken.blocks, taken.lowered) == (BLOCKS, False)


def test_layers_do_not_leave_for_a_pool_that_was_only_given_back(clock: Clock) -> None:
    """What it gave up is free: it is taken again before anybody looks whether more pages are wanted."""

    class Layers:
        base_blocks = BLOCKS

        def __init__(self) -> None:
            self.asked = list[int]()

        def make_room(self, blocks: int, least_blocks: int, resize_kv: object) -> None:
            self.asked.append(blocks)

        def take_back(self, least_blocks: int, resize_kv: object) -> None:
            self.asked.append(0)

    layers, core = Layers(), make(FakeDevice(), idle_s=5.0)
    core._kv_balance = KVBalance(layers)
    core.breathe()
    clock.now_s += 5.1
    for _ in range(100):
        core.breathe()
        core.balance_kv()
        clock.now_s += 1.0
    assert core.scheduler.kv.blocks_total == LEAST - 1
    for number in range(4):
        ask(core, str(number), 1000 * number)
    run(core)
    assert layers.asked == []


def test_prefixes_are_saved_for_sleep_by_a_pool_that_does_not_shrink_meanwhile(clock: Clock) -> None:
    device = FakeDevice(host_pages=60)
    core = make(device, idle_s=5.0)
    for number in range(4):
        ask(core, str(number), 1000 * number)
    run(core)
    assert core.scheduler.kv.tiers is not None
    core.scheduler.kv.tiers.limits = TierLimits(spare_pages=0, most_storing=2)
    core.breathe()
    clock.now_s += 6.0
    core.save_prefixes(60.0, lambda: None)
    assert len(core.scheduler.kv.tiers.host) == device.stored == 4 * 4
    assert device.blocks == BLOCKS


def test_what_was_seen_before_the_pool_shrank_does_not_shrink_it_once_more(clock: Clock) -> None:
    device, samples = FakeDevice(host_pages=60), list[DeviceSample]()
    core = make(device, watches=True)
    assert core.breathing is not None
    watch = SimpleNamespace(take=lambda: samples.pop() if samples else None, close=lambda: None)
    core.breathing._watch = watch  # type: ignore[assignment]
    samples.append(device.take())
    core.breathe()
    device.neighbour = device.total - device.blocks
    samples.append(device.take())
    core.breathe()
    assert core.breathing.saving
    samples.append(DeviceSample(device.total * PAGE, 0, (device.blocks - 4) * PAGE))  # It goes on growing meanwhile.
    clock.now_s += SAVE_S + 0.1
    core.breathe()
    after = device.blocks
    assert after < BLOCKS
    core.breathe()
    assert (device.blocks, core.breathing.saving) == (after, False)


def test_a_step_that_fails_while_the_pool_grows_is_not_taken_for_a_lack_of_memory(clock: Clock) -> None:
    """All requests were dropped with it: whoever waits for an answer would wait for ever."""
    device = FakeDevice()
    core = make(device, idle_s=5.0)
    core.breathe()
    clock.now_s += 6.0
    core.breathe()
    assert device.blocks == LEAST
    ask(core, "first", 0)

    def fail() -> StepResult:
        raise EngineError("the device is gone")

    core._in_flight.append(SimpleNamespace(late=(), result=fail))
    with pytest.raises(EngineError, match="gone"):
        core.step()


def test_the_log_has_the_size_of_the_pool_and_what_of_it_is_held(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they differ: memory is taken when it is first written."""
    monkeypatch.setattr(FakeDevice, "pool_bytes", 2 * PAGE)
    core = make(FakeDevice(), idle_s=5.0)
    core.breathe()
    clock.now_s += 6
    with caplog.at_level("INFO", logger="holdfast"):
        core.breathe()
    assert "KV pool: 192.00 MiB instead of 1.28 GiB; 64.00 MiB held, 64.00 MiB before: no request" in caplog.text


def test_what_a_neighbour_took_meanwhile_is_done_without_and_said(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    core = make(device, idle_s=5.0)
    core.breathe()
    clock.now_s += 6
    core.breathe()
    device.neighbour = 40
    ask(core, "next", 0)
    assert run(core)
    assert device.blocks == 20
    assert "others have taken the rest" in caplog.text
    # While there are requests, it is tried again, not in every step.
    device.neighbour = 0
    ask(core, "more", 500)
    core.step()
    assert device.blocks == 20
    clock.now_s += AGAIN_S + 0.1
    core.step()
    assert device.blocks == BLOCKS
    run(core)


class InPieces(FakeDevice):
    """As a GPU's driver gives memory: in pieces of two pages."""

    @property
    def pool_bytes(self) -> int:
        return -(-self.blocks // 2) * 2 * PAGE

    def blocks_of(self, pool_bytes: int) -> int:
        return pool_bytes // (2 * PAGE) * 2


def test_a_pool_that_gave_way_is_as_large_again_as_it_was_though_that_is_no_whole_piece(clock: Clock) -> None:
    device = InPieces()
    core = make(device, watches=True)
    core.breathe()
    device.neighbour = device.total - device.blocks
    core.breathe()
    assert device.blocks < BLOCKS
    device.neighbour = 0
    for _ in range(15):
        clock.now_s += 1.0
        core.breathe()
    assert device.blocks == BLOCKS


def test_memory_that_is_gone_when_it_is_taken_ends_nobody(clock: Clock) -> None:
    device = FakeDevice()
    core = make(device, idle_s=5.0)
    core.breathe()
    clock.now_s += 6
    core.breathe()
    device.fail = True
    ask(core, "next", 0)
    assert run(core)
    assert device.blocks == LEAST


@pytest.mark.parametrize("refused", [False, True], ids=["by itself", "a resize is refused meanwhile"])
def test_prefixes_go_to_ram_before_the_pool_shrinks(clock: Clock, refused: bool) -> None:
    device = FakeDevice(host_pages=60)
    core = make(device, idle_s=5.0)
    for number in range(6):
        ask(core, str(number), 1000 * number)
        run(core)
    device.stored = 0
    core.breathe()
    clock.now_s += 6
    core.breathe()
    assert core.has_work, "pages are to be saved"
    if refused:
        core.prepare_resize(LEAST + 4)
        core.prepare_resize(BLOCKS + 2)  # Ends what the one before prepared; there is no room for that either.
        core.breathe()
        assert device.blocks == BLOCKS, "steps would stand still until all is saved"
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
        assert steps < 50
    assert device.blocks == LEAST
    assert device.stored >= 24 - LEAST
    core.scheduler.kv.check_invariants()
    for number in range(6):
        assert cached(core, f"again {number}", 1000 * number) == 48, "none was lost"


def test_a_request_that_comes_while_pages_are_saved_keeps_the_pool(clock: Clock) -> None:
    device = FakeDevice(host_pages=60)
    core = make(device, idle_s=5.0)
    ask(core, "first", 0)
    run(core)
    core.breathe()
    clock.now_s += 6
    core.breathe()
    assert core.has_work
    ask(core, "next", 500)
    run(core)
    assert device.blocks == BLOCKS
    assert core.scheduler.kv.tiers is not None
    assert core.scheduler.kv.tiers.spare_wanted == 0


def test_a_budget_that_was_set_is_what_is_full_from_then_on(clock: Clock) -> None:
    device = FakeDevice()
    core = make(device, idle_s=5.0)
    core.breathe()
    clock.now_s += 6
    core.breathe()
    assert device.blocks == LEAST
    core.set_pool(20)
    core.breathe()
    clock.now_s += 6
    core.breathe()
    assert device.blocks == LEAST
    ask(core, "next", 0)
    run(core)
    assert device.blocks == 20


def test_the_pool_gives_way_to_a_neighbour_while_answers_go_on_and_grows_when_it_left(clock: Clock) -> None:
    device = FakeDevice(total=60)
    core = make(device, watches=True)
    ask(core, "first", 0)
    core.step()
    assert device.blocks == BLOCKS
    device.neighbour = 17  # Of the 19 that were free; the margin is three.
    clock.now_s += 1
    core.step()
    assert device.blocks == 60 - 17 - 2 * 3 - 17
    change = core.pop_breathed()
    assert change is not None
    assert "others hold" in change.reason
    run(core)
    device.neighbour = 0
    for _ in range(12):
        clock.now_s += 1
        core.breathe()
    assert device.blocks == BLOCKS
    change = core.pop_breathed()
    assert change is not None
    assert not change.lowered


def test_an_idle_pool_that_gave_way_does_not_swing_and_is_taken_back_with_the_next_request(clock: Clock) -> None:
    device = FakeDevice(total=60)
    core = make(device, idle_s=5.0, watches=True)
    ask(core, "first", 0)
    run(core)
    core.breathe()
    for _ in range(4):
        device.neighbour = 60 - device.blocks  # All that is free, as often as it becomes more.
        breathe_for(core, clock, 1)
    assert device.blocks == LEAST
    breathe_for(core, clock, 6)
    device.neighbour = 0
    core.pop_breathed()
    breathe_for(core, clock, 60)
    assert (device.blocks, core.pop_breathed()) == (LEAST, None), "nobody asks"
    ask(core, "next", 1000)
    core.step()
    assert device.blocks == BLOCKS, "at once, and not when the neighbour has been away for long"


class Layers:
    """Beside the pool, of a page each: a budget of a GPU over both, as an arbiter has it. What was set is a little more
    than whole pages."""

    def __init__(self, device: FakeDevice, most: int) -> None:
        self.device, self.most, device.layers = device, most, most
        self.most_budget_bytes = (most + BLOCKS) * PAGE + 3 * MIB

    @property
    def count(self) -> int:
        return self.device.layers

    @property
    def kept_bytes(self) -> int:
        return (self.count + self.device.blocks) * PAGE

    def own_bytes(self) -> int:
        return self.kept_bytes

    def blocks_with(self, asked: VramBudget, least_blocks: int) -> int:
        wanted = BLOCKS if asked.kv_bytes is None else min(BLOCKS, asked.kv_bytes // PAGE)
        return max(least_blocks, min(wanted, asked.budget_bytes // PAGE))

    def count_with(self, asked: VramBudget, least_blocks: int) -> int:
        return min(self.most, max(0, asked.budget_bytes // PAGE - self.blocks_with(asked, least_blocks)))

    def moves(self, asked: VramBudget, least_blocks: int) -> bool:
        blocks, count = self.blocks_with(asked, least_blocks), self.count_with(asked, least_blocks)
        return (blocks, count) != (self.device.blocks, self.count)

    def granted(self) -> VramGrant:
        return VramGrant(budget_bytes=self.kept_bytes, blocks=self.device.blocks, kv_bytes=self.device.pool_bytes)

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        blocks = self.blocks_with(asked, least_blocks)
        self.device.layers = self.count_with(asked, least_blocks)
        resize_kv(blocks)
        return self.granted()


def beside_layers(device: FakeDevice, idle_s: float | None = None) -> tuple[EngineCore, Layers]:
    core, layers = make(device, idle_s=idle_s, watches=True), Layers(device, 10)
    assert core.breathing is not None
    core.breathing._budget = core._vram = layers
    core.breathe()
    return core, layers


def breathe_for(core: EngineCore, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now_s += 1.0
        core.breathe()


def test_layers_come_back_at_once_from_a_neighbour_that_comes_once_an_hour(clock: Clock) -> None:
    device = FakeDevice(total=70)
    core, layers = beside_layers(device)
    for _ in range(4):
        device.neighbour = 17
        breathe_for(core, clock, 1)
        assert layers.count == 0
        device.neighbour = 0
        breathe_for(core, clock, 12)
        assert (layers.count, device.blocks) == (10, BLOCKS)
        clock.now_s += 3600
        breathe_for(core, clock, 30)


@pytest.mark.parametrize("layers", [True, False])
def test_what_was_given_comes_back_later_each_time_from_one_that_comes_again_at_once(
    clock: Clock, layers: bool
) -> None:
    device = FakeDevice(total=70 if layers else 60)
    core = beside_layers(device)[0] if layers else make(device, watches=True)
    core.breathe()
    for least_s in (10, 20, 40):
        device.neighbour = 17
        breathe_for(core, clock, 1)
        device.neighbour = 0
        breathe_for(core, clock, least_s)
        assert device.blocks < BLOCKS
        breathe_for(core, clock, 2)
        assert device.blocks == BLOCKS


def test_no_layers_leave_for_a_pool_that_was_given_up_while_nobody_asked(clock: Clock) -> None:
    device = FakeDevice(total=70)
    core, layers = beside_layers(device, idle_s=5.0)
    breathe_for(core, clock, 6)
    assert (layers.count, device.blocks) == (10, LEAST)
    device.neighbour = 49  # Of what the pool had, and less than makes anybody give way.
    breathe_for(core, clock, 1)
    device.neighbour = 51
    breathe_for(core, clock, 3)
    assert (layers.count, device.blocks) == (4, LEAST), "no more than twice the margin, and what it took"
    assert core.breathing is not None
    assert core.breathing.released
    device.neighbour = 0
    ask(core, "next", 0)
    run(core)
    assert device.blocks == BLOCKS, "as large as it was"
    breathe_for(core, clock, 4)
    assert device.blocks == BLOCKS


def test_beside_layers_the_whole_budget_gives_way_while_answers_go_on(clock: Clock) -> None:
    device = FakeDevice(total=70)
    core, layers = beside_layers(device)
    ask(core, "first", 0)
    core.step()
    device.neighbour = 17
    clock.now_s += 1
    core.step()
    change = core.pop_breathed()
    assert change is not None
    assert change.granted is not None
    assert (layers.count, change.blocks) == (0, device.blocks)
    assert change.budget_bytes == layers.kept_bytes < layers.most_budget_bytes
    assert change.lowered
    run(core)
    core.scheduler.kv.check_invariants()


def test_a_neighbour_does_not_wait_for_ram_that_takes_its_time(clock: Clock) -> None:
    device = FakeDevice(total=45, host_pages=60)
    core = make(device, watches=True)
    for number in range(6):
        ask(core, str(number), 1000 * number)
        run(core)
    device.neighbour = 3
    core.breathe()
    assert device.blocks == BLOCKS
    clock.now_s += SAVE_S + 0.1
    core.breathe()
    assert device.blocks < BLOCKS
    core.scheduler.kv.check_invariants()


def four_running(device: FakeDevice) -> EngineCore:
    """Answers with 4 full pages each and one that is not, half of the pool."""
    core = make(device, watches=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for number in range(4):
        prompt = list(range(1000 * number, 1000 * number + 64))
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while core.scheduler.stats().running < 4 or core.scheduler.kv.blocks_used < 20:
        core.step()
    return core


def test_all_who_are_sent_back_by_a_smaller_budget_are_saved_first(clock: Clock) -> None:
    device = FakeDevice(host_pages=60)
    core = four_running(device)
    assert device.stored == 0
    before = device.computed
    core.set_pool(LEAST)
    assert device.stored >= 3 * 4, "three of four had to go"
    run(core)
    assert core.scheduler.stats().preemptions_total >= 3
    assert device.computed - before < 4 * 12 + 3 * 16, "no more than what is not a full page"
    core.scheduler.kv.check_invariants()


def test_all_who_are_sent_back_for_a_neighbour_are_saved_beside_steps(clock: Clock) -> None:
    device = FakeDevice(total=75, host_pages=60)
    core = four_running(device)
    device.neighbour = 34
    clock.now_s += 1
    for _ in range(6):
        core.step()
        if device.blocks < BLOCKS:
            break
    assert device.blocks == LEAST
    assert core.scheduler.stats().preemptions_total == 3
    before = device.computed
    run(core)
    assert device.computed - before < 4 * 12 + 3 * 16


def test_a_smaller_budget_is_prepared_beside_steps_and_then_stands_still_for_nothing_but_moving(clock: Clock) -> None:
    device = FakeDevice(host_pages=60)
    core = four_running(device)
    assert core.scheduler.kv.tiers is not None
    core.scheduler.kv.tiers.limits = TierLimits(spare_pages=0, most_storing=3)
    core.prepare_resize(LEAST)
    answered = list[str]()
    while not core.may_resize:
        answered += [output.request_id for output in core.step() if output.token_ids]
    assert set(answered) == {"0", "1", "2", "3"}, "answers go on meanwhile"
    assert device.blocks == BLOCKS
    saved, steps = device.stored, core.scheduler.stats().steps_total
    assert saved >= 3 * 4, "three of four will have to go"
    core.set_pool(LEAST)
    assert device.stored - saved <= 3
    assert core.scheduler.stats().steps_total - steps <= 3, "pages that became full meanwhile, and the move"
    assert not core._resizes.preparing
    before = device.computed
    run(core)
    assert device.computed - before < 4 * 12 + 3 * 16
    core.scheduler.kv.check_invariants()


def test_whoever_asks_for_memory_does_not_wait_for_ram_that_takes_its_time(clock: Clock) -> None:
    device = FakeDevice(host_pages=60)
    core = four_running(device)
    core.prepare_resize(LEAST)
    assert core.has_work
    assert not core.may_resize
    clock.now_s += PREPARE_S
    assert core.may_resize
    core.prepare_resize(BLOCKS + 2)
    assert core.may_resize, "of a larger one nothing is saved first"
    assert core.scheduler.kv.tiers is not None
    assert core.scheduler.kv.tiers.spare_wanted == 0
    run(core)


def test_how_long_steps_stand_still_is_told_without_the_steps_in_flight(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(total=60)
    core = make(device, watches=True)
    ask(core, "first", 0)
    core.step()
    step, resize = core._in_flight, device.resize_kv

    def slowly(blocks: int) -> None:
        clock.now_s += 0.03
        resize(blocks)

    def late() -> StepResult:
        clock.now_s += 0.4
        return StepResult(step_id=plan.step_id, token_ids=[7], finished_copies=[])

    device.resize_kv = slowly  # type: ignore[method-assign]
    plan = core.scheduler.schedule(clock.now_s)
    assert plan is not None
    step.append(SimpleNamespace(late=(), result=late))  # type: ignore[arg-type]
    device.neighbour = 17
    clock.now_s += 1
    with caplog.at_level("INFO", logger="holdfast"):
        core.breathe()
    change = core.pop_breathed()
    assert change is not None
    assert change.stood_still_s == pytest.approx(0.03)
    assert "steps stood still for 30 ms (steps in flight 400 ms" in caplog.text
    core.set_pool(30)
    assert core.stood_still_s == pytest.approx(0.03)
    stats = core.stats()
    assert (stats.pool_resizes_total, stats.stood_still_s_total) == (2, pytest.approx(0.06))
    again = continued(stats, core.stats())
    assert (again.pool_resizes_total, again.stood_still_s_total) == (4, pytest.approx(0.12))


def test_who_is_computed_sooner_than_copied_is_not_saved(clock: Clock) -> None:
    core = four_running(FakeDevice(host_pages=60))
    while core._in_flight:
        core._undelivered += core._apply_oldest()
    fetching = core.scheduler._fetching
    fetching.loads[Tier.HOST].note(PAGE, 10.0)
    fetching.prefill.note(PromptWork(1, 1_000_000, 1_000_000), 1.0)
    tiers = core.scheduler.kv.tiers
    assert tiers is not None
    tiers.spare_wanted = 5
    saving = core.scheduler.save_before(LEAST)
    assert saving is not None
    assert tiers.spare_wanted == 5, "as whoever breathes has left it"
    assert len(saving.copies) == 2 * 4, "those who might go any moment"


def test_one_sequence_of_full_length_always_stays(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(total=45)
    core = make(device, watches=True)
    core.breathe()
    for held in (4, 20, 39, 40):
        device.neighbour = min(held, 45 - device.blocks)
        clock.now_s += 1
        core.breathe()
    assert device.blocks >= LEAST
    ask(core, "longest", 0, tokens=77)
    assert run(core)


def test_llm_has_nobody_who_could_do_it() -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        refuse_breathing(EngineConfig.from_arguments(device="cpu", idle_release=5))
    assert caught.value.field == "idle_release"
    refuse_breathing(EngineConfig.from_arguments(device="cpu", idle_release=0))
