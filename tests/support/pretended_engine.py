"""Engine processes that a test lets speak: the front's side of an engine without any process."""

from __future__ import annotations

import asyncio

from holdfast.engine.process import protocol
from holdfast.engine.process.heartbeat import LEAST_LIMIT_S, LOADING_FACTOR, TICK_S, HeartbeatMonitor
from holdfast.errors import EngineDiedError, EngineHungError
from holdfast.records import EngineInfo, EngineOutput, EngineStats, Failure

INFO = EngineInfo(
    model="tiny",
    device="none",
    dtype="none",
    kv_dtype="none",
    block_size=16,
    blocks=10,
    max_model_len=100,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefix_caching=True,
    parameters=0,
    weights_bytes=0,
    kv_pool_bytes=0,
    attention_backend="none",
)


class PretendedChild:
    pid = 1
    cause: Failure | None = None

    def __init__(self) -> None:
        self.heard: list[protocol.ToEngine] = []
        self.said: asyncio.Queue[protocol.FromEngine | Exception | None] = asyncio.Queue()
        self.clock_s = 0.0
        self.watch = HeartbeatMonitor(LOADING_FACTOR * LEAST_LIMIT_S, self.die, lambda: self.clock_s)

    def send(self, message: protocol.ToEngine) -> None:
        self.heard.append(message)

    async def receive(self) -> protocol.FromEngine | None:
        said = await self.said.get()
        if isinstance(said, Exception):
            raise said
        if said is not None:
            self.watch.heard()
        if isinstance(said, protocol.StepFailed):
            self.cause = said.failure
        return said

    def stay_silent(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.clock_s += TICK_S
            self.watch.tick()

    @property
    def progress(self) -> str:
        return f"starting; the last sign of progress was {self.watch.silent_s:.0f} s ago"

    @property
    def unresponsive(self) -> Failure | None:
        return Failure.of(EngineHungError(self.watch.story)) if self.watch.late else None

    def die(self) -> None:
        self.said.put_nowait(None)

    def ending(self) -> str:
        return "signal 9"

    async def stop(self, *, at_once: bool = False) -> None: ...

    @property
    def handed_over(self) -> dict[str, list[int]]:
        """Names, and the tokens they came with."""
        added = [message for message in self.heard if isinstance(message, protocol.Add)]
        return {request.request_id: request.output_token_ids for add in added for request in add.requests}

    def tell(self, *outputs: EngineOutput) -> None:
        self.said.put_nowait(protocol.StepOutputs(list(outputs), EngineStats(step_tokens=1)))


class Harbour:
    """Spawns pretended processes: ready at once, unless `next_starts` says otherwise."""

    def __init__(self) -> None:
        self.children: list[PretendedChild] = []
        self.next_starts: list[Exception | str | None] = []
        self.asked: list[tuple[object, ...]] = []
        """What each was spawned with."""

    async def spawn(self, *asked: object) -> PretendedChild:
        self.asked.append(asked)
        trouble = self.next_starts.pop(0) if self.next_starts else None
        child = PretendedChild()
        self.children.append(child)
        if isinstance(trouble, EngineDiedError):
            raise trouble
        if trouble == "silent":
            return child
        child.said.put_nowait(
            protocol.Ready(INFO) if trouble is None else protocol.StartFailed(protocol.pack_failure(trouble))
        )
        return child

    @property
    def last(self) -> PretendedChild:
        return self.children[-1]


async def until(happened) -> None:
    async with asyncio.timeout(120):
        while not happened():
            await asyncio.sleep(0)
