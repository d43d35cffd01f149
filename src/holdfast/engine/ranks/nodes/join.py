"""How an agent finds the head and joins it: connect, prove the secret, say what the node has. Knows no ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.addresses import named_place
from holdfast.engine.ranks.nodes.hub import HANDSHAKE_S, NODES_MISSING, SAID_EVERY_S, other_secret
from holdfast.engine.ranks.nodes.report import other_protocol, own_version
from holdfast.engine.ranks.nodes.wire import MOST_BEFORE_PROOF, Wire
from holdfast.errors import EngineError, HoldfastError
from holdfast.execution.parallel.sockets.key_proof import proof, proves
from holdfast.execution.parallel.sockets.listen import OPEN_PORTS
from holdfast.records import Failure
from holdfast.units import format_duration

log = logging.getLogger("holdfast")

TRY_EVERY_S = 0.5
CONNECT_S = 5.0
JOINED_S = 60.0
"""For the head's answer: it compares what it was told, and may have much to do."""


Report = Callable[[], messages.NodeReport | Failure]
"""Of a node, but for its address; or why it cannot join. It may also raise that."""


@contextlib.contextmanager
def head_hears_failure(config: EngineConfig) -> Iterator[None]:
    """Around what a node does before it joins: the head, which waits for it, hears why it does not come."""
    try:
        yield
    except HoldfastError as error:
        tell_cannot_join(config, error)
    except OSError as error:
        tell_cannot_join(config, _unread(config, error))


def tell_cannot_join(config: EngineConfig, error: HoldfastError) -> NoReturn:
    """Raises it, with the number of the node, when the head knows of it; or as it is, where there is no head."""
    join_head(config, lambda: Failure.of(error))
    raise AssertionError("the head has let a node in that cannot join")


def join_head(config: EngineConfig, report: Report) -> Wire:
    """A connection to a head that has let this node in. Tries again while there is no head; raises what the head says
    when it refuses, and where there is none to hear it, why this node cannot join."""
    place = named_place(config.master_addr, config.master_port)
    assert config.node_secret is not None
    key, told = secret.derive_key(config.node_secret), ""
    began_s, said_s = time.monotonic(), -SAID_EVERY_S  # At once, then now and then.
    while True:
        # Before anybody waits for it: a driver may take longer to answer than the head lets a stranger be silent.
        reported = _reported(config, report)
        if isinstance(reported, Failure) and reported.message != told:
            # It may be long until there is a head: whoever looks at this node knows at once.
            told = reported.message
            log.error("node %d cannot join, which the head at %s is told: %s", config.node_rank, place, told)
        try:
            return _join(config, key, reported)
        except HoldfastError:  # Of which some are OSErrors too.
            raise
        except (OSError, EOFError, msgspec.DecodeError) as error:
            now_s, why = time.monotonic(), _why(error)
            if now_s - said_s >= SAID_EVERY_S:
                said_s = now_s
                log.info("looking for the head at %s: %s", place, why)
            if now_s - began_s >= config.node_timeout:
                if isinstance(reported, Failure):
                    raise reported.error() from None
                raise EngineError(
                    f"node {config.node_rank} has not reached the head at {place}: {why}",
                    code=NODES_MISSING,
                    needed=f"the head within {format_duration(config.node_timeout)}",
                    fix="start the head (--node-rank 0) with the same --master-addr and --master-port, and let this"
                    f" machine through to that port; for what ranks say to one another, {OPEN_PORTS}",
                ) from error
        time.sleep(TRY_EVERY_S)


def _reported(config: EngineConfig, report: Report) -> messages.NodeReport | Failure:
    """What keeps a node from joining is for the head to hear: a GPU that is gone, say."""
    try:
        return report()
    except HoldfastError as error:
        return Failure.of(error)
    except OSError as error:
        return Failure.of(_unread(config, error))


def _unread(config: EngineConfig, error: OSError) -> EngineError:
    return EngineError(f"node {config.node_rank} cannot read what it needs: {error}")


def _why(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return "what answers there is no head of nodes, or one of a version that is not understood"
    return str(error) or "it has hung up"


def _join(config: EngineConfig, key: bytes, reported: messages.NodeReport | Failure) -> Wire:
    source = None if config.node_addr is None else (config.node_addr, 0)
    wire = Wire(socket.create_connection((config.master_addr, config.master_port), CONNECT_S, source))
    try:
        _introduce(config, key, wire, reported)
    except BaseException:
        wire.close()
        raise
    return wire


def _introduce(config: EngineConfig, key: bytes, wire: Wire, reported: messages.NodeReport | Failure) -> None:
    wire.wait_at_most(HANDSHAKE_S)
    nonce = os.urandom(messages.NONCE_BYTES)
    wire.send(messages.encode(messages.NodeHello(nonce, version=own_version())))
    challenge = messages.decode_from_head(wire.receive(MOST_BEFORE_PROOF))
    if not isinstance(challenge, messages.Challenge):
        raise OSError("what answers there is no head")
    if not proves(challenge.proof, key, secret.HEAD, nonce, challenge.nonce):
        wire.send(messages.encode(messages.OtherSecret()))
        raise other_secret()
    shown = proof(key, secret.AGENT, nonce, challenge.nonce)
    wire.wait_at_most(JOINED_S)
    if challenge.protocol != messages.PROTOCOL:
        versions = own_version(), challenge.version
        reported = Failure.of(other_protocol(*versions, messages.PROTOCOL, challenge.protocol))
    if isinstance(reported, Failure):
        name = platform.node()[:255]
        wire.send(messages.encode(messages.CannotJoin(shown, config.node_rank, name, reported)))
    else:
        said = msgspec.structs.replace(reported, host=config.node_addr or wire.own_host)
        wire.send(messages.encode(messages.Join(shown, said)))
    answer = messages.decode_from_head(wire.receive(MOST_BEFORE_PROOF))
    if isinstance(answer, messages.Refused):
        raise answer.failure.error()
    if not isinstance(answer, messages.Welcome):
        raise OSError("the head says something else than expected")
