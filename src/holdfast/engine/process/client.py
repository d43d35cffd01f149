"""The front end's side of the engine process: starts it, talks to it, and restarts it when it dies.

An open request is kept here, not there: prompt, parameters, seed, and every token that was sent. So however the engine
process dies, another one is started and each open request continues after its last token; its client sees a pause.
Which requests are sent again, and which one is failed as the cause, is decided in `quarantine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection

import zmq.asyncio
from msgspec.structs import replace

from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.process.budget import MemoryBudget, Serving, changed_by_itself
from holdfast.engine.process.handle import Child, blamed, died, ready
from holdfast.engine.process.heartbeat import hang_limit
from holdfast.engine.process.kept_kv import KeptFiles
from holdfast.engine.process.quarantine import CrashQuarantine
from holdfast.engine.process.restarts import RestartBackoff
from holdfast.engine.process.stats import at_rest, continued, ledger_of
from holdfast.engine.requests.admission import Admission, check_room
from holdfast.engine.requests.front_parts import FrontParts
from holdfast.engine.requests.output import OutputBuilder
from holdfast.engine.requests.sampling_defaults import decided, served_sampling
from holdfast.engine.requests.searches import Searches
from holdfast.engine.requests.stream import Stream
from holdfast.engine.startup.build import FoundModel, Progress, with_located_model
from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.errors import (
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineHungError,
    HoldfastError,
    NoResourcesError,
    SleepingError,
)
from holdfast.observability.ledger import Ledger
from holdfast.planner import Plan
from holdfast.records import AdapterRef, AnswerDelta, EngineInfo, EngineOutput, EngineStats, Failure, SamplingParams
from holdfast.socket_folder import SocketFolder, remove_abandoned
from holdfast.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("holdfast")


class ProcessEngine:
    """Implements `engine.interface.Engine`. Use on one asyncio loop."""

    def __init__(
        self,
        config: EngineConfig,
        model: FoundModel,
        tokenizer: Tokenizer | None,
        *,
        plan: Plan | None = None,
        on_progress: Progress = lambda stage, done, total: None,
        early: EarlyProcess | None = None,
        parts: FrontParts | None = None,
    ) -> None:
        """`early`: a process that waits already, for the first start; it is taken over. `parts`: lent by a front that
        has several engines."""
        self._early, self._config = early, with_located_model(config, model)
        self._model, self.tokenizer = model, tokenizer
        self._defaults = served_sampling(config, model.files, model.spec)
        self._plan, self._on_progress = plan, on_progress
        self._parts = parts = parts or FrontParts.of(config, tokenizer, model.spec)
        self._door: Admission | None = None
        self._info: EngineInfo | None = None
        remove_abandoned()
        self._folder = SocketFolder()
        self._context = zmq.asyncio.Context()
        self._child: Child | None = None
        self.structured, self._waiting = parts.structured, parts.waiting
        self._supervisor: asyncio.Task[None] | None = None
        self._open: dict[str, tuple[OutputBuilder, Stream]] = {}
        self._searches = Searches()
        self._quarantine = CrashQuarantine()
        self._streams = 0
        self._ready = self.draining = self._stopping = self._sleeping = False
        self._turning = asyncio.Lock()
        """Serializes sleep, wake_up and set_memory_budget."""
        self._budget, self.budgets, self._kept = MemoryBudget(), config.budgets, KeptFiles()
        self._launches = self.restarts = self.hangs = 0
        self.failure: Failure | None = None
        self._handed_over = False
        self._backoff = RestartBackoff()
        self.all_pids: Callable[[], tuple[int, ...]] = lambda: () if self.pid is None else (self.pid,)
        """Of all engine processes of the server."""
        self._stats = self._stats_before = EngineStats()
        self._listeners: list[Callable[[EngineStats], None]] = []

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine is not ready yet")
        return self._info

    @property
    def ready(self) -> bool:
        return self._ready and not self.draining and not self._sleeping and self.unresponsive is None

    @property
    def unresponsive(self) -> Failure | None:
        return self._child.unresponsive if self._ready and self._child is not None else None

    @property
    def starting(self) -> str:
        return "" if self._child is None or self._ready else self._child.progress

    @property
    def unfinished(self) -> int:
        return self._streams - self._searches.steps + len(self._searches)

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return None if self._child is None else self._child.pid

    def stats(self) -> EngineStats:
        return self._stats

    def memory(self, *, with_front: bool = True) -> Ledger | None:
        """None also while there is no engine process, unless it sleeps. `with_front`: and what it owns."""
        others, asleep = self._parts.memory() if with_front else [], self._sleeping and not self._child
        pid, kept = self.pid if self._ready else None, self._kept.held_bytes
        return ledger_of(self._info, self._stats, pid, others, asleep=asleep, kept=kept, with_front=with_front)

    def on_step(self, listener: Callable[[EngineStats], None]) -> None:
        self._listeners.append(listener)

    async def start(self) -> None:
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        embed: bool = False,
        search_id: str | None = None,
        progress: bool = False,
    ) -> AsyncIterator[AnswerDelta]:
        is_step = search_id in self._searches
        if not is_step:
            self._refuse_if_closed(request_id)
        assert self._door is not None
        requests = self._door.admit(
            prompt_token_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter,
            embed=embed, progress=progress,
        )  # fmt: skip
        if not is_step:
            self.check_room(len(requests))
        if any(request.request_id in self._open for request in requests):
            raise EngineError(f"request id {request_id!r} is already in use", request_id=request_id)
        names = [request.request_id for request in requests]
        stream = Stream(names, self._close_stream, self._waiting)
        for index, request in enumerate(requests):
            self._open[request.request_id] = (OutputBuilder(request, index, self.tokenizer), stream)
            if is_step:
                self._searches.begin_step(request.request_id)
        self._streams += 1
        self._quarantine.enter(names)
        self._hand_over()
        return stream

    def check_room(self, answers: int) -> None:
        check_room(answers, self.taken_places, self.places, self._config.max_queued_requests)

    @property
    def places(self) -> int:
        """Sequences that run at the same time."""
        return self._config.sequences if self._info is None else self._info.max_num_seqs  # It may be lowered.

    @property
    def taken_places(self) -> int:
        return len(self._open) + self._searches.idle_places

    @property
    def open_requests(self) -> Collection[tuple[OutputBuilder, Stream]]:
        """One for each answer that has not ended."""
        return self._open.values()

    @property
    def members(self) -> tuple[ProcessEngine, ...]:
        return (self,)

    async def open_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        search_id: str,
        adapter: AdapterRef | None = None,
    ) -> int:
        self._refuse_if_closed(search_id)
        assert self._door is not None
        self._door.admit(prompt_token_ids, params, request_id=search_id, adapter=adapter)
        self.check_room(params.n)
        self._searches.open(search_id, params.n)
        return self._parts.engine or 0

    async def close_search(self, search_id: str) -> None:
        self._searches.close(search_id)

    async def drain(self, timeout_s: float) -> None:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._busy and self.failure is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._busy:
            said = f"the server is shutting down and the request did not finish in {timeout_s:g} s"
            self._end_all(DrainingError(said))

    async def stop(self) -> None:
        was_ready, self._stopping, self._ready = self._ready, True, False
        await self._end_supervisor()
        self._budget.died()  # Nobody reads an answer any more.
        self._on_progress("stopped", 0, 0)  # A bar that is left open hides the terminal's cursor.
        if self._early is not None:
            self._early.end()
        if self._child is not None:
            await self._child.stop(at_once=not was_ready)
        self._end_all(DrainingError("the server has shut down"))
        self._parts.close()
        self._kept.drop()
        self._context.destroy(linger=0)
        self._folder.remove()

    @property
    def sleeping(self) -> bool:
        return self._sleeping

    async def sleep(self, mode: str = "abort", level: int = 1) -> None:
        """The process itself is ended: nothing gives memory back as surely, on a CPU and on a GPU."""
        async with self._turning:
            if self._sleeping and level > 1:
                self._kept.drop()
            if self._sleeping:
                return
            if not self._ready or self.draining:  # One that does not answer can be.
                raise EngineError("the engine is not ready and cannot be put to sleep", fix="try again later")
            self._sleeping = True  # From here on nothing new is taken.
            try:
                if mode == "abort":
                    self._end_all(SleepingError("the engine was put to sleep before the request was finished"))
                while self._busy and self.failure is None:
                    await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                self._sleeping = False
                raise
            try:  # Whoever asked may go away; the process has given up its pages by then.
                if level == 1 and self.unresponsive is None:
                    await self._kept.ask(self._send)
            finally:
                await self._end_child()
        log.info("the engine is sleeping: its process has exited and its memory is free")

    async def _end_child(self) -> None:
        was_ready, self._ready = self._ready, False
        await self._end_supervisor()
        child, self._child = self._child, None
        if child is not None:
            await child.stop(at_once=not was_ready)
        self._parts.stop()
        self._stats = at_rest(self._stats)

    async def wake_up(self) -> None:
        async with self._turning:
            if not self._sleeping or self._stopping:
                return
            try:
                await self._launch()
            except BaseException:  # One that was left running would have another beside it, over the same pages.
                await self._end_child()
                raise
            self._sleeping = False
            self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        log.info("the engine is awake")

    async def reset_prefix_cache(self) -> None:
        self._kept.reset(self._send, asleep=self._sleeping, in_use=self._child is not None)

    async def set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        async with self._turning:
            self._refuse_if_closed("")
            plan = self._plan if self._ready else None
            now = Serving.of(self._config, self._model, plan, self.info, self.all_pids())
            then = await self._budget.change(now, tier, budget_bytes, self._send)
            self._config, self._plan, self._info = then.config, then.plan, then.info
            self.budgets = {**self.budgets, tier: budget_bytes}

    async def _end_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    @property
    def _busy(self) -> bool:
        """With requests, or with a search between two of its steps."""
        return bool(self._open or self._searches)

    def _refuse_if_closed(self, request_id: str) -> None:
        if self.failure is not None:
            raise self.failure.error(request_id)
        if self.draining or self._stopping:
            raise DrainingError("the server is shutting down", fix="send it to another server", request_id=request_id)
        if self._sleeping:
            raise SleepingError("the engine is sleeping", fix="POST /wake_up", request_id=request_id)
        if self._door is None:
            raise EngineError(
                "the engine is not ready yet", fix="wait for /health to answer 200", request_id=request_id
            )

    def _send(self, message: protocol.ToEngine) -> bool:
        """False: there is no process that would hear it."""
        if self._child is None or not self._ready:
            return False
        self._child.send(message)
        return True

    def _hand_over(self) -> None:
        """While it restarts, or does not answer, requests simply wait here."""
        if self._ready and self.unresponsive is None and (names := self._quarantine.dispatch()):
            self._handed_over = True
            requests = [self._open[name][0].resumed() for name in names]
            try:
                self._send(protocol.Add(requests))
            except (OverflowError, TypeError, ValueError):
                for request in requests:
                    self._hand_over_alone(protocol.Add([request]))

    def _hand_over_alone(self, add: protocol.Add) -> None:
        """One that cannot be put into words for the engine ends alone, whatever it holds."""
        try:
            self._send(add)
        except (OverflowError, TypeError, ValueError) as error:
            name = add.requests[0].request_id
            self._end(name, EngineError(f"cannot send the request to the engine: {error}", request_id=name))

    async def _launch(self) -> None:
        """Returns with a ready engine, or raises what kept it from becoming one."""
        early, self._early, self._launches = self._early, None, self._launches + 1
        address = None if self.structured is None else self.structured.service.address
        path, again = self._folder.path / f"{self._launches}.sock", self._info is not None
        self._child = child = await Child.spawn(
            self._context, path, self._config, self._plan, early, address, self._kept.kept, self._parts.engine, again
        )
        self._handed_over = False
        info = (started := await ready(child, self._on_progress)).info
        limit_s, decision = hang_limit(self._config, info)
        child.watch.expect(limit_s)
        named, advised = replace(info, model=self._model.files.name), bool(self._model.files.generation_config)
        self._info = decided(named, self._config, self._defaults, [decision], advised=advised)
        self._door = Admission(self._model.spec, info.max_model_len, self._parts.seeds, self.tokenizer)
        self._door.grammar_cost = None if self.structured is None else self.structured.checker.known
        self._stats_before = replace(self._stats, blocks_touched=0)  # A new process has touched none yet.
        self._stats = continued(self._stats_before, started.stats)
        self._ready = True
        self._kept.taken(self._send)
        self._on_progress("ready", 0, 0)
        self._parts.prepare_soon()

    async def _supervise(self) -> None:
        assert self._child is not None
        try:
            while True:
                while (message := await self._child.receive()) is not None:
                    if isinstance(message, protocol.StepOutputs):
                        self._take(message)
                    elif isinstance(message, protocol.Resized):
                        self._budget.answered(message)
                    elif isinstance(message, protocol.Kept):  # It is told to stop next.
                        self._kept.answered(message)
                    elif isinstance(message, protocol.Balanced | protocol.Breathed) and self._plan is not None:
                        now = Serving.of(self._config, self._model, self._plan, self.info, self.all_pids())
                        self._plan, self._info = changed_by_itself(now, message)
                    elif isinstance(message, protocol.Beat):
                        self._hand_over()  # Somebody may have come while it did not answer.
                await self._bury(self._child)
                await self._relaunch()
                said = "%s is ready again; resuming %d unfinished requests"
                log.info(said, self._parts.named, len(self._open))
                self._hand_over()
        except EngineDiedError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("supervising the engine process failed")
            self._give_up(EngineError(f"supervising the engine process failed: {type(error).__name__}: {error}"))

    async def _bury(self, child: Child) -> None:
        """The process has died: all requests wait again, and the one that is the cause is ended."""
        self._ready = False
        self._budget.died()
        self._kept.died()
        self.restarts += 1
        self.hangs += child.watch.hung
        await child.stop()
        self._backoff.died(with_requests=self._handed_over)
        for name in self._quarantine.on_crash():
            error = blamed(child, name)
            self._end(name, error)
            log.error("request %s failed: %s", name, error.message)
        said = "%s exited (%s) with %d unfinished requests; restarting it [%s]"
        log.error(said, self._parts.named, child.ending(), len(self._open), died(child, "").code)

    async def _relaunch(self) -> None:
        """Until one lives, or too many in a row have ended for nothing."""
        while True:
            self._backoff.check()
            await asyncio.sleep(self._backoff.delay_s)
            try:
                return await self._launch()
            except HoldfastError as error:
                log.error("%s", error)
                self.restarts += not isinstance(error, NoResourcesError)
                self.hangs += isinstance(error, EngineHungError)
                self._backoff.failed(error)

    def _give_up(self, error: EngineError) -> None:
        log.error("%s", error)
        self._ready = False
        self.failure = protocol.pack_failure(error)
        self._end_all(error)
        self._stats = at_rest(self._stats)  # Others of the server may go on, and their figures are read with these.

    def _take(self, step: protocol.StepOutputs) -> None:
        self._stats = continued(self._stats_before, step.stats)
        to_abort = [output.request_id for output in step.outputs if self._deliver(output)]
        for listener in self._listeners:
            try:
                listener(self._stats)
            except Exception:
                log.exception("a step listener failed")
        if to_abort:
            self._send(protocol.Abort(to_abort))
        self._hand_over()  # Somebody who is no suspect any more may have kept others waiting.

    def _deliver(self, output: EngineOutput) -> bool:
        """Passes one request's output on. True when it has ended here, and the engine does not know."""
        name = output.request_id
        if name not in self._open:
            return False  # Aborted on this side while the step ran.
        answer, stream = self._open[name]
        self._quarantine.clear(name)
        if output.failure is not None:
            self._end(name, output.failure.error(name))
            return False
        try:
            delta = answer.take(output)
        except Exception as error:  # What is wrong with one answer is nobody else's business.
            log.exception("request %s failed: its output could not be processed", name)
            self._end(name, EngineError(f"the output could not be processed: {type(error).__name__}", request_id=name))
            return output.finish_reason is None
        if answer.finished:
            self._forget([name])
        stream.put(delta)
        return answer.finished and output.finish_reason is None

    def _end(self, name: str, error: HoldfastError) -> None:
        stream = self._open[name][1]
        self._forget([name])
        stream.put(error)

    def _end_all(self, error: HoldfastError) -> None:
        streams = {id(stream): stream for _, stream in self._open.values()}
        self._abort(list(self._open))
        self._searches.clear()
        for stream in streams.values():
            stream.put(error)

    def _close_stream(self, names: list[str]) -> None:
        """A stream has ended or was left by its reader; what still runs of it is aborted."""
        self._streams -= 1
        self._abort([name for name in names if name in self._open])
        self._hand_over()

    def _abort(self, names: list[str]) -> None:
        self._forget(names)
        if names:
            self._send(protocol.Abort(names))

    def _forget(self, names: list[str]) -> None:
        self._quarantine.leave(names)
        for name in names:
            del self._open[name]
            self._searches.end_step(name)
