"""The agent of a node that is not the head: joins, starts the ranks of its node, passes on what they and the head say,
ends them, and joins again. `holdfast serve --node-rank 1` runs one.

    head ──► mail ──► memory that the ranks of this node share ──► ranks
    ranks ──► answers, ends, counts ──► head

Loads and computes nothing; its ranks are its children, and end with it however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.ranks import messages as rank_messages
from holdfast.engine.ranks.children import RankProcess
from holdfast.engine.ranks.cpu import segment_layout
from holdfast.engine.ranks.nodes import messages
from holdfast.engine.ranks.nodes.join import head_hears_failure, join_head
from holdfast.engine.ranks.nodes.report import digests_for, named_ranks, report_of, sources_digest
from holdfast.engine.ranks.nodes.wire import SIGN_S, Wire
from holdfast.errors import HoldfastError
from holdfast.execution.parallel.mailbox import Sender
from holdfast.execution.parallel.segment import Segment

log = logging.getLogger("holdfast")

KILLED_S = 10.0
LEAVE_S = 3.0
OWN_SETTINGS = ("model", "revision", "download_dir", "node_rank", "node_addr", "threads")
"""That a node has for itself; all others are the head's."""


class NodeAgent:
    """`files`: of the model, as they lie on this node. `on_joined`: called with whether it has joined a head, when that
    has changed."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, on_joined: Callable[[bool], None] | None = None
    ) -> None:
        self._config, self._files = replace(config, model=str(files.path), revision=None), files
        self.joined, self._on_joined = False, on_joined

    def run(self) -> None:
        """Until the head says that it is over. Raises what the head refuses this node for, and EngineError where there
        is no head for longer than node_timeout."""
        while True:
            # Before anybody waits for it: a slow disk may take longer than the head lets a stranger be silent.
            with head_hears_failure(self._config):
                digests = digests_for(self._config, self._files)
                sources_digest()
            wire = join_head(self._config, partial(report_of, self._config, self._files, checkpoint=digests))
            log.info("joined the head at %s port %d", self._config.master_addr, self._config.master_port)
            try:
                self._note_joined(True)
                if not _Followed(wire, self._own).run():
                    return
            finally:
                self._note_joined(False)
            log.warning("the ranks of this node have ended; joining the head again")

    def _note_joined(self, joined: bool) -> None:
        self.joined = joined
        if self._on_joined is not None:
            self._on_joined(joined)

    def _own(self, start: rank_messages.StartRank) -> rank_messages.StartRank:
        """With the settings that this node has for itself."""
        own = {name: getattr(self._config, name) for name in OWN_SETTINGS}
        return msgspec.structs.replace(start, config={**start.config, **own})


class _Followed:
    """One engine's ranks of this node, from joining to the end."""

    def __init__(self, wire: Wire, own: Callable[[rank_messages.StartRank], rank_messages.StartRank]) -> None:
        self._wire, self._own = wire, own
        self._ranks, self._threads = list[RankProcess](), list[threading.Thread]()
        self._segment: Segment | None = None
        self._mail = queue.SimpleQueue[bytes | None]()
        self._over = threading.Event()

    def run(self) -> bool:
        """Whether to join again."""
        self._wire.wait_at_most(0.0)  # As long as it takes: signs of life go the other way.
        signs = threading.Thread(target=self._give_signs, name="signs", daemon=True)
        signs.start()
        try:
            while True:
                frame = self._wire.receive()
                if frame[:1] == messages.MAIL:
                    self._mail.put(frame[1:])
                    continue
                said = messages.decode_from_head(frame[1:])
                if isinstance(said, messages.StartNode):
                    try:
                        self._start([self._own(start) for start in said.ranks])
                    except OSError as error:
                        log.warning("the ranks of this node could not be started: %s", error)
                        return True
                elif isinstance(said, messages.TellRank):
                    self._tell(said)
                elif isinstance(said, messages.EndNode):
                    if said.failure is not None and not said.again:
                        raise said.failure.error()
                    if said.failure is not None:
                        log.warning("the head has not started again: %s", said.failure.message)
                    self._let_leave(LEAVE_S if not said.again else 0.0)
                    return said.again
        except HoldfastError:  # Of which some are OSErrors too.
            raise
        except (OSError, EOFError, msgspec.DecodeError) as error:
            log.warning("the connection to the head has ended%s", f": {error}" if str(error) else "")
            return True
        finally:
            self._over.set()
            self._mail.put(None)
            self._end()
            signs.join()

    def _start(self, starts: list[rank_messages.StartRank]) -> None:
        self._segment = Segment(segment_layout(starts[0].plan.engine))
        numbers = [start.rank for start in starts]
        log.info("starting %s of %d", named_ranks(range(numbers[0], numbers[-1] + 1)), starts[0].size)
        sender = Sender(self._segment, self._look, numbers)
        # A thread of its own: while a rank does not take its mail, the head is heard all the same.
        self._begin("mail", self._pass_on, sender)
        for start in starts:
            rank = RankProcess(start.rank, self._segment, lambda: None)
            self._ranks.append(rank)
            rank.connection.send_bytes(rank_messages.encode(start))
        self._say(messages.NodeStarted({rank.number: rank.pid for rank in self._ranks}))
        for rank in self._ranks:
            self._begin(f"answers-{rank.number}", self._listen, rank)

    def _tell(self, said: messages.TellRank) -> None:
        with contextlib.suppress(OSError):  # Of one that has ended, which the head hears of.
            for rank in self._ranks:
                if rank.number == said.rank:
                    rank.connection.send_bytes(said.message)

    def _begin(self, name: str, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(target=target, args=(argument,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)  # Started ones alone are awaited at the end.

    def _pass_on(self, sender: Sender) -> None:
        with contextlib.suppress(_MailIsVain):
            while (mail := self._mail.get()) is not None:
                sender.send(mail)

    def _look(self, waited_s: float) -> None:
        """The head hears of a rank that has ended, and ends the others."""
        if self._over.is_set() or any(rank.ended for rank in self._ranks):
            raise _MailIsVain

    def _listen(self, rank: RankProcess) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._say(messages.RankSaid(rank.number, rank.connection.recv_bytes()))
        while not rank.await_end(1.0) and not self._over.is_set():
            pass
        self._say(messages.RankEnded(rank.number, rank.ending()))

    def _give_signs(self) -> None:
        while not self._over.wait(SIGN_S):
            segment, numbers = self._segment, [rank.number for rank in self._ranks]
            words = ([], [], []) if segment is None else (segment.counts, segment.sent, segment.alive)
            counts, sent, alive = ([row[number].value for number in numbers] if row else [] for row in words)
            stopped = [rank.number for rank in list(self._ranks) if rank.stopped]
            self._say(messages.Sign(counts, sent, alive, stopped))

    def _say(self, message: messages.FromAgent) -> None:
        with contextlib.suppress(OSError):  # Whoever receives notices it.
            self._wire.send(messages.encode(message))

    def _let_leave(self, limit_s: float) -> None:
        """In order, all of them within that time: they have been told to by mail."""
        until_s = time.monotonic() + limit_s
        for rank in self._ranks:
            rank.await_end(until_s - time.monotonic())

    def _end(self) -> None:
        for rank in self._ranks:
            rank.kill()
        until_s = time.monotonic() + KILLED_S  # For all of them together.
        gone = [rank.await_end(until_s - time.monotonic()) for rank in self._ranks]
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for rank in self._ranks:
            rank.connection.close()
        self._wire.close()
        if self._segment is not None and all(gone):
            self._segment.close()


class _MailIsVain(Exception):
    pass
