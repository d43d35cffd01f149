"""A neighbour that takes VRAM beside layers, or experts, that come and go: they give way and come back with the KV
pool, as with a budget that somebody asks for. Over the real arbiter, ranges and layers of a simulated GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from simulated_vram import LAYERS, LEAST_BLOCKS, PAGE, STREAMED, ExpertGpu, Gpu

from holdfast.engine.core import neighbours
from holdfast.engine.core.breathing import Breathing, Ways
from holdfast.engine.core.neighbours import GONE_S, DeviceSample, Neighbours
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.records import PoolChange, VramBudget

TOTAL, MARGIN = 1000 * PAGE, 50 * PAGE


class Shared:
    """Looks once a second, and never holds more than it has said."""

    def __init__(self, gpu: Gpu, **settings: object) -> None:
        self.gpu, self.neighbour, self.now_s, self.changes, self.idle = gpu, 0, 0.0, 0, False
        gpu.arbiter.most_budget_bytes = gpu.budget
        self.breathing = Breathing(
            gpu.arbiter,  # type: ignore[arg-type]
            neighbours=Neighbours(PAGE),
            watch=SimpleNamespace(take=self._sample, close=lambda: None),  # type: ignore[arg-type]
            budget=gpu.arbiter,  # type: ignore[arg-type]
            **settings,  # type: ignore[arg-type]
        )

    def _sample(self) -> DeviceSample:
        self.gpu.total = TOTAL - self.neighbour
        own = self.gpu.held_bytes()
        return DeviceSample(TOTAL, self.gpu.total - own, own)

    def look(self, seconds: int = 1) -> PoolChange | None:
        """The last change in so many of them."""
        found = None
        for _ in range(seconds):
            self.now_s += 1.0
            kv = SimpleNamespace(
                blocks_total=self.gpu.kv.blocks - 1, layout=SimpleNamespace(page_bytes=PAGE), tiers=None
            )
            scheduler = SimpleNamespace(kv=kv, least_blocks=LEAST_BLOCKS)
            ways = Ways(self._resize, self._set_budget)
            change = self.breathing.look(scheduler, self.now_s, idle=self.idle, ways=ways)  # type: ignore[arg-type]
            if change is not None:
                found, self.changes = change, self.changes + 1
            assert self.gpu.held_bytes() + self.neighbour <= TOTAL
        return found

    def _resize(self, blocks: int) -> None:
        self.gpu.resize_kv(blocks)

    def _set_budget(self, asked: VramBudget) -> HoldfastError | None:
        self.gpu.most_own, before = 0, self.gpu.arbiter.budget_bytes
        try:
            granted = self.gpu.arbiter.change(asked, LEAST_BLOCKS, self.gpu.resize_kv)
        except DoesNotFitError as error:
            return error
        assert max(self.gpu.most_own, self.gpu.held_bytes()) <= max(before, granted.budget_bytes)
        return None

    def leave_free(self, nbytes: int) -> None:
        """The neighbour takes all but this."""
        self.neighbour = TOTAL - self.gpu.held_bytes() - nbytes


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NOISE_BYTES", PAGE)


def near(gpu: Gpu, nbytes: int) -> None:
    """So that this much more, taken at once, is more than is free with the margin."""
    gpu.total = gpu.held_bytes() + nbytes


def test_layers_leave_for_a_neighbour_before_kv_that_is_wanted_and_come_back() -> None:
    gpu = Gpu()
    shared, whole = Shared(gpu), gpu.driver.whole(gpu.size)
    shared.neighbour = TOTAL - gpu.budget - MARGIN
    assert shared.look() is None
    shared.neighbour += 3 * PAGE
    change = shared.look()
    assert change is not None
    assert change.granted is not None
    needed = 2 * MARGIN + 3 * PAGE - (MARGIN - 3 * PAGE)
    assert gpu.held_bytes() <= gpu.budget - needed == change.budget_bytes
    streamed = len(gpu.layers.streamed)
    assert STREAMED < streamed <= STREAMED + -(-needed // whole) + 1
    assert change.granted.layers is not None
    assert change.granted.layers.streamed == gpu.layers.streamed
    assert gpu.kv.nbytes >= 0.97 * 40 * PAGE, "layers go before KV that is wanted"
    assert (change.lowered, "others hold" in change.reason) == (True, True)
    assert shared.look(20) is None, "it is still there"
    # It goes on taking, until nothing is left to give.
    for _ in range(6):
        shared.leave_free(0)
        shared.look()
    assert len(gpu.layers.streamed) == LAYERS
    assert LEAST_BLOCKS <= gpu.kv.blocks <= LEAST_BLOCKS + 1, "but for a whole piece of memory"
    # It leaves.
    shared.neighbour = 0
    assert shared.look(int(GONE_S)) is None
    change = shared.look()
    assert change is not None
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED, 40)
    assert (change.budget_bytes, change.lowered) == (gpu.budget, False)
    assert shared.look(60) is None
    gpu.close()


def test_what_a_neighbour_held_at_the_start_lets_more_layers_in_when_it_has_left() -> None:
    gpu = Gpu()
    shared = Shared(gpu)
    gpu.arbiter.most_budget_bytes = TOTAL - 10 * PAGE
    shared.neighbour = TOTAL - gpu.budget - 2 * MARGIN
    shared.look(3)
    shared.neighbour = 0
    change = shared.look(30)
    assert change is not None
    assert gpu.layers.streamed == ()
    assert gpu.held_bytes() <= TOTAL - 2 * MARGIN
    assert shared.changes <= 2
    gpu.close()


def test_layers_do_not_flap_with_a_neighbour_that_comes_and_goes() -> None:
    """Each time it comes again at once, it is waited for twice as long."""
    gpu = Gpu()
    shared = Shared(gpu)
    shared.look()
    counts = []
    for _ in range(4):
        before = shared.changes
        for _ in range(20):  # 15 s gone and 15 s there.
            shared.neighbour = 0
            shared.look(15)
            shared.leave_free(PAGE)
            shared.look(15)
        counts.append(shared.changes - before)
    assert counts[0] >= 2
    assert counts[1:] == [0, 0, 0]
    shared.neighbour = 0
    shared.look(200)
    assert len(gpu.layers.streamed) == STREAMED
    gpu.close()


def test_a_pool_that_was_set_stays_so_and_only_layers_come() -> None:
    gpu = Gpu()
    shared = Shared(gpu, most_kv_bytes=40 * PAGE)
    gpu.arbiter.most_budget_bytes = TOTAL
    shared.look(12)
    assert (gpu.layers.streamed, gpu.kv.blocks) == ((), 40)
    assert shared.look(60) is None, "there is nothing that more is of use for"
    gpu.close()


def test_a_pool_that_was_given_up_gives_way_with_layers_and_is_whole_for_a_request() -> None:
    gpu = Gpu()
    shared = Shared(gpu, idle_release_s=5.0)
    shared.idle = True
    shared.look(8)
    assert gpu.kv.blocks == LEAST_BLOCKS
    shared.leave_free(PAGE)
    shared.look(3)
    assert gpu.kv.blocks == LEAST_BLOCKS
    assert len(gpu.layers.streamed) > STREAMED
    shared.idle = False
    shared.look()
    assert gpu.held_bytes() + shared.neighbour <= TOTAL, "the pool takes what is free, and no more"
    shared.neighbour = 0
    shared.look(30)
    assert (len(gpu.layers.streamed), gpu.kv.blocks) == (STREAMED, 40)
    gpu.close()


def test_experts_leave_for_a_neighbour_and_come_back() -> None:
    gpu = ExpertGpu()
    shared = Shared(gpu)
    shared.neighbour = TOTAL - gpu.budget - MARGIN
    shared.look()
    shared.neighbour += 3 * PAGE
    change = shared.look()
    assert change is not None
    assert change.granted is not None
    assert change.granted.experts is not None
    assert sum(change.granted.experts.resident) == gpu.experts.count < 16
    assert gpu.held_bytes() <= gpu.budget - 53 * PAGE
    shared.neighbour = 0
    shared.look(30)
    assert (gpu.experts.count, gpu.kv.blocks) == (16, 40)
    gpu.close()


def test_memory_that_is_gone_when_it_is_taken_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu()
    shared = Shared(gpu)
    gpu.arbiter.most_budget_bytes = TOTAL
    shared.breathing._budget = SimpleNamespace(  # type: ignore[assignment]
        kept_bytes=gpu.budget, most_budget_bytes=TOTAL, granted=gpu.arbiter.granted,
        moves=lambda asked, least: True, blocks_with=lambda asked, least: 50,
    )  # fmt: skip
    shared._set_budget = lambda asked: DoesNotFitError("somebody was faster")  # type: ignore[method-assign]
    assert shared.look(12) is None
    assert "somebody was faster" in caplog.text
    gpu.close()
