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
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from holdfast.config import EngineConfig
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.cpu import segment_layout, threads_of
from holdfast.errors import EngineDiedError, EngineError, EngineHungError
from holdfast.execution.parallel.gloo import open_store
from holdfast.execution.parallel.gpu.link import GpuRankLink
from holdfast.execution.parallel.mailbox import Sender
from holdfast.execution.parallel.rank_link import RankLink
from holdfast.execution.parallel.segment import Segment
from holdfast.planner import Plan
from holdfast.records import StepPlan
from holdfast.units import format_duration

LEAVE_S = 3.0
"""For ranks to end in order, before they are killed."""
KILLED_S = 10.0
ANSWER_LOOK_S = 0.2
AHEAD, HALF = 1 << 20, 1 << 31
"""That all ranks go on with their counts after a step was left, further than any of them can have come; and half of the
numbers that a count has."""
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
    """`timeout_s`: how long another rank may let this one wait; 0: for ever. `beat`: called while it does."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        *,
        cores: int,
        timeout_s: float,
        beat: Callable[[], None] | None = None,
    ) -> None:
        self.size = plan.engine.rank_count
        self.timeout_s, self.cores = timeout_s, cores
        self.threads = threads_of(cores, self.size, 0)
        self._segment = Segment(segment_layout(plan.engine))
        self._ending, self._interrupted, self._resume = False, False, 0
        self.beat = beat or (lambda: None)
        self._sender = Sender(self._segment, self._look)
        self._ranks = list[RankProcess]()
        self.link = GpuRankLink() if plan.engine.rank_gpus else RankLink(self._segment, 0, self._look)
        self._progress, self._progressed_s = [0], 0.0
        self._settled = list[tuple[int, messages.AdapterSettled]]()
        try:
            for number in range(1, self.size):
                self._ranks.append(RankProcess(number, self._segment, self._on_end))
            self.store = open_store(None, self.size) if _wants_store(config, plan) else None
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
            # Waits until all ranks are there, which have been told to start by now. Those of GPUs are joined later.
            if self.store is not None and isinstance(self.link, RankLink):
                self.link.use_gloo(self.store, self.timeout_s)
        except OSError as error:
            self.close()
            raise EngineDiedError(f"the ranks of this engine could not be started: {error}") from error
        except BaseException:
            self.close()
            raise

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

    def tell_sampled(self, slots: list[int], tokens: list[int]) -> None:
        """Of a pipeline: to the other ranks of the first stage, before the step that goes on from these tokens."""
        self._send(messages.SAMPLED + messages.encode(messages.Sampled(slots, tokens)))

    def interrupt(self) -> None:
        """This rank has left a step in the middle: the others leave it too, wherever they are."""
        self._interrupted = True
        if not self.link.resumes or self._ending:
            return
        segment = self._segment
        words = [word.value for word in (*segment.counts, *segment.sent, *segment.taken)]
        first = words[0]  # Counts come round: whoever is ahead of the first is so by less than half of all numbers.
        self._resume = first + AHEAD + max((word - first + HALF) % (2 * HALF) - HALF for word in words)
        segment.resume.post(self._resume)
        self._alarm()

    def _go_on(self) -> None:
        if not self.link.resumes:
            assert self.link.collectives is not None
            name = self.link.collectives.name
            raise EngineDiedError(
                f"a step was left in the middle, which ranks that are joined by {name} cannot go on from"
            )
        self._segment.calm = self._segment.alarm.value
        for rank in self._ranks:
            self._segment.counts[rank.number].wait(self._resume, self._look)
        self.link.go_on_from(self._resume)
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
            if isinstance(heard, messages.AdapterSettled):
                self._settled.append((rank.number, heard))
                continue
            if on_loading is not None:
                on_loading()

    def settled_adapters(self, wait_s: float) -> list[tuple[int, messages.AdapterSettled]]:
        """What ranks have said of LoRA adapters since it was asked last, each with its number. Waits so long at most
        for a first word."""
        by_connection = {rank.connection: rank for rank in self._ranks}
        ready = wait(list(by_connection), 0.0 if self._settled else wait_s)
        while ready:
            for rank in (by_connection[one] for one in ready if isinstance(one, Connection)):
                try:
                    heard = messages.decode_from_rank(rank.connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._died(rank) from None
                if isinstance(heard, messages.RankFailed):
                    raise _told(rank, heard)
                assert isinstance(heard, messages.AdapterSettled), "nothing else is said without being asked"
                self._settled.append((rank.number, heard))
            ready = wait(list(by_connection), 0.0)
        found, self._settled = self._settled, []
        return found

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
        waited_s = self._without_progress_s(waited_s)
        if 0 < self.timeout_s <= waited_s:
            behind = self._behind()
            names = ", ".join(f"rank {rank.number} (pid {rank.process.pid})" for rank in behind or self._ranks)
            raise EngineHungError(
                f"{names} has not come to where the other ranks wait for it",
                needed=f"within {format_duration(self.timeout_s)}",
                found=f"{format_duration(waited_s)} without it",
            )
        self.beat()

    def _without_progress_s(self, waited_s: float) -> float:
        """Of a pipeline: the stages behind may take long for all of their layers, but each of these is seen."""
        alive = [word.value for word in self._segment.alive]
        if alive and (alive != self._progress or waited_s < self._progressed_s):
            self._progress, self._progressed_s = alive, waited_s
        return waited_s - self._progressed_s if alive else waited_s

    def _behind(self) -> list[RankProcess]:
        """Who has not come: of the first stage that has not handed on what it was given, those who counted least."""
        counts, sent, each = self._segment.counts, self._segment.sent, self._segment.layout.tensor_parallel
        # What the last stage sends is answers, of which a step may have several: it is meant where no other is.
        handed_on = [sent[first].value for first in range(0, self.size - each, each)] if sent else []
        stage = next((at for at in range(1, len(handed_on)) if handed_on[at] < handed_on[at - 1]), len(handed_on))
        for ranks in (range(each), range(stage * each, (stage + 1) * each)):
            most = max(counts[rank].value for rank in ranks)
            behind = [rank for rank in self._ranks if rank.number in ranks and counts[rank.number].value < most]
            if behind:
                return behind
        return [rank for rank in self._ranks if rank.number in ranks]

    def _on_end(self) -> None:
        if not self._ending:
            self._alarm()
            self.link.give_up()

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


def _wants_store(config: EngineConfig, plan: Plan) -> bool:
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
