"""The other ranks as rank 0 sees them: started, told what to do, watched, ended.

    mailbox     plans and orders, to all of them in one order; to other nodes by their agents (nodes/hub.py)
    sockets     what each answers
    watchers    of children and of nodes: when a rank ends, all waiting ends with an alarm

A rank that dies or does not come is the end of the group: its owner ends all of them and starts a new one. Knows
nothing of models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from holdfast.config import EngineConfig
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.children import RankHandle, RankProcess
from holdfast.engine.ranks.cpu import segment_layout, threads_of
from holdfast.errors import EngineDiedError, EngineHungError, HoldfastError
from holdfast.execution.parallel.gpu.link import GpuRankLink
from holdfast.execution.parallel.mailbox import Sender
from holdfast.execution.parallel.rank_link import Meeting, RankLink
from holdfast.execution.parallel.segment import Segment
from holdfast.execution.parallel.sockets.gloo import LOOPBACK, open_store
from holdfast.execution.parallel.sockets.key_proof import KEY_BYTES
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.planner import Plan
from holdfast.records import StepPlan
from holdfast.units import format_duration

if TYPE_CHECKING:
    from holdfast.engine.ranks.nodes.hub import NodeHub

LEAVE_S = 3.0
"""For ranks to end in order, before they are killed."""
KILLED_S = 10.0
ANSWER_LOOK_S = 0.2
SETTLED_LOOK_S = 0.001
AHEAD, HALF = 1 << 20, 1 << 31
"""That all ranks go on with their counts after a step was left, further than any of them can have come; and half of the
numbers that a count has."""
HEARD_OF_S = 2.0
"""For the end of a rank on another node to be heard of, after its connections have ended."""
NOT_COME = "has not come to where the other ranks wait for it"
LAST_WORDS_S = 0.5
"""For what a rank had written when it ended."""

Answer = TypeVar("Answer", bound=messages.FromRank)


class RankGroup:
    """`timeout_s`: how long another rank may let this one wait; 0: for ever. `beat`: called while it does. `hub`: with
    all other nodes joined; it starts the ranks there."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        *,
        cores: int,
        timeout_s: float,
        beat: Callable[[], None] | None = None,
        hub: NodeHub | None = None,
    ) -> None:
        self.size = plan.engine.rank_count
        self.timeout_s, self._hub = timeout_s, hub
        nodes = [cores] if hub is None else [report.cores for report in hub.reports]
        self.spread = Spread(self.size, max(1, len(plan.engine.stages)), len(nodes))
        each = self.spread.each
        self.threads = [threads_of(nodes[rank // each], each, rank % each) for rank in range(self.size)]
        """Of each rank."""
        self._segment = Segment(segment_layout(plan.engine))
        self._ending, self._interrupted, self._resume, self._failed = False, False, 0, False
        self.beat = beat or (lambda: None)
        own = self.spread.ranks_of(0)[1:]
        self._sender = Sender(self._segment, self._look, own)
        self._ranks = list[RankHandle]()
        self.link = (
            GpuRankLink() if plan.engine.rank_gpus else RankLink(self._segment, 0, self._look, self.spread.nodes)
        )
        self._progress, self._progressed_s = [0], 0.0
        self._settled = list[tuple[int, messages.AdapterSettled]]()
        try:
            for number in own:
                self._ranks.append(RankProcess(number, self._segment, self._on_end))
            self._start(config, plan)
        except OSError as error:
            self.close()
            raise EngineDiedError(f"the ranks of this engine could not be started: {error}") from error
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, plan: Plan) -> None:
        """Tells all what to load; returns when those that do not share memory have found one another."""
        hosts = [LOOPBACK] if self._hub is None else [report.host for report in self._hub.reports]
        apart = self._hub is not None or _wants_store(config, plan)
        store = open_store(None, self.size, hosts[0]) if apart else None
        key = secrets.token_bytes(KEY_BYTES)
        self.meeting = None if store is None else Meeting(store, hosts[0], key, self.timeout_s)
        """Of this rank, with those that it shares no memory with."""
        starts = [
            messages.StartRank(
                rank=rank,
                size=self.size,
                config={**dataclasses.asdict(config), "node_secret": None},
                plan=plan,
                threads=self.threads[rank],
                store_port=None if store is None else store.port,
                store_host=hosts[0],
                host=hosts[self.spread.node_of(rank)],
                key=key,
            )
            for rank in range(self.size)
        ]
        for child in self._ranks:
            child.connection.send_bytes(messages.encode(starts[child.number]))
        if self._hub is not None:
            self._ranks += self._hub.start(starts, self._segment, self._on_end, self.beat)
        if self.meeting is not None and isinstance(self.link, RankLink):  # Those of GPUs are joined later.
            self.answers(messages.RankHere)
            self.link.meet(self.meeting, all_by_gloo=config.disable_custom_all_reduce)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [rank.pid for rank in self._ranks]

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
        if self._hub is not None:
            self._hub.post(message)
        self._sender.send(message)

    def tell_sampled(self, slots: list[int], tokens: list[int]) -> None:
        """Of a pipeline: to the other ranks of the first stage, before the step that goes on from these tokens."""
        self._send(messages.SAMPLED + messages.encode(messages.Sampled(slots, tokens)))

    def interrupt(self) -> None:
        """This rank has left a step in the middle: the others leave it too, wherever they are."""
        self._interrupted = True
        self._failed = self._failed or not self.link.resumes
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
            sums = self.link.collectives
            name = "sockets" if sums is None or self.spread.nodes > 1 else sums.name
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

    def _answer(self, rank: RankHandle, kind: type[Answer], on_loading: Callable[[], None] | None) -> Answer:
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
        until_s = time.monotonic() + wait_s
        while True:
            for rank in self._ranks:
                while rank.connection.poll(0.0):
                    self._settled.append((rank.number, self._said_of_adapter(rank)))
            if self._settled or time.monotonic() >= until_s:
                break
            time.sleep(SETTLED_LOOK_S)
        found, self._settled = self._settled, []
        return found

    def _said_of_adapter(self, rank: RankHandle) -> messages.AdapterSettled:
        try:
            heard = messages.decode_from_rank(rank.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._died(rank) from None
        if isinstance(heard, messages.RankFailed):
            raise _told(rank, heard)
        assert isinstance(heard, messages.AdapterSettled), "nothing else is said without being asked"
        return heard

    def explained(self, error: HoldfastError) -> HoldfastError:
        """Of what failed in this rank because another did: the end of that one, which may be heard of a little later,
        or that it stands still."""
        until_s = time.monotonic() + HEARD_OF_S
        while time.monotonic() < until_s:
            try:
                self.check()
            except HoldfastError as cause:  # Also a refusal: of a start that this rank has no memory for.
                return cause
            if stopped := [rank.name for rank in self._ranks if rank.stopped]:
                return EngineHungError(f"{', '.join(stopped)} {NOT_COME}", found=error.message)
            time.sleep(HEARD_OF_S / 20)
        return error

    def check(self) -> None:
        """Raises where a rank has ended."""
        for rank in self._ranks:
            if rank.ended:
                raise self._died(rank)

    def _died(self, rank: RankHandle) -> HoldfastError:
        with contextlib.suppress(EOFError, OSError):
            while rank.connection.poll(LAST_WORDS_S):
                heard = messages.decode_from_rank(rank.connection.recv_bytes())
                if isinstance(heard, messages.RankFailed):
                    return _told(rank, heard)
        return EngineDiedError(f"{rank.name} has ended: {rank.ending()}")

    def _look(self, waited_s: float) -> None:
        """While others are awaited."""
        self.check()
        if self._segment.alarm.value != self._segment.calm and not self._interrupted:
            raise EngineDiedError("a rank has ended")
        waited_s = self._without_progress_s(waited_s)
        if 0 < self.timeout_s <= waited_s:
            behind = self._behind()
            names = ", ".join(rank.name for rank in behind or self._ranks)
            raise EngineHungError(
                f"{names} {NOT_COME}",
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

    def _behind(self) -> list[RankHandle]:
        """Who has not come: of the first stage that has not handed on what it was given, those who counted least."""
        if stopped := [rank for rank in self._ranks if rank.stopped]:
            return stopped
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
        # Of an engine that ends by an error another is started, unless it was the start itself that failed; nodes that
        # wait for a head in vain end by themselves.
        again = self._failed or sys.exc_info()[0] is not None
        if self._hub is not None:
            self._hub.expect_end(again=again)
        with contextlib.suppress(HoldfastError):  # Whatever one has ended by, no other is left behind.
            self.timeout_s = LEAVE_S
            self.order(messages.Leave())
            _await_end(self._ranks, LEAVE_S)
        for rank in self._ranks:
            if not rank.ended:
                rank.kill()
        gone = _await_end(self._ranks, KILLED_S)
        for rank in self._ranks:
            rank.connection.close()
        self.link.close()
        if self._hub is not None:
            self._hub.close(again=again)
        if all(gone):  # One that hangs in the system may still say so.
            self._segment.close()


def _wants_store(config: EngineConfig, plan: Plan) -> bool:
    """Whether ranks find one another by a port: for gloo, for NCCL, which has no two ranks on one GPU, or for stages
    on GPUs that turn out not to map one another's memory."""
    uuids = [gpu.uuid for gpu in plan.engine.rank_gpus]
    if not uuids:
        return config.disable_custom_all_reduce
    return bool(plan.engine.stages) or len(set(uuids)) == len(uuids)


def _await_end(ranks: Sequence[RankHandle], timeout_s: float) -> list[bool]:
    """Whether each has ended, when all have or that time is over."""
    until_s = time.monotonic() + timeout_s
    return [rank.await_end(until_s - time.monotonic()) for rank in ranks]


def _told(rank: RankHandle, said: messages.RankFailed) -> HoldfastError:
    """Why a rank has ended, in its own words and with its number."""
    error = said.failure.error()
    error.message = f"rank {rank.number}: {error.message}"
    return error
