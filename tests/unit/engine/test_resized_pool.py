"""A KV pool of another size, seen from outside: who is told what, and what becomes of a resize that fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.fake import FakeEngine
from holdfast.engine.process import main, protocol
from holdfast.engine.process.budget import MemoryBudget, told
from holdfast.engine.ranks.gpu.together import RanksVram
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.errors import DoesNotFitError, EngineError, UnsupportedOptionError
from holdfast.kvcache import KVCache, KVLayout, form_groups
from holdfast.records import EngineOutput, EngineStats, FinishReason, RankMemory, VramBudget, VramGrant
from holdfast.scheduler import Scheduler, SchedulerLimits


class Socket:
    """Says these, and then stop."""

    def __init__(self, *said: protocol.ToEngine) -> None:
        self._said, self.heard = [*said, protocol.Stop()], list[object]()

    def poll(self, timeout_ms: int) -> None:
        pass

    def recv(self, flags: int) -> bytes:
        assert flags == zmq.NOBLOCK
        return protocol.encode(self._said.pop(0))

    def send(self, message: bytes) -> None:
        self.heard.append(protocol.decode_from_engine(message))


def serve(resize_kv) -> list[object]:
    core = SimpleNamespace(
        has_work=False,
        prepare_resize=lambda asked: None,
        may_resize=True,
        set_pool=resize_kv,
        stood_still_s=0.25,
        stats=lambda: EngineStats(blocks_touched=7),
    )
    socket = Socket(protocol.ResizeKV(5, number=3))
    main._serve(core, socket, SimpleNamespace(beat=lambda: None))
    return socket.heard


def test_whoever_asked_hears_after_the_numbers_have_come() -> None:
    numbers, resized = serve(lambda blocks: None)
    assert isinstance(numbers, protocol.StepOutputs)
    assert (numbers.stats.blocks_touched, resized) == (7, protocol.Resized(3, stood_still_s=0.25))


def test_a_size_that_is_refused_is_told_and_a_resize_that_fails_ends_the_process() -> None:
    """All requests were dropped by then: only the front can go on with them, in another process."""

    def refuse(blocks: int) -> None:
        raise DoesNotFitError("too many")

    def fail(blocks: int) -> None:
        raise EngineError("the disk is gone")

    assert serve(refuse)[-1].failure.message == "too many"
    with pytest.raises(EngineError, match="gone"):
        serve(fail)


def test_steps_go_on_until_what_would_be_lost_is_in_ram() -> None:
    order = list[str]()

    class Core(SimpleNamespace):
        @property
        def may_resize(self) -> bool:
            return order.count("step") >= 2

    core = Core(
        has_work=True,
        prepare_resize=lambda asked: order.append(f"prepare {asked}"),
        set_pool=lambda blocks: order.append(f"resize {blocks}"),
        step=lambda: order.append("step") or [],
        stood_still_s=0.0,
        stats=EngineStats,
        pop_breathed=lambda: None,
        pop_balanced=lambda: None,
    )

    class Waiting(Socket):
        """Says one thing, and stops when there is an answer."""

        def recv(self, flags: int) -> bytes:
            if len(self._said) == 1 and not any(isinstance(one, protocol.Resized) for one in self.heard):
                raise zmq.Again
            return super().recv(flags)

    socket = Waiting(protocol.ResizeKV(5, number=3))
    main._serve(core, socket, SimpleNamespace(beat=lambda: None))
    assert order == ["prepare 5", "step", "step", "resize 5", "step"]
    # Who asks again before that is second.
    order.clear()
    both = Socket(protocol.ResizeKV(5, number=3), protocol.ResizeKV(7, number=4), protocol.KeepKV())
    main._serve(core, both, SimpleNamespace(beat=lambda: None))
    assert order == ["prepare 5", "resize 5", "prepare 7", "resize 7"]
    assert [one.number for one in both.heard if isinstance(one, protocol.Resized)] == [3, 4]


def test_what_this_engine_does_not_do_is_told_and_ends_nobody() -> None:
    """The budget of several ranks, each on a GPU of its own."""
    core = SimpleNamespace(
        has_work=False, prepare_resize=lambda asked: RanksVram(None).blocks_with(asked, 2), stats=EngineStats
    )
    socket = Socket(protocol.SetVram(VramBudget(budget_bytes=8), number=3))
    main._serve(core, socket, SimpleNamespace(beat=lambda: None))
    assert "several ranks" in socket.heard[-1].failure.message


def test_memory_for_more_pages_comes_first_and_for_fewer_goes_last() -> None:
    """What the device does not have changes nothing, and ends nobody."""
    order = list[str]()

    def resize_kv(blocks: int) -> None:
        order.append("memory")
        if blocks == 9:
            raise DoesNotFitError("somebody else has it")

    scheduler = SimpleNamespace(
        least_blocks=2,
        kv=SimpleNamespace(blocks_total=6, tiers=None),
        resize=lambda blocks: order.append("books"),
        wait_for_copies=lambda: None,
        emptied=None,
    )
    core = EngineCore(scheduler, SimpleNamespace(most_blocks=9, resize_kv=resize_kv))
    core.resize_kv(8)
    core.resize_kv(5)
    assert order == ["memory", "books", "books", "memory"]
    with pytest.raises(DoesNotFitError, match="somebody else"):
        core.resize_kv(9)
    assert order[4:] == ["memory"]


def test_a_budget_of_a_gpu_is_answered_with_what_became_of_it() -> None:
    granted = VramGrant(budget_bytes=9, blocks=4, kv_bytes=7)
    asked = VramBudget(budget_bytes=8)
    core = SimpleNamespace(
        has_work=False,
        prepare_resize=lambda asked: None,
        may_resize=True,
        set_vram={asked: granted}.__getitem__,
        stood_still_s=0.0,
        stats=EngineStats,
    )
    socket = Socket(protocol.SetVram(asked, number=3))
    main._serve(core, socket, SimpleNamespace(beat=lambda: None))
    assert socket.heard[-1] == protocol.Resized(3, granted=granted)


async def test_the_budget_of_several_nodes_is_refused_before_any_rank_hears_of_it() -> None:
    """It would be planned as if all of them had what the head has: a smaller one would be killed for it."""
    engine = SimpleNamespace(streamed=None, gpu=None)
    serving = SimpleNamespace(
        config=SimpleNamespace(nnodes=2),
        plan=SimpleNamespace(engine=engine),
        info=SimpleNamespace(memory=SimpleNamespace(tier="ram")),
    )
    with pytest.raises(UnsupportedOptionError, match="several nodes"):
        await MemoryBudget().change(serving, "ram", 1 << 30, lambda message: True)


async def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next() -> None:
    """A client that asked for another budget may go away."""
    budget, sent = MemoryBudget(), list[protocol.SetVram]()

    def send(message: protocol.SetVram) -> bool:
        sent.append(message)
        return True

    async def ask(size: int) -> VramGrant | None:
        asked = VramBudget(budget_bytes=size)
        return (await budget._ask(send, lambda number: protocol.SetVram(asked, number))).granted

    grants = [VramGrant(budget_bytes=size, blocks=size, kv_bytes=size) for size in (4, 9)]
    first = asyncio.create_task(ask(4))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(ask(9))
    await asyncio.sleep(0)
    for message, grant in zip(sent, grants, strict=True):
        budget.answered(protocol.Resized(message.number, granted=grant))
    assert await second == grants[1]
    third = asyncio.create_task(ask(5))
    await asyncio.sleep(0)
    budget.died()
    with pytest.raises(EngineError, match="exited"):
        await third


def test_what_ends_while_pages_are_moved_is_told() -> None:
    """An adapter that could not be read ends those who wait for it."""
    ended = EngineOutput(request_id="waits", finish_reason=FinishReason.ERROR)
    scheduler = SimpleNamespace(
        least_blocks=2,
        has_copies=False,
        kv=SimpleNamespace(blocks_total=8, tiers=None),
        wait_for_copies=lambda: None,
        resize=lambda blocks: "moving",
        apply=lambda result, now_s: [ended],
        has_unfinished=False,
    )
    runner = SimpleNamespace(
        most_blocks=9, submit=lambda plan: SimpleNamespace(result=lambda: plan), resize_kv=lambda blocks: None
    )
    core = EngineCore(scheduler, runner)
    core.resize_kv(5)
    assert core._undelivered == [ended]
    assert core.has_work


@pytest.mark.parametrize("stuck", [False, True])
def test_memory_for_more_pages_goes_again_when_the_resize_fails_after_it_came(stuck: bool) -> None:
    """Else it is held beyond the budget, which nobody knows of. What failed first is told, also of a device that takes
    nothing back."""
    groups, places = form_groups((None,))
    layout = KVLayout(groups=groups, block_tokens=16, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    sizes = list[int]()

    def resize_kv(blocks: int) -> None:
        sizes.append(blocks)
        if stuck and len(sizes) > 1:
            raise RuntimeError("the device is gone")

    def fail() -> None:
        raise EngineError("the step failed")

    core = EngineCore(Scheduler(limits, KVCache(layout, 9, True)), SimpleNamespace(most_blocks=20, resize_kv=resize_kv))
    core._in_flight.append(SimpleNamespace(result=fail))
    with pytest.raises(EngineError, match="the step failed"):
        core.resize_kv(15)
    assert (sizes, core.scheduler.kv.blocks_total) == ([15, 9], 8)


def test_what_was_balanced_by_itself_is_told() -> None:
    granted = VramGrant(budget_bytes=5, blocks=3, kv_bytes=2)
    waiting, looked = [granted], list[int]()
    core = SimpleNamespace(
        has_work=False,
        check_ranks=lambda: None,
        balance_kv=lambda: looked.append(1),
        breathe=lambda: None,
        kv_store_use=lambda: None,
        pop_breathed=lambda: None,
        pop_balanced=lambda: waiting.pop() if waiting else None,
    )

    class Quiet(Socket):
        def recv(self, flags: int) -> bytes:
            if not looked:
                raise zmq.Again
            return super().recv(flags)

    socket = Quiet()
    main._serve(core, socket, SimpleNamespace(beat=lambda: None))
    assert socket.heard == [protocol.Balanced(granted)]
    assert looked == [1]


def test_each_rank_is_told_with_its_part_of_another_pool(tiny_model) -> None:
    config = EngineConfig(
        model=str(tiny_model), load_format="dummy", device="cpu", tensor_parallel_size=2, pipeline_parallel_size=2,
        ram=2 << 30,
    )  # fmt: skip
    plan = plan_model(config, find_model(config, text=False))
    each = {"pid": 1, "threads": 1, "heads": 1, "kv_heads": 1, "planned_weights_bytes": 1, "weights_bytes": 1}
    rows = [RankMemory(rank=rank, kv_pool_bytes=7, **each) for rank in range(4)]
    info = FakeEngine().info
    report = msgspec.structs.replace(info.memory, page_bytes=plan.engine.layout.page_bytes, ranks=rows)
    then = told(msgspec.structs.replace(info, memory=report), plan, 11)
    sizes = [row.kv_pool_bytes for row in then.memory.ranks]
    assert sizes == [11 * plan.engine.layout_of(rank).page_bytes for rank in range(4)]
    assert sum(sizes) == then.kv_pool_bytes
    assert [row.weights_bytes for row in then.memory.ranks] == [1] * 4
