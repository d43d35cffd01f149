"""The other ranks as rank 0 sees them: started as children, told what to do, watched, ended.

    mailbox     plans and orders, to all of them in one order
    sockets     what each answers
    watchers    a thread a child, which starts it and waits for its end: then all waiting ends with an alarm

A rank that dies or does not come is the end of the group: its owner ends all of them and starts a new one. Knows
nothing of models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from holdfast.config import EngineConfig
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.cpu import threads_of
from holdfast.errors import EngineDiedError, EngineError, EngineHungError
from holdfast.execution.parallel.gloo import GlooCollectives, open_store
from holdfast.execution.parallel.mailbox import Sender
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.footprint.cpu import SLOT_PAGE_BYTES
from holdfast.planner import Plan
from holdfast.records import StepPlan
from holdfast.units import format_duration

if TYPE_CHECKING:
    from holdfast.execution.parallel.collectives import Collectives

LEAVE_S = 3.0
"""For ranks to end in order, before they are killed."""
KILLED_S = 10.0
ANSWER_LOOK_S = 0.2
LAST_WORDS_S = 0.5
"""For what a rank had written when it ended."""

Answer = TypeVar("Answer", bound=messages.FromRank)


class RankProcess:
    """A child and its socket."""

    def __init__(self, number: int, segment: Segment, on_end: Callable[[], None]) -> None:
        self.number, self._on_end = number, on_end
        ours, theirs = socket.socketpair()
        started: Future[subprocess.Popen[bytes]] = Future()
        # The system ends a child when the thread that started it ends: that one lives as long as the child.
        watcher = threading.Thread(
            target=self._watch, args=(started, segment.descriptor, theirs), name=f"rank-{number}", daemon=True
        )
        watcher.start()
        try:
            self.process = started.result()
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        self.watcher = watcher

    def _watch(self, started: Future[subprocess.Popen[bytes]], segment: int, theirs: socket.socket) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "holdfast.engine.ranks.entry", str(os.getpid()), str(segment),
                 str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(segment, theirs.fileno()),
            )  # fmt: skip
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._on_end()

    def ending(self) -> str:
        code = self.process.returncode
        if code is None:
            return "it still runs"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class RankGroup:
    """`timeout_s`: how long another rank may let this one wait; 0: for ever."""

    def __init__(self, config: EngineConfig, plan: Plan, *, cores: int, timeout_s: float) -> None:
        self.size = len(plan.engine.shards)
        self.timeout_s, self.cores = timeout_s, cores
        self.threads = threads_of(cores, self.size, 0)
        self._segment = Segment(segment_layout(plan))
        self.on_end: Callable[[], None] | None = None
        """Called by another thread when a rank has ended."""
        self._ending, self._interrupted = False, False
        self._sender = Sender(self._segment, self._look)
        self._ranks = list[RankProcess]()
        self._shared: SharedMemoryCollectives | None = None
        try:
            for number in range(1, self.size):
                self._ranks.append(RankProcess(number, self._segment, self._on_end))
            self.store = open_store(None, self.size) if wants_store(config, plan) else None
            for rank in self._ranks:
                start = messages.StartRank(
                    rank=rank.number,
                    size=self.size,
                    config=dataclasses.asdict(config),
                    plan=plan,
                    threads=threads_of(cores, self.size, rank.number),
                    store_port=None if self.store is None else self.store.port,
                )
                rank.connection.send_bytes(messages.encode(start))
            # Those of GPUs are made by whoever has opened them.
            self.collectives = None if plan.engine.rank_gpus else self._make_collectives()
        except OSError as error:
            self.close()
            raise EngineDiedError(f"the ranks of this engine could not be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _make_collectives(self) -> Collectives:
        """Those over gloo wait until all ranks are there: they are made once the others have been told to start."""
        if self.store is not None:
            return GlooCollectives(self.store, 0, self.size, self.timeout_s)
        self._shared = SharedMemoryCollectives(self._segment, 0, self._look)
        return self._shared

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [rank.process.pid for rank in self._ranks]

    def tell_each(self, message: messages.JoinRanks) -> None:
        """By their sockets: while they start."""
        self.check()
        with contextlib.suppress(OSError):  # Of one that has ended: what it said last is read next.
            for rank in self._ranks:
                rank.connection.send_bytes(messages.encode(message))

    def send_plan(self, plan: StepPlan) -> None:
        self._send(messages.STEP + messages.encode(plan))

    def order(self, order: messages.Order) -> None:
        """Of all other ranks, after the plans they have got so far."""
        self._send(messages.ORDER + messages.encode(order))

    def _send(self, message: bytes) -> None:
        self.check()
        if self._interrupted:
            self._go_on()
        self._sender.send(message)

    def interrupt(self) -> None:
        """This rank has left a step in the middle: the others leave it too, wherever they are."""
        self._interrupted = True
        if self._shared is None or self._ending:
            return
        self._segment.resume.post(self._shared.count + 2)  # Ahead of all of them, who are at most one ahead of this.
        self._alarm()

    def _go_on(self) -> None:
        if self._shared is None:
            raise EngineDiedError(
                "a step was left in the middle, which ranks that are joined by gloo, or on GPUs, cannot go on from"
            )
        count = self._shared.count + 2
        self._segment.calm = self._segment.alarm.value
        for rank in self._ranks:
            self._segment.counts[rank.number].wait(count, self._look)
        self._shared.go_on_from(count)
        self._sender.go_on()
        self._interrupted = False

    def answers(self, kind: type[Answer], on_loading: Callable[[], None] | None = None) -> list[Answer]:
        """What each says next of this kind. `on_loading`: called when one has loaded a tensor."""
        return [self._answer(rank, kind, on_loading) for rank in self._ranks]

    def _answer(self, rank: RankProcess, kind: type[Answer], on_loading: Callable[[], None] | None) -> Answer:
        while True:
            while not rank.connection.poll(ANSWER_LOOK_S):
                self.check()
            try:
                heard = messages.decode_from_rank(rank.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._died(rank) from None
            if isinstance(heard, kind):
                return heard
            if isinstance(heard, messages.RankFailed):
                raise _told(rank, heard)
            if on_loading is not None:
                on_loading()

    def check(self) -> None:
        """Raises where a rank has ended."""
        for rank in self._ranks:
            if rank.process.poll() is not None:
                raise self._died(rank)

    def _died(self, rank: RankProcess) -> EngineError:
        with contextlib.suppress(EOFError, OSError):
            while rank.connection.poll(LAST_WORDS_S):
                heard = messages.decode_from_rank(rank.connection.recv_bytes())
                if isinstance(heard, messages.RankFailed):
                    return _told(rank, heard)
        return EngineDiedError(f"rank {rank.number} (pid {rank.process.pid}) has ended: {rank.ending()}")

    def _look(self, waited_s: float) -> None:
        """While others are awaited."""
        self.check()
        if self._segment.alarm.value != self._segment.calm and not self._interrupted:
            raise EngineDiedError("a rank has ended")
        if 0 < self.timeout_s <= waited_s:
            counts = self._segment.counts
            behind = [rank for rank in self._ranks if counts[rank.number].value < counts[0].value]
            names = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in behind or self._ranks)
            raise EngineHungError(
                f"{names} has not come to where the other ranks wait for it",
                needed=f"within {format_duration(self.timeout_s)}",
                found=f"{format_duration(waited_s)} without it",
            )

    def _on_end(self) -> None:
        if not self._ending:
            self._alarm()
            if self.on_end is not None:
                self.on_end()

    def _alarm(self) -> None:
        self._segment.alarm.post(self._segment.alarm.value + 1)

    def close(self) -> None:
        """Ends all of them, in order where they listen."""
        if self._ending:
            return
        self._ending = True
        with contextlib.suppress(EngineError):
            self.timeout_s = LEAVE_S
            self.order(messages.Leave())
            _await_end(self._ranks, LEAVE_S)
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.watcher.join(KILLED_S)
            rank.connection.close()
        if not any(rank.watcher.is_alive() for rank in self._ranks):  # One that hangs in the system may still say so.
            self._segment.close()


def segment_layout(plan: Plan) -> SegmentLayout:
    """Of the memory that plans travel by, and on a CPU numbers too."""
    engine = plan.engine
    return SegmentLayout(len(engine.shards), SLOT_PAGE_BYTES if engine.rank_gpus else engine.slot_bytes)


def wants_store(config: EngineConfig, plan: Plan) -> bool:
    """Whether ranks find one another by a port: for gloo, or for NCCL, which has no two ranks on one GPU."""
    uuids = [gpu.uuid for gpu in plan.engine.rank_gpus]
    return len(set(uuids)) == len(uuids) if uuids else config.disable_custom_all_reduce


def _await_end(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    for rank in ranks:
        rank.watcher.join(max(0.0, until_s - time.monotonic()))


def _told(rank: RankProcess, said: messages.RankFailed) -> EngineError:
    """Why a rank has ended, in its own words and with its number."""
    error = said.failure.error()
    error.message = f"rank {rank.number}: {error.message}"
    return error  # type: ignore[return-value]
