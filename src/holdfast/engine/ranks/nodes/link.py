"""One node that has joined, as the head sees it: what it was told, what its ranks say, and that it is there.

A node whose connection ends, or that gives no sign for long, is lost, and all of its ranks with it. Decides nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from holdfast.engine.ranks.messages import StartRank
from holdfast.engine.ranks.nodes import messages
from holdfast.engine.ranks.nodes.wire import Wire
from holdfast.errors import EngineDiedError
from holdfast.execution.parallel.segment import Segment
from holdfast.records import Failure
from holdfast.units import shorten

STILL_S = 15.0
"""Without a sign of an agent whose machine answers: then it stands still."""
HEARD_S = 2.0
"""For a node to hear that it is over, and to close its side."""
STARTED_S = 30.0
"""For an agent to start the processes of its ranks."""


class _Inbox:
    """What a rank of another node says. `tell`: says something to it."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self.send_bytes = tell
        self._messages, self._closed, self._changed = deque[bytes](), False, threading.Condition()

    def put(self, message: bytes) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._messages) or self._closed, timeout_s)

    def recv_bytes(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages) or self._closed)
            if not self._messages:
                raise EOFError
            return self._messages.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class NodeRank:
    """A RankHandle of another node."""

    def __init__(self, number: int, link: NodeLink) -> None:
        self.number, self.pid, self.stopped = number, 0, False
        self.connection = _Inbox(lambda message: link.tell(number, message))
        self._link, self._ending, self._ended = link, "", threading.Event()

    @property
    def name(self) -> str:
        return f"rank {self.number} (node {self._link.node}, {self._link.report.name}, pid {self.pid})"

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def ending(self) -> str:
        return self._ending or "it still runs"

    def kill(self) -> None:
        self._link.end(again=self._link.again)

    def await_end(self, timeout_s: float) -> bool:
        return self._ended.wait(max(0.0, timeout_s))

    def note_end(self, ending: str) -> None:
        if not self.ended:
            self._ending = ending
            self._ended.set()
        self.connection.close()


class NodeLink:
    def __init__(self, wire: Wire, report: messages.NodeReport, ranks: range) -> None:
        self.report, self.node, self._numbers = report, report.node, ranks
        self.lost, self.again = False, True
        """`again`: whether it shall join another engine after this one, where a rank of it is killed."""
        self._wire, self._ranks, self._started = wire, dict[int, NodeRank](), threading.Event()
        self._segment: Segment | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._watching, self._over = threading.Lock(), threading.Event()

    def start(self, starts: Sequence[StartRank], segment: Segment, on_end: Callable[[], None]) -> None:
        self._segment, self._on_end = segment, on_end
        self._ranks = {start.rank: NodeRank(start.rank, self) for start in starts}
        self._say(messages.StartNode(list(starts)))

    def await_started(self, until_s: float, beat: Callable[[], None]) -> list[NodeRank]:
        """Its ranks, once their processes have been started."""
        while not self._started.wait(0.1):
            beat()
            if self.lost or time.monotonic() > until_s:
                why = "it is lost" if self.lost else f"nothing was heard within {STARTED_S:g} s"
                raise EngineDiedError(f"node {self.node} ({self.report.name}) has not started its ranks: {why}")
        return list(self._ranks.values())

    def post(self, mail: bytes) -> None:
        self._send(messages.MAIL + mail)

    def tell(self, rank: int, message: bytes) -> None:
        self._say(messages.TellRank(rank, message))

    def end(self, *, again: bool, failure: Failure | None = None) -> None:
        self._say(messages.EndNode(again, failure))

    def _say(self, message: messages.StartNode | messages.TellRank | messages.EndNode) -> None:
        self._send(messages.MESSAGE + messages.encode(message))

    def _send(self, frame: bytes) -> None:
        if not self.lost:
            try:
                self._wire.send(frame)
            except OSError as error:
                self.lose(f"nothing can be sent to it: {error}")

    def detach(self) -> None:
        """From the memory of rank 0, which is given back after this."""
        with self._watching:
            self._segment, self._on_end = None, lambda: None

    def close(self) -> None:
        """After what was said last has been heard."""
        self.detach()
        self.lost = True
        self._wire.finish()
        self._over.wait(HEARD_S)
        self._wire.close()

    def listen(self) -> None:
        """Until it is lost, or closed."""
        self._wire.wait_at_most(STILL_S)
        try:
            while True:
                self._hear(messages.decode_from_agent(self._wire.receive()))
        except TimeoutError:
            self.lose(f"it gave no sign for {STILL_S:g} s")
        except (EOFError, OSError, msgspec.DecodeError) as error:
            self.lose(f"its connection has ended{f': {error}' if str(error) else ''}")
        finally:
            self._over.set()

    def _hear(self, heard: messages.FromAgent) -> None:
        if isinstance(heard, messages.Sign):
            self._note_counts(heard)
        elif isinstance(heard, messages.RankSaid) and heard.rank in self._ranks:
            self._ranks[heard.rank].connection.put(heard.message)
        elif isinstance(heard, messages.NodeStarted):
            for rank, pid in heard.pids.items():
                if rank in self._ranks:
                    self._ranks[rank].pid = pid
            self._started.set()
        elif isinstance(heard, messages.RankEnded) and heard.rank in self._ranks:
            self._ranks[heard.rank].note_end(shorten(heard.ending))
            self._tell_end()

    def _note_counts(self, sign: messages.Sign) -> None:
        for rank in self._ranks.values():
            rank.stopped = rank.number in sign.stopped
        with self._watching:
            if (segment := self._segment) is None:
                return
            shown = ((segment.counts, sign.counts), (segment.sent, sign.sent), (segment.alive, sign.alive))
            for words, values in shown:
                for number, value in zip(self._numbers, values, strict=False):
                    if words:
                        words[number].post(value)

    def lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = True
        for rank in self._ranks.values():
            rank.note_end(f"node {self.node} is lost: {why}")
        with contextlib.suppress(OSError):
            self._wire.close()
        self._tell_end()

    def _tell_end(self) -> None:
        with self._watching:
            self._on_end()
