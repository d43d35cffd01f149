"""What ranks that are not the first do alike, on CPUs and on GPUs: they follow plans and orders in the order in which
rank 0 sends them, and one that finds no memory says so by its code. Knows no model."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from holdfast.engine.ranks import messages
from holdfast.engine.ranks.cpu import segment_layout
from holdfast.errors import RANK_WITHOUT_MEMORY, DoesNotFitError, EngineError
from holdfast.execution.parallel.mailbox import Receiver
from holdfast.execution.parallel.segment import Segment
from holdfast.hardware import memory
from holdfast.planner import Plan
from holdfast.records import StepPlan
from holdfast.units import format_bytes

NO_ROOM = "HF448"
"""There was no memory to start."""
RAM, VRAM = "memory", "GPU memory"


class _Ways(NamedTuple):
    """Out of a shortage."""

    others: str
    setting: str
    field: str


_WAYS = {
    RAM: _Ways(
        "stop other processes that hold memory, raise the limit of this one (ulimit -v, its container's)",
        "a smaller --ram",
        "ram",
    ),
    VRAM: _Ways(
        "stop other processes that use the GPUs (see nvidia-smi)",
        "a smaller --gpu-memory-utilization or --vram",
        "gpu_memory_utilization",
    ),
}


class StepLeft(Exception):
    """Rank 0 has left the step: this rank leaves it too, and waits for the next."""


class AskedPlaces:
    """Of one rank: which step has asked for each place last."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def note(self, plan: StepPlan) -> None:
        for asked in plan.fetches:
            self._steps[asked.place] = plan.step_id

    def pop(self, place: int) -> int:
        return self._steps.pop(place)


class Follower(ABC):
    def __init__(self, start: messages.StartRank, descriptor: int, answers: Connection) -> None:
        self._rank, self._plan, self._answers = start.rank, start.plan, answers
        self._serves = False
        """All ranks are ready: what fails now is no refusal of a start."""
        self._segment = Segment(segment_layout(start.plan.engine), descriptor)
        self._receiver = Receiver(self._segment, start.rank, self._look)
        with self._shortage_named():
            self._load(start)

    @abstractmethod
    def _load(self, start: messages.StartRank) -> None:
        """Its share of the model, and the way to the other ranks."""

    @abstractmethod
    def _execute(self, plan: StepPlan) -> None: ...

    @abstractmethod
    def _note_sampled(self, sampled: messages.Sampled) -> None:
        """Of a pipeline."""

    @abstractmethod
    def _follow(self, order: messages.Order) -> bool:
        """Whether there is more to do."""

    @abstractmethod
    def _lacked(self, error: Exception) -> str:
        """The memory of which there was none, by this error; empty: it says something else."""

    @abstractmethod
    def _rejoin(self) -> None:
        """Rank 0 has left a step, and this one has too."""

    def run(self) -> None:
        """Until it is told to leave."""
        gc.freeze()
        gc.enable()
        while True:
            try:
                message = self._receiver.receive()
                with self._shortage_named(in_step=message[:1] == messages.STEP):
                    if not self._heed(message):
                        return
            except StepLeft:
                self._rejoin()

    def _heed(self, message: bytes) -> bool:
        """Whether there is more to do."""
        if message[:1] == messages.STEP:
            self._execute(messages.decode_plan(message[1:]))
        elif message[:1] == messages.SAMPLED:
            self._note_sampled(messages.decode_sampled(message[1:]))
        else:
            order = messages.decode_order(message[1:])
            self._serves = self._serves or isinstance(order, messages.Serve)
            return self._follow(order)
        return True

    @contextlib.contextmanager
    def _shortage_named(self, *, in_step: bool = False) -> Iterator[None]:
        """An error that says that there was no memory comes out of this with its code, and what was needed."""
        try:
            yield
        except Exception as error:
            if not (lacked := self._lacked(error)):
                raise
            if self._serves:
                raise _no_memory(lacked, error, in_step=in_step) from error
            raise _no_room_at_start(lacked, self._plan, self._rank, error) from error

    def _say(self, message: messages.FromRank) -> None:
        self._answers.send_bytes(messages.encode(message))

    def _say_loading(self, done: int, total: int) -> None:
        self._say(messages.RankLoading(done, total))

    def _look(self, waited_s: float) -> None:
        """While rank 0 or another is awaited, which may take as long as it likes: rank 0 has the clock."""
        if self._segment.alarm.value != self._segment.calm:
            raise StepLeft


def _no_memory(lacked: str, error: Exception, *, in_step: bool) -> EngineError:
    """`lacked`: RAM or VRAM. All ranks are started again: the others have begun what this one cannot, a step or another
    size of the KV pool."""
    ways, when = _WAYS[lacked], "in a step, which all ranks have begun" if in_step else "while serving"
    return EngineError(
        f"out of {lacked} {when}",
        code=RANK_WITHOUT_MEMORY,
        found=_said(lacked, error),
        fix=f"{ways.others}, or {ways.setting}",
    )


def _no_room_at_start(lacked: str, plan: Plan, rank: int, error: Exception) -> DoesNotFitError:
    engine, ways = plan.engine, _WAYS[lacked]
    pool = engine.blocks * engine.layout_of(rank).page_bytes
    return DoesNotFitError(
        f"out of {lacked} while it started, though the plan fits what was free",
        code=NO_ROOM,
        needed=f"weights {format_bytes(engine.rank_weights[rank])} and KV pool {format_bytes(pool)}, beside what a step"
        " takes",
        found=_said(lacked, error),
        fix=f"{ways.others}, or {ways.setting}",
        field=ways.field,
    )


def _said(lacked: str, error: Exception) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0]
    return said if lacked == VRAM else f"{said}; {format_bytes(memory().available_bytes)} free on its machine"
