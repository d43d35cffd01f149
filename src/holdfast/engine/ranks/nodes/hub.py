"""The head's side of an engine on several machines: it listens for the agents of other nodes, lets in who has the
secret and the same checkpoint, version and sizes, and speaks to the ranks that they start.

    listener    a thread; whoever comes is answered by a thread of its own, also while the engine runs (a second node of
                the same number is told so)
    links       one for each node: a thread hears it, and silence is its end

Starts no process itself and knows nothing of models. Whoever starts agents (a person, LeaderWorkerSet, Ray) is nothing
to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast.config.nodes import WRONG_NODES
from holdfast.engine.ranks.messages import StartRank
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.addresses import named_place, refuse_unreachable
from holdfast.engine.ranks.nodes.link import STARTED_S, NodeLink, NodeRank
from holdfast.engine.ranks.nodes.report import (
    NAME_CHARS,
    named_ranks,
    other_protocol,
    refuse_unequal,
    shown_failure,
    shown_report,
)
from holdfast.engine.ranks.nodes.wire import MOST_BEFORE_PROOF, Wire
from holdfast.errors import ConfigurationError, EngineError, HoldfastError
from holdfast.execution.parallel.segment import Segment
from holdfast.execution.parallel.sockets.key_proof import proof, proves
from holdfast.execution.parallel.sockets.listen import OPEN_PORTS, listen_at
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.records import Failure
from holdfast.units import format_duration, shorten

log = logging.getLogger("holdfast")

NODES_MISSING = "HF446"
HANDSHAKE_S = 5.0
MOST_STRANGERS = 32
"""That are answered at a time; more are turned away without a word."""
LOOK_S = 0.2
SAID_EVERY_S = 10.0


class NodeHub:
    """`own`: what the head says of itself, which others must agree with."""

    def __init__(
        self, address: str, port: int, secret_text: str, own: messages.NodeReport, stages: int, size: int
    ) -> None:
        self.own, self._key = own, secret.derive_key(secret_text)
        self.spread = Spread(size, stages, own.nodes)
        self._links = dict[int, NodeLink]()
        self._refusal: HoldfastError | None = None
        self._changed, self._closing = threading.Condition(), False
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._listener = _listen(address, port)
        self._place = named_place(address, self.port)
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def reports(self) -> list[messages.NodeReport]:
        """Of all nodes, the head's first."""
        return [self.own, *(self._links[node].report for node in range(1, self.spread.nodes))]

    def await_nodes(self, timeout_s: float, beat: Callable[[int, int], None]) -> None:
        """Until all are there. `beat`: called meanwhile, with how many nodes are there and how many there are."""
        began_s, said_s = time.monotonic(), -SAID_EVERY_S  # At once, then now and then.
        others = range(1, self.spread.nodes)
        while True:
            with self._changed:
                self._changed.wait(LOOK_S)
                refusal = self._refusal
                # One that has come and gone meanwhile is awaited like one that has not come.
                missing = [node for node in others if node not in self._links or self._links[node].lost]
            if refusal is not None:
                raise refusal
            now_s = time.monotonic()
            beat(self.spread.nodes - len(missing), self.spread.nodes)
            if not missing:
                return
            names = ", ".join(f"node {node} ({named_ranks(self.spread.ranks_of(node))})" for node in missing)
            if now_s - said_s >= SAID_EVERY_S:
                said_s = now_s
                log.info("waiting for %s at %s", names, self._place)
            if now_s - began_s >= timeout_s:
                raise EngineError(
                    f"{names} has not joined",
                    code=NODES_MISSING,
                    needed=f"all {self.spread.nodes} nodes within {format_duration(timeout_s)}",
                    found=f"{self.spread.nodes - len(missing)} of them at {self._place}",
                    fix=f"start it with --node-rank {missing[0]} and the head's --master-addr, --master-port and"
                    f" secret, and let it through to that port; for what ranks say to one another, {OPEN_PORTS}",
                )

    def start(
        self, starts: Sequence[StartRank], segment: Segment, on_end: Callable[[], None], beat: Callable[[], None]
    ) -> list[NodeRank]:
        """Ranks of other nodes, by their agents. `segment`: which shows what they have counted. `on_end`: called by
        another thread when one has ended, or its node is lost. `beat`: called while agents are awaited."""
        links = [self._links[node] for node in range(1, self.spread.nodes)]
        for link in links:
            ranks = self.spread.ranks_of(link.node)
            link.start([start for start in starts if start.rank in ranks], segment, on_end)
        until_s = time.monotonic() + STARTED_S
        return [rank for link in links for rank in link.await_started(until_s, beat)]

    def post(self, mail: bytes) -> None:
        """To the ranks of all other nodes, in this order. One that is lost is noticed otherwise."""
        for link in self._links.values():
            link.post(mail)

    def expect_end(self, *, again: bool) -> None:
        """Ranks that are killed from now on are so because of this: a node hears only the first word of its end."""
        for link in self._links.values():
            link.again = again

    def close(self, *, again: bool, failure: Failure | None = None) -> None:
        """`again`: another engine takes this one's place, and nodes shall join it. `failure`: why this one has not
        started. A second time does nothing."""
        with self._changed:  # Nobody is let in after this who would not be told.
            if self._closing:
                return
            self._closing, links = True, list(self._links.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # All at once: a node that is gone keeps nobody waiting for the others.
        ends = [
            threading.Thread(target=_end, args=(link, again, failure), name=f"end-{link.node}", daemon=True)
            for link in links
        ]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="node-joins", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        link = None
        try:
            with contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
                link = self._let_in(Wire(connection))
        finally:
            self._strangers.release()
            if link is None:
                connection.close()
        if link is not None:
            link.listen()

    def _let_in(self, wire: Wire) -> NodeLink | None:
        """None: it is not one of ours, and has been told so."""
        wire.wait_at_most(HANDSHAKE_S, for_all=True)
        hello, nonce = messages.decode_hello(wire.receive(MOST_BEFORE_PROOF)), os.urandom(messages.NONCE_BYTES)
        head_proof = proof(self._key, secret.HEAD, hello.nonce, nonce)
        wire.send(messages.encode(messages.Challenge(nonce, head_proof, messages.PROTOCOL, self.own.version)))
        said = self._understood(hello, wire)
        if not isinstance(said, messages.Join | messages.CannotJoin) or not proves(
            said.proof, self._key, secret.AGENT, hello.nonce, nonce
        ):
            log.warning("a node at %s was refused: it has another secret", wire.other_host)
            wire.send(messages.encode(messages.Refused(Failure.of(other_secret()))))
            return None
        if isinstance(said, messages.CannotJoin):
            self._note_cannot(said, wire)
            return None
        report = shown_report(said.report)
        try:
            with self._changed:
                if self._closing:
                    return None
                self._check(report)
                link = NodeLink(wire, report, self.spread.ranks_of(report.node))
                wire.send(messages.encode(messages.Welcome()))
                self._links[link.node] = link
                self._changed.notify_all()
        except ConfigurationError as error:
            log.warning("a node at %s was refused: %s", wire.other_host, error.message)
            wire.send(messages.encode(messages.Refused(Failure.of(error))))
            return None
        log.info("node %d of %d has joined: %s at %s", link.node, self.spread.nodes, link.report.name, wire.other_host)
        return link

    def _understood(self, hello: messages.NodeHello, wire: Wire) -> messages.FromAgent:
        """The answer to a challenge. One of another protocol says CannotJoin, which all understand; where it does not,
        it is told so, and has proven nothing that would end the head's start."""
        said = wire.receive(MOST_BEFORE_PROOF)
        try:
            return messages.decode_from_agent(said)
        except msgspec.DecodeError:
            if hello.protocol != messages.PROTOCOL:
                error = other_protocol(hello.version, self.own.version, hello.protocol, messages.PROTOCOL)
                log.warning("a node at %s was refused: %s", wire.other_host, error.message)
                wire.send(messages.encode(messages.Refused(Failure.of(error))))
            raise

    def _note_cannot(self, said: messages.CannotJoin, wire: Wire) -> None:
        """A node that cannot join ends the start of the head: waiting would not help."""
        error = shown_failure(said.failure).error()
        error.message = f"node {said.node} ({shorten(said.name, NAME_CHARS)}): {error.message}"
        wire.send(messages.encode(messages.Refused(Failure.of(error))))
        with self._changed:
            self._refusal = error
            self._changed.notify_all()

    def _check(self, report: messages.NodeReport) -> None:
        """What is wrong with a node that has the secret ends the start of the head too: waiting would not help."""
        node, known = report.node, self._links.get(report.node)
        if not 0 < node < self.spread.nodes and report.nodes == self.spread.nodes:
            raise ConfigurationError(
                f"there is no place for a node {node}", code=WRONG_NODES, needed=f"1 to {self.spread.nodes - 1}"
            )
        if known is not None and report.agent and report.agent == known.report.agent:
            known.lose("its agent has joined again")  # Which saw the end of its connection before the head did.
        if known is not None and not known.lost:
            raise ConfigurationError(
                f"node {node} has joined already: {known.report.name}, pid {known.report.pid}",
                code=WRONG_NODES,
                needed="another --node-rank for each node",
                found=f"two nodes {node}",
                field="node_rank",
            )
        try:
            ranks = self.spread.ranks_of(node) if 0 < node < self.spread.nodes else range(1)
            refuse_unequal(self.own, report, ranks)
        except ConfigurationError as error:
            self._refusal = error
            self._changed.notify_all()
            raise


def _end(link: NodeLink, again: bool, failure: Failure | None) -> None:
    link.end(again=again, failure=failure)
    link.close()


def other_secret() -> ConfigurationError:
    return ConfigurationError(
        "this node and the head have different secrets",
        code=WRONG_NODES,
        needed="the same HOLDFAST_NODE_SECRET, or --node-secret-file, on all nodes",
        field="node_secret_file",
    )


def _listen(address: str, port: int) -> socket.socket:
    try:
        refuse_unreachable(address)
        return listen_at(address, port, backlog=MOST_STRANGERS)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigurationError(
            f"rank 0 cannot listen for other nodes at {address} port {port}: {error}",
            code=WRONG_NODES,
            needed="an address of this machine and a port that nobody has",
            fix="--master-addr with an address of the head, or another --master-port on all nodes",
            field="master_port",
        ) from error
