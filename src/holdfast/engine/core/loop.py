"""The engine loop: schedule a step, run it, apply its result. Nothing else happens in a step."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.engine.core.breathing import Breathing, Ways
from holdfast.engine.core.kv_balance import KVBalance
from holdfast.engine.core.no_structured_output import NoStructuredOutput, StructuredOutputs
from holdfast.engine.core.pool_resizes import Laps, PoolResizes
from holdfast.errors import DoesNotFitError, EngineError, HoldfastError
from holdfast.records import (
    EngineOutput,
    EngineStats,
    ExpertUse,
    KVStoreUse,
    LinkUse,
    PoolChange,
    Request,
    StepPlan,
    StepResult,
    TokenMasks,
    VramBudget,
    VramGrant,
)
from holdfast.scheduler import Scheduler
from holdfast.scheduler.outputs import refused

SAVE_S = 0.2
"""The longest that answers stand still for pages that go to RAM before the pool shrinks: those that did not go beside
steps before."""
GRAMMAR_WAIT_S, DISK_WAIT_S = 0.02, 0.005
"""For a grammar or a mask, and for a place in the queue of the store on disk, where there is nothing else to do."""


class StepHandle(Protocol):
    @property
    def late(self) -> Sequence[int]:
        """Slots whose masks were not there in time, known as soon as the step is submitted."""

    def result(self) -> StepResult:
        """Waits for the step. May be asked again."""


class StepRunner(Protocol):
    """Executes plans strictly in the order in which they are submitted."""

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle: ...

    @property
    def most_blocks(self) -> int:
        """Pages that the KV pool may grow to, the null page included."""

    def resize_kv(self, blocks: int) -> None:
        """So many pages may be used from now on; what lies in others is lost."""

    def give_up_reads(self) -> list[int]:
        """Of pages that come from a disk, which may hang: returns copies that will never be over."""

    def abandon_copies(self) -> None:
        """Pages on their way between tiers are nobody's: when this returns, none of the pool is written to."""

    def close(self) -> None: ...


class Vram(Protocol):
    """What is held on a GPU, and by whom."""

    def own_bytes(self) -> int:
        """By this process, now."""

    def blocks_with(self, asked: VramBudget, least_blocks: int) -> int:
        """Pages that the KV pool would have with this budget, as far as is known before. Raises what `change` does."""

    def change(self, asked: VramBudget, least_blocks: int, resize_kv: Callable[[int], None]) -> VramGrant:
        """Another budget. `least_blocks`: pages that the KV pool must keep."""


class EngineCore:
    """`steps_ahead`: how many steps may be planned before the oldest is applied (0: none, 1: overlap; of a pipeline one
    less than it has stages).
    `vram`: of the GPU that the model is computed on. `link_use`: of what moves between it, RAM and a disk.
    `expert_use`: of experts that do not all stay on it. `structured_output`: makes answers follow a grammar.
    `kv_balance`: lets layers leave the GPU for KV that is wanted. `breathing`: gives memory of the KV pool up while
    nobody needs it, or others do. `store_use`: of the store of KV pages on disk. `check_ranks`: raises where one
    of several has ended, for who waits for requests: a step notices by itself."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        steps_ahead: int = 0,
        vram: Vram | None = None,
        link_use: Callable[[], list[LinkUse]] | None = None,
        expert_use: Callable[[], ExpertUse | None] | None = None,
        structured_output: StructuredOutputs | None = None,
        kv_balance: KVBalance | None = None,
        breathing: Breathing | None = None,
        store_use: Callable[[], KVStoreUse] | None = None,
        check_ranks: Callable[[], None] | None = None,
    ) -> None:
        self.check_ranks = check_ranks or (lambda: None)
        self.structured_output = structured_output or NoStructuredOutput()
        self.scheduler = scheduler
        self.runner = runner
        self._steps_ahead = steps_ahead
        self._vram, self._link_use, self._expert_use = vram, link_use, expert_use
        self._kv_balance, self._store_use = kv_balance, store_use
        self._balanced: VramGrant | None = None
        self.breathing, self._breathed = breathing, None
        self._resizes = PoolResizes()
        self._in_flight: deque[StepHandle] = deque()
        self._undelivered: list[EngineOutput] = []
        """What the next step says besides its own: requests that ended at once, and steps applied before their turn."""

    @property
    def on_device(self) -> bool:
        """The model is computed on a GPU, and the host's cores are free for other things."""
        return self._vram is not None

    def add(self, request: Request) -> None:
        if request.params.structured_outputs is None:
            self._enter(request)
            return
        try:
            self.structured_output.begin(request)
        except HoldfastError as error:
            self._undelivered.append(refused(request, error, time.monotonic()))

    def _enter(self, request: Request) -> None:
        ended = self.scheduler.add(request, time.monotonic())
        if ended is not None:
            self._end([ended])
            self._undelivered.append(ended)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.structured_output.forget(request_id)
        self._undelivered = [output for output in self._undelivered if output.request_id != request_id]

    @property
    def has_work(self) -> bool:
        unfinished = self.scheduler.has_unfinished or self.structured_output.compiling or self.scheduler.has_copies
        saving = self._resizes.preparing or (self.breathing is not None and self.breathing.saving)
        return bool(self._in_flight or self._undelivered) or unfinished or saving

    _breathed: PoolChange | None

    def step(self) -> list[EngineOutput]:
        """Whatever stops it in the middle (an error, Ctrl-C) ends every request it holds: see `start_over`."""
        try:
            return self._step()
        except BaseException:
            self.start_over()
            raise

    def start_over(self) -> None:
        """Drops all requests, steps in flight and cached blocks. Right whatever state an interruption left behind: the
        runner learns a sequence anew when it is started, and reads no page that was not written since."""
        self._in_flight.clear()
        self._undelivered.clear()
        if self.scheduler.kv.tiers is not None:
            with contextlib.suppress(HoldfastError, RuntimeError):  # A device that is gone moves nothing.
                self.runner.abandon_copies()
        self.scheduler = self.scheduler.emptied()
        self.structured_output.clear()

    def _step(self) -> list[EngineOutput]:
        if self.structured_output.compiling:
            self._enter_compiled()
        self.breathe()
        self.balance_kv()
        outputs, self._undelivered = self._undelivered, []
        while self._in_flight and self._in_flight[-1].late:  # These have sampled nothing that a step could go on from.
            outputs += self._apply_oldest()
        awaiting_mask = self.structured_output.awaiting_mask(ahead=bool(self._in_flight))
        plan = self.scheduler.schedule(time.monotonic(), awaiting_mask)
        if plan is not None:
            self._in_flight.append(self._submit(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self._steps_ahead):
            outputs += self._apply_oldest()
        elif plan is None and awaiting_mask and not outputs:
            self.structured_output.wait_for_masks(GRAMMAR_WAIT_S)
        elif plan is None and self.scheduler.has_copies and not outputs:
            time.sleep(DISK_WAIT_S)
        return outputs

    def _apply_oldest(self) -> list[EngineOutput]:
        result = self._in_flight.popleft().result()
        self.structured_output.advance_early(result, newest=not self._in_flight)
        return self._end(self.scheduler.apply(result, time.monotonic(), self.structured_output.advance_grammar))

    def _submit(self, plan: StepPlan) -> StepHandle:
        goes_on = self._in_flight and not self.scheduler.limits.apart
        before = self._in_flight[-1].result if goes_on else None
        return self.runner.submit(plan, self.structured_output.masks(plan, before))

    def _enter_compiled(self) -> None:
        """Requests whose grammar is compiled, in the order of their arrival; the others need not wait for them."""
        idle = not (self._in_flight or self._undelivered or self.scheduler.has_unfinished)
        for request, problem in self.structured_output.pop_compiled(GRAMMAR_WAIT_S if idle else 0.0):
            if problem is None:
                self._enter(request)
            else:
                self._undelivered.append(refused(request, problem, time.monotonic()))

    def _end(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        for output in outputs:
            if output.finish_reason is not None:
                self.structured_output.forget(output.request_id)
        return outputs

    def resize_kv(self, blocks: int) -> None:
        """The KV pool has so many pages from now on, the null page included. Answers go on: what lies in pages that go
        is moved, and where there is no room for all, the youngest wait. Raises DoesNotFitError, and changes nothing,
        where the pool cannot have so many; of whatever else stops it: as of a step."""
        least, most = self.scheduler.least_blocks, self.runner.most_blocks
        if not least <= blocks <= most:
            raise DoesNotFitError(
                "the KV pool cannot have so many pages",
                needed=f"{least} to {most}",
                found=str(blocks),
                fix="another size, or a restart with it",
            )
        before, laps = self.scheduler.kv.blocks_total + 1, Laps(time.monotonic())
        if grows := blocks > before:
            self.runner.resize_kv(blocks)  # First: the memory may not be there.
            laps.lap("memory", time.monotonic())
        try:
            self._apply_all()
            laps.lap(Laps.STEPS, time.monotonic())
            if self.scheduler.kv.tiers is not None:
                self.scheduler.give_up_copies(self.runner.give_up_reads())
                if not grows:
                    self._save_before(blocks)
            while (waiting := self.scheduler.wait_for_copies()) is not None:
                self._run_without_rows(waiting)
            laps.lap("pages on their way", time.monotonic())
            moving = self.scheduler.resize(blocks)
            if moving is not None:
                self._run_without_rows(moving)  # An adapter may have come with it, or failed to.
            laps.lap("moving", time.monotonic())
            if not grows:
                self.runner.resize_kv(blocks)
                laps.lap("memory", time.monotonic())
        except BaseException:
            self.start_over()
            if grows:  # Else more is held than its budget has.
                self.scheduler.resize(before)
                with contextlib.suppress(HoldfastError, RuntimeError):  # A device that is gone takes nothing back.
                    self.runner.resize_kv(before)
            raise
        self._resizes.note_resize(before, blocks, laps)

    def _apply_all(self) -> None:
        while self._in_flight:
            self._undelivered += self._apply_oldest()

    def _run_without_rows(self, plan: StepPlan) -> None:
        """At once, with nothing in flight."""
        done = self.runner.submit(plan).result()
        self._undelivered += self._end(self.scheduler.apply(done, time.monotonic()))

    def _save_before(self, blocks: int) -> None:
        """What such a pool would lose goes to RAM, as much as does without anybody seeing a gap."""
        until_s = time.monotonic() + SAVE_S
        while time.monotonic() < until_s and (saving := self.scheduler.save_before(blocks)) is not None:
            self._run_without_rows(saving)

    def balance_kv(self) -> None:
        """Pages of the KV pool and layers on the GPU change places where that is worth it. Before a step, and while
        there is nothing to do; of whatever stops it: as of a step."""
        if self._kv_balance is None or self._resizes.preparing:
            return
        if self.breathing is not None and self.breathing.released:
            return
        found = self._kv_balance.look(self.scheduler, time.monotonic(), self.resize_kv)
        self._balanced = found or self._balanced

    def pop_balanced(self) -> VramGrant | None:
        """What `balance_kv` has changed since it was asked last; None: nothing."""
        found, self._balanced = self._balanced, None
        return found

    def save_prefixes(self, limit_s: float, beat: Callable[[], None]) -> None:
        """Cached prefixes go to the RAM tier, as many as it takes within this time. There are no requests, and there
        will be none: the pool breathes no more."""
        tiers = self.scheduler.kv.tiers
        if tiers is None or not tiers.host.total:
            return
        if self.breathing is not None:  # It would shrink the pool meanwhile, and with it what is saved.
            self.breathing.close()
        self.breathing = self._kv_balance = None
        until_s, tiers.spare_wanted = time.monotonic() + limit_s, self.scheduler.kv.blocks_total
        while not tiers.spared and time.monotonic() < until_s:
            self._undelivered += self._step()
            beat()
        tiers.spare_wanted = 0
        self._apply_all()
        while (waiting := self.scheduler.wait_for_copies()) is not None:
            self._run_without_rows(waiting)

    def breathe(self) -> None:
        """The KV pool, and layers or experts beside it, give memory up that nobody asks for or that others need, or
        take it again. Before a step, and while there is nothing to do; of whatever stops it: as of a step."""
        if self.breathing is None or self._resizes.preparing:
            return
        self._resizes.begin_change()
        idle = not (self.scheduler.has_unfinished or self.structured_output.compiling or self._undelivered)
        ways = Ways(self._try_resize, self._try_budget)
        found = self.breathing.look(self.scheduler, time.monotonic(), idle=idle, ways=ways)
        if found is not None:
            self._breathed = msgspec.structs.replace(found, stood_still_s=self._resizes.stood_still_s)

    def _try_resize(self, blocks: int) -> HoldfastError | None:
        """What kept it from that where nothing was changed by it. Of anything else requests were dropped: it is raised,
        so that this process ends and the front goes on with them in another."""
        scheduler = self.scheduler
        try:
            self.resize_kv(blocks)
        except (DoesNotFitError, EngineError) as error:
            if self.scheduler is not scheduler:
                raise
            return error
        return None

    def _try_budget(self, asked: VramBudget) -> HoldfastError | None:
        """Likewise."""
        scheduler = self.scheduler
        try:
            self._change_vram(asked)
        except DoesNotFitError as error:
            if self.scheduler is not scheduler:
                raise
            return error
        return None

    def pop_breathed(self) -> PoolChange | None:
        """What `breathe` has changed since it was asked last; None: nothing."""
        found, self._breathed = self._breathed, None
        return found

    def prepare_resize(self, asked: VramBudget | int) -> None:
        """Somebody asks for another budget, or for a pool of so many pages. Where that makes the pool smaller, what it
        would lose goes to RAM beside steps until `may_resize`. Raises DoesNotFitError where so much is not there."""
        self._resizes.end_preparing(self.scheduler)
        blocks = asked if isinstance(asked, int) else self._gpu.blocks_with(asked, self.scheduler.least_blocks)
        self._resizes.prepare(self.scheduler, blocks, time.monotonic())

    @property
    def may_resize(self) -> bool:
        """`set_pool` or `set_vram` would not wait for pages that can still go to RAM beside steps."""
        return self._resizes.ready(self.scheduler, time.monotonic())

    @property
    def stood_still_s(self) -> float:
        """How long steps stood still for the last of `set_pool` and `set_vram`."""
        return self._resizes.stood_still_s

    def set_pool(self, blocks: int) -> None:
        """As somebody asked: see `resize_kv`."""
        self._resizes.end_preparing(self.scheduler)
        self._resizes.begin_change()
        self.resize_kv(blocks)
        if self.breathing is not None:
            self.breathing.resized(self.scheduler)

    def set_vram(self, asked: VramBudget) -> VramGrant:
        """Raises DoesNotFitError, and changes nothing, where so much is not there."""
        self._resizes.end_preparing(self.scheduler)
        self._resizes.begin_change()
        granted = self._change_vram(asked)
        if self.breathing is not None:
            self.breathing.resized(self.scheduler)
        return granted

    def _change_vram(self, asked: VramBudget) -> VramGrant:
        began_s, resizing_s = time.monotonic(), self._resizes.resizing_s
        granted = self._gpu.change(asked, self.scheduler.least_blocks, self.resize_kv)
        # Beside resizes of the pool, what layers or experts took that came or left.
        self._resizes.note(time.monotonic() - began_s - (self._resizes.resizing_s - resizing_s))
        return granted

    @property
    def _gpu(self) -> Vram:
        if self._vram is None:
            raise EngineError("this engine holds nothing on a GPU")
        return self._vram

    def stats(self) -> EngineStats:
        stats, resizes = self.scheduler.stats(), self._resizes
        if resizes.total:
            stats = msgspec.structs.replace(
                stats, pool_resizes_total=resizes.total, stood_still_s_total=resizes.stood_still_total_s
            )
        if (use := self.kv_store_use()) is not None:
            stats = msgspec.structs.replace(stats, kv_store=use)
        links = [] if self._link_use is None else self._link_use()
        if self._vram is None:
            return msgspec.structs.replace(stats, links=links) if links else stats
        experts = None if self._expert_use is None else self._expert_use()
        return msgspec.structs.replace(stats, device_bytes=self._vram.own_bytes(), links=links, experts=experts)

    def kv_store_use(self) -> KVStoreUse | None:
        """Other processes change it too, also while this one has nothing to do. None: there is no store."""
        if self._store_use is None:
            return None
        use, tiers = self._store_use(), self.scheduler.kv.tiers
        if tiers is None:
            return use
        reasons = use.dropped_by_reason | {"not brought": tiers.dropped_writes}  # These were not even brought to it.
        return msgspec.structs.replace(use, dropped_writes_total=sum(reasons.values()), dropped_by_reason=reasons)

    def close(self) -> None:
        self._in_flight.clear()
        if self.breathing is not None:
            self.breathing.close()
        self.structured_output.close()
        self.runner.close()
