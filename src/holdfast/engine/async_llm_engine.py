"""`AsyncLLMEngine`, which newer vLLM calls `AsyncLLM`: an engine that a thread steps, for scripts with asyncio.

Owns the thread and a queue for each request. For a service use `holdfast serve`: its engine is another process, which
is restarted when it dies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.checkpoints.lora.bounded_looks import EXAMINE_LIMIT_S, in_time, look
from holdfast.engine.arg_utils import AsyncEngineArgs
from holdfast.engine.offline.stepped import SteppedEngine
from holdfast.errors import EngineError, RequestError, UnsupportedOptionError
from holdfast.records import AdapterRef, LoRARequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from holdfast.engine.offline.pooling import Prompt
    from holdfast.text.tokenizer.tokenizer import Tokenizer


class AsyncLLMEngine:
    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._queues: dict[str, _Queue] = {}
        self._paused = False
        """These three are the thread's alone: others send it work, which it does between two steps."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._looks: dict[LoRARequest, concurrent.futures.Future[AdapterRef]] = {}
        """That are under way."""
        self._looking = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        """Set under the lock by the thread as its last act: nothing is queued behind it, where nobody would see it."""
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="holdfast-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, *_: Any, **__: Any) -> AsyncLLMEngine:
        """vLLM's further arguments say who reports what; nothing is reported here."""
        from holdfast.engine.llm_engine import LLMEngine  # Needs torch only when one is made.

        return cls(LLMEngine.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """What each step says, as `output_kind` asks. Leaving the loop early aborts the request."""
        told = _Queue(asyncio.get_running_loop())
        adapter = None if lora_request is None else await self._find_adapter(lora_request)

        def add() -> None:
            self._engine.add_request(
                request_id, prompt, sampling_params, lora_request=lora_request, priority=priority, adapter=adapter
            )
            self._queues[request_id] = told

        def leave() -> None:
            if self._queues.get(request_id) is told:  # Not another's request of the same name.
                self._abort([request_id])

        finished = False
        try:
            await self._do(add)
            while not finished:
                output = await told.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._queue(_Work(leave))

    async def _find_adapter(self, requested: LoRARequest) -> AdapterRef:
        """Not in the engine's thread: while files are slow to come all other streams would stand still. Who asks for
        the same one meanwhile waits for the same look."""
        if not isinstance(requested, LoRARequest):
            raise RequestError("lora_request is something other than a LoRARequest", field="lora_request")
        with self._looking:
            found = self._looks.get(requested)
            if found is None:
                self._looks[requested] = found = look(lambda: self._engine.find_adapter(requested))
                found.add_done_callback(lambda _: self._looks.pop(requested))
        return await in_time(found, requested.lora_name, EXAMINE_LIMIT_S)

    async def encode(self, *_: Any, **__: Any) -> None:
        raise UnsupportedOptionError(
            "encode is not supported: an engine generates", fix="LLM.embed(prompts)", field="encode"
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._do(lambda: self._abort(names))

    def _abort(self, names: Iterable[str]) -> None:
        for name in names:
            told = self._queues.pop(name, None)
            if told is not None:
                self._engine.abort_request(name)
                told.put(EngineError(f"request {name} was aborted"))

    async def pause_generation(self, *, mode: str = "keep", **_: Any) -> None:
        """No step runs until `resume_generation`; requests are kept, or with mode="abort" ended."""
        if mode not in ("keep", "abort"):
            raise UnsupportedOptionError(f"mode {mode!r} is not supported", needed="keep or abort", field="mode")

        def pause() -> None:
            self._paused = True
            self._abort(list(self._queues) if mode == "abort" else [])

        await self._do(pause)

    async def resume_generation(self) -> None:
        def resume() -> None:
            self._paused = False

        await self._do(resume)

    async def is_paused(self) -> bool:
        return self._paused

    async def get_tokenizer(self) -> Tokenizer:
        return self._engine.get_tokenizer()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        def reset() -> None:
            self._engine.reset_prefix_cache()

        await self._do(reset)
        return True

    async def check_health(self) -> None:
        if self._error is not None:
            raise EngineError("the engine is dead") from self._error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def errored(self) -> bool:
        return self._error is not None

    def shutdown(self) -> None:
        """Ends open requests and gives the memory back."""
        if self._ended:
            return
        self._ended = True
        self._work.put(None)
        self._thread.join()
        self._engine.shutdown()

    async def _do(self, work: Callable[[], None]) -> None:
        """In the engine's thread, between two steps; what it raises is raised here."""
        queued = _Work(work)
        if self._ended or not self._queue(queued):
            raise EngineError("this engine has ended", fix="create a new one") from self._error
        await asyncio.wrap_future(queued.done)

    def _queue(self, work: _Work) -> bool:
        """False: the thread has ended."""
        with self._closing:
            if not self._closed:
                self._work.put(work)
            return not self._closed

    def _run(self) -> None:
        error: BaseException = EngineError("the engine was shut down")
        try:
            while self._turn():
                pass
        except BaseException as raised:
            self._error = error = raised
        for told in self._queues.values():
            told.put(error)
        self._queues.clear()
        with self._closing:
            self._closed = True
        while not self._work.empty():
            work = self._work.get()
            if work is not None:
                work.fail(error)

    def _turn(self) -> bool:
        """One piece of work, or one step; False: it is to end."""
        idle = self._paused or not self._engine.has_unfinished_requests()
        try:
            work = self._work.get(block=idle)
        except queue.Empty:
            for output in self._engine.step():
                self._queues[output.request_id].put(output)
                if output.finished:
                    del self._queues[output.request_id]
            return True
        if work is not None:
            work.run()
        return work is not None


@dataclass(slots=True)
class _Work:
    """For the engine's thread. Who waits for it may have been cancelled by the time it is its turn."""

    do: Callable[[], None]
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.do()
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class _Queue:
    """From the engine's thread to the loop of who waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def put(self, told: RequestOutput | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)

    async def get(self) -> RequestOutput:
        told = await self._told.get()
        if isinstance(told, BaseException):
            raise told
        return told


AsyncLLM = AsyncLLMEngine
"""Its name since vLLM's second engine."""
